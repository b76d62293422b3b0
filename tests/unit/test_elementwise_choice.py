"""Who computes norms, rotation and gates: what `auto` becomes, what is refused, and that a user is
told; and that a loaded model has what was chosen."""

import re
from dataclasses import replace

import pytest
import torch
from conftest import TINY, tiny_transformer

from magicdec.cli import flags as cli
from magicdec.config.choices.choice import INTERPRETED
from magicdec.config.machine import Machine, ModelTraits
from magicdec.config.resolve import resolve
from magicdec.config.resolved import ResolvedConfig
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import DecodingSection, DraftSection, ModelSection, ParallelSection
from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.block import MLP, RMSNorm
from magicdec.model.checkpoint.source import find_model
from magicdec.model.elementwise.native import NativeElementwise
from magicdec.model.elementwise.operators import Elementwise
from magicdec.model.transformer import Transformer
from magicdec.names import ELEMENTWISE, load_named
from magicdec.setup.loading import load_kind
from magicdec.setup.model_plan import Kinds

PLAIN = Machine(2)
FAST = Machine(2, has_compiler=True, has_bfloat16_products=True)
LAYERS = replace(FAST, avoids_native_steps=True)
GPU = replace(FAST, has_cuda=True)
BARE_GPU = replace(GPU, missing_backends={"triton": "triton is not installed; pip install triton"})


def resolved(machine: Machine, asked: str = "auto", **others: str) -> ResolvedConfig:
    device = others.pop("device", "auto")
    model = ModelSection(elementwise=asked, **others)
    return resolve(RunConfig(model=model, parallel=ParallelSection(device=device)), machine)


@pytest.mark.parametrize(
    ("machine", "others", "name", "reason"),
    [
        (PLAIN, {}, "torch", "auto: --linear torch"),
        (FAST, {}, "native", "auto: --linear packed"),
        (FAST, {"linear": "torch"}, "torch", "auto: --linear torch"),
        (GPU, {}, "triton", "auto: CUDA"),
        (GPU, {"device": "cpu"}, "native", "auto: --linear packed"),
        (BARE_GPU, {}, "torch", "auto: torch; triton is not installed; pip install triton"),
        (FAST, {"asked": "torch"}, "torch", "asked for"),
        (FAST, {"asked": "native", "linear": "torch"}, "native", "asked for"),
        (PLAIN, {"asked": "triton"}, "triton", INTERPRETED),
    ],
)
def test_what_is_chosen_and_why(
    machine: Machine, others: dict[str, str], name: str, reason: str
) -> None:
    choice = resolved(machine, **others).model.elementwise
    assert (choice, choice.why) == (name, reason)


@pytest.mark.parametrize(
    ("machine", "asked", "others", "obstacle"),
    [
        (GPU, "native", {}, "it is for --device cpu"),
        (PLAIN, "native", {"dtype": "bfloat16"}, "it needs a C++ compiler (on Debian: apt "),
        (BARE_GPU, "triton", {}, "triton is not installed; pip install triton"),
    ],
)
def test_what_cannot_be_is_refused(
    machine: Machine, asked: str, others: dict[str, str], obstacle: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(f"--elementwise {asked}: {obstacle}")) as error:
        resolved(machine, asked, **others)
    assert str(error.value).endswith("; choose from auto, torch") and "\n" not in str(error.value)


def test_what_is_slower_or_interpreted_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    missing = "triton is not installed; pip install triton"
    message = f"--attention auto: flash_attn; {missing}\n--elementwise auto: torch; {missing}\n"
    machines = {
        message: BARE_GPU,
        "": replace(GPU, has_bfloat16_products=False),
    }
    for line, machine in machines.items():
        cli.announce_backend(resolved(machine))
        assert capsys.readouterr().err == line
    cli.announce_backend(resolved(FAST, "triton"))
    assert capsys.readouterr().err == f"--elementwise triton: {INTERPRETED}\n"


def users(model: Transformer) -> list[Elementwise]:
    """Of every part that asks for it."""
    return [m.elementwise for m in model.modules() if isinstance(m, RMSNorm | MLP | Transformer)]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_loaded_model_has_what_was_chosen(name: str) -> None:
    cpu = torch.device("cpu")
    source = find_model("--model", "demo-draft")
    found = users(load_kind(source, Shard(), Kinds("bfloat16", "bfloat16", "torch", name), cpu))
    layers = source.config.num_layers
    assert len(found) == 3 * layers + 2
    assert {type(used) for used in found} == {load_named(ELEMENTWISE, name)}


def test_every_part_of_a_model_takes_another() -> None:
    model = tiny_transformer(replace(TINY, qk_norm=True))
    assert {type(user) for user in users(model)} == {Elementwise}
    model.use(NativeElementwise())
    assert {type(user) for user in users(model)} == {NativeElementwise}
    assert len(users(model)) == 5 * TINY.num_layers + 2


@pytest.mark.parametrize(
    ("machine", "others", "name", "reason"),
    [
        (FAST, {}, "on", "auto: on"),
        (FAST, {"native_steps": "off"}, "off", "asked for"),
        (LAYERS, {}, "off", "auto: off, MAGICDEC_NATIVE_STEPS=off"),
        (LAYERS, {"native_steps": "on"}, "on", "asked for"),
        (PLAIN, {}, "off", "auto: off, --attention grouped"),
        (FAST, {"linear": "torch"}, "off", "auto: off, --linear torch"),
        (FAST, {"asked": "torch"}, "off", "auto: off, --elementwise torch"),
        (GPU, {}, "off", "auto: off, --device cuda"),
    ],
)
def test_when_a_forward_is_one_native_call(
    machine: Machine, others: dict[str, str], name: str, reason: str
) -> None:
    choice = resolved(machine, **others).model.native_steps
    assert (choice, choice.why) == (name, reason)


def test_native_steps_that_cannot_be_are_refused() -> None:
    message = "--native_steps on: not possible with --linear torch; choose from auto, off"
    with pytest.raises(ValueError, match=f"^{message}$"):
        resolved(FAST, linear="torch", native_steps="on")
    fp8 = RunConfig(
        model=ModelSection(native_steps="on"),
        decoding=DecodingSection("speculative", "self", draft_weights="fp8"),
    )
    message = "--native_steps on: not possible with --draft_weights fp8; choose from auto, off"
    with pytest.raises(ValueError, match=f"^{message}$"):
        resolve(fp8, FAST)
    config = RunConfig(parallel=ParallelSection(collectives="gloo"))
    ranks = replace(FAST, world_size=2, local_world_size=2, shared_memory_obstacle=None)
    assert resolve(config, ranks).model.native_steps.why == "auto: off, --collectives gloo"
    layers = resolve(RunConfig(), FAST, ModelTraits(layer_obstacle="layer norms")).model
    assert layers.native_steps.why == "auto: off, the model has layer norms"


def test_layers_that_keep_a_model_from_native_steps_are_announced(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What the parts of a step keep from it is not: `--linear torch` is the user's own choice."""
    asked = RunConfig(draft=DraftSection("demo-draft"))
    obstacles = [ModelTraits(layer_obstacle=w) for w in ("layer norms", "learned positions")]
    config = resolve(asked, FAST, *obstacles)
    cli.announce_backend(config)
    assert capsys.readouterr().err == (
        "--native_steps auto: off, the model has layer norms\n"
        "draft: --native_steps auto: off, the model has learned positions\n"
    )
    for model in (ModelSection(linear="torch"), ModelSection(native_steps="off"), ModelSection()):
        traits = [] if model == ModelSection() else obstacles
        cli.announce_backend(resolve(replace(asked, model=model), FAST, *traits))
    assert capsys.readouterr().err == ""
