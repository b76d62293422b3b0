"""What is refused of EAGLE-3 heads, in one line: heads of another model, broken ones, and runs that
cannot take states; and the conventions by which heads number layers."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import TINY, Command, save_checkpoint, tiny_transformer
from draft_heads import HeadForm, random_head, write_head
from safetensors.torch import load_file, save_file
from serving_command import prepare_as

from magicdec.config.run_config import RunConfig
from magicdec.config.sections import DraftSection, KVSection
from magicdec.distributed.groups import Group, Launch, ParallelGroups
from magicdec.model.checkpoint.source import find_model
from magicdec.model.config import EagleConfig, ModelConfig
from magicdec.output.console import Silent
from magicdec.runner.observers.hidden_states import HiddenStates
from magicdec.setup.head_checks import check_head, state_layers
from magicdec.setup.loading import LoadedModels, make_draft, make_runner
from magicdec.setup.memory_plan import model_plans_of, plan_of
from magicdec.setup.prepare import SetupCache, find

TARGET = replace(TINY, vocab_size=2051, num_layers=8)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tiny_transformer(TARGET), tmp_path_factory.mktemp("target"))


def edit_config(**changes: Any) -> Callable[[Path], None]:
    """Change fields of a head's config.json, or remove those that become "absent"."""

    def edit(head: Path) -> None:
        config = json.loads((head / "config.json").read_text())
        for field, value in changes.items():
            config[field] = value
            if value == "absent":
                del config[field]
        (head / "config.json").write_text(json.dumps(config))

    return edit


def edit_tensors(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def edit_file(head: Path) -> None:
        tensors = load_file(head / "model.safetensors")
        edit(tensors)
        save_file(tensors, head / "model.safetensors")

    return edit_file


def nothing(head: Path) -> None:
    pass


def moved(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The marks, of which the last belongs to the next id."""
    marks = tensors["t2d"].clone()
    last = int(marks.nonzero()[-1])
    marks[last] = False
    marks[(last + 1) % len(marks)] = True
    return marks


CASES: dict[str, tuple[HeadForm, ModelConfig, Callable[[Path], None], str, str]] = {
    "another width": (
        HeadForm(),
        replace(TARGET, hidden_size=96),
        nothing,
        "",
        "takes hidden states of 96 numbers, but those of {target} have 48; choose the head of",
    ),
    "another vocabulary": (
        HeadForm(),
        replace(TARGET, vocab_size=999),
        nothing,
        "",
        "is for a vocabulary of 999 ids, but {target} has 2051; choose the head of this model",
    ),
    "another number of states": (
        HeadForm(capture=(1, 2)),
        TARGET,
        edit_config(eagle_aux_hidden_state_layer_ids=[1, 2, 3]),
        "",
        "fc.weight takes 2 states, but config.json lists 3 layers for them",
    ),
    "states of another size": (
        HeadForm(),
        TARGET,
        edit_config(target_hidden_size=50),
        "",
        "fc.weight has shape (48, 144), which takes no whole number of states of 50; correct",
    ),
    "layers outside the model": (
        HeadForm(capture=(2, 4, 9)),
        TARGET,
        nothing,
        "",
        "the layers 2, 4, 9 are not all from 0 to the 8 of {target}; give --eagle_layers",
    ),
    "layers asked for outside the model": (
        HeadForm(),
        TARGET,
        nothing,
        "--eagle_layers 2 4 -1",
        "--eagle_layers -1 is too small; it must be at least 0",
    ),
    "too few layers asked for": (
        HeadForm(),
        TARGET,
        nothing,
        "--eagle_layers 2 4",
        "--eagle_layers 2 4: --draft eagle:{head} takes 3 states, not 2",
    ),
    "no map": (
        HeadForm(),
        TARGET,
        edit_tensors(lambda tensors: tensors.pop("d2t")),
        "",
        "d2t is missing, which says what the 40 ids of the draft vocabulary are among the",
    ),
    "a map to ids that are not there": (
        HeadForm(),
        TARGET,
        edit_tensors(lambda tensors: tensors["d2t"].add_(5000)),
        "",
        "d2t maps 40 draft ids to 40 ids from ",
    ),
    "a map of another size": (
        HeadForm(),
        TARGET,
        edit_config(draft_vocab_size=41),
        "",
        "d2t has shape (40,), expected (41,), the draft vocabulary",
    ),
    "marks of other ids than those of the map": (
        HeadForm(),
        TARGET,
        edit_tensors(lambda tensors: tensors["t2d"].copy_(moved(tensors))),
        "",
        "; take both tables from the head's maker, or remove t2d if d2t is right",
    ),
    "marks of more ids than the map has": (
        HeadForm(),
        TARGET,
        edit_tensors(lambda tensors: tensors["t2d"].fill_(True)),
        "",
        "t2d marks 2051 ids, and d2t maps to 40; take both tables",
    ),
    "marks of another vocabulary": (
        HeadForm(),
        TARGET,
        edit_tensors(lambda tensors: tensors.update(t2d=tensors["t2d"][:2000].clone())),
        "",
        "t2d has shape (2000,), expected (2051,), the vocabulary of the target",
    ),
    "a head that drafts in parallel": (
        HeadForm(),
        TARGET,
        edit_config(architectures=["PEagleDraftModel"]),
        "",
        "architecture 'PEagleDraftModel' of a draft head is not supported; choose an EAGLE-3 head",
    ),
    "no fc": (
        HeadForm(),
        TARGET,
        edit_tensors(lambda tensors: tensors.pop("fc.weight")),
        "",
        "fc.weight is missing, which an EAGLE-3 head has",
    ),
    "a tensor that is not read": (
        HeadForm(),
        TARGET,
        edit_tensors(lambda tensors: tensors.update(other=torch.zeros(3))),
        "",
        "other of shape (3,) is not part of the model",
    ),
    "another algorithm": (
        HeadForm(),
        TARGET,
        edit_config(speculators_model_type="dflash"),
        "",
        "speculators_model_type 'dflash' is not supported; choose from eagle3",
    ),
    "another family of layers": (
        HeadForm(),
        TARGET,
        edit_config(transformer_layer_config={"model_type": "bloom"}),
        "",
        "model_type 'bloom' is not supported; choose from llama, qwen2, qwen3",
    ),
    "an unknown field": (
        HeadForm(),
        TARGET,
        edit_config(use_dynamic_tree=True),
        "",
        "use_dynamic_tree True is not known for Eagle3Speculator, and might change what it",
    ),
    "no word about the residual": (
        HeadForm(),
        TARGET,
        edit_config(norm_before_residual="absent"),
        "",
        "norm_before_residual is missing, which some programs read as true and others as false",
    ),
    "the last state alone": (
        HeadForm(program="specforge"),
        TARGET,
        edit_config(eagle_config={"use_aux_hidden_state": False}),
        "",
        "use_aux_hidden_state False is not supported; choose from True",
    ),
    "layers that are counted otherwise": (
        HeadForm(program="specforge"),
        TARGET,
        edit_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}),
        "",
        "lists the layers 1, 4, 6, which some programs count from the embedding and others from",
    ),
    "a policy that copies": (
        HeadForm(),
        TARGET,
        nothing,
        "--kv_policy snapkv --budget 40",
        "--kv_policy snapkv: a draft head keeps its whole cache or a window of it; choose from",
    ),
}


@pytest.mark.parametrize(
    ("form", "made_for", "edit", "words", "message"), CASES.values(), ids=CASES
)
def test_a_head_that_does_not_fit_is_refused(
    form: HeadForm,
    made_for: ModelConfig,
    edit: Callable[[Path], None],
    words: str,
    message: str,
    target: Path,
    tmp_path: Path,
    command: Command,
) -> None:
    head = tmp_path / "head"
    write_head(head, made_for, form)
    edit(head)
    draft = f"eagle:{head}"
    ended = command("run", "--model", target, "--draft", draft, "--prefix_len", 32, *words.split())
    expected = message.format(target=target.name, head=head.name)
    assert ended.code == 2 and expected in ended.err, ended.err
    assert ended.err.count("\n") == 1


def test_a_target_that_scales_its_embedding_has_no_head(target: Path, tmp_path: Path) -> None:
    write_head(tmp_path / "head", TARGET, HeadForm())
    head = find_model("--draft", str(tmp_path / "head"))
    plain = find_model("--model", str(target))
    check_head(plain, head, is_staged=False)
    scaled = replace(plain, config=replace(plain.config, embedding_scale=7.0))
    with pytest.raises(ValueError, match=r"takes embedded tokens as they are, but .* scales them"):
        check_head(scaled, head, is_staged=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run --model {head}", "--model head: it is an EAGLE-3 head, which drafts for another"),
        ("run --draft model:{head}", "it is an EAGLE-3 head; name it as --draft eagle:DIR"),
        ("run --draft eagle:demo-draft", "it is a model, not an EAGLE-3 head; name it as --draft"),
        ("run --draft eagle", "--draft eagle is not known; choose from self, model:NAME, eagle:"),
        ("run --draft self --eagle_layers 1 2 3", "--eagle_layers does nothing here"),
    ],
)
def test_a_head_is_named_as_one(words: str, message: str, tmp_path: Path, command: Command) -> None:
    demo = find_model("--model", "demo").config
    write_head(tmp_path / "head", demo, HeadForm())
    ended = command(*words.format(head=tmp_path / "head").split(), "--prefix_len", 32)
    assert ended.code == 2 and message in ended.err, ended.err


@pytest.mark.parametrize("name", ["recurrent", "pipeline"])
def test_stages_have_no_states_for_a_head(name: str, tmp_path: Path) -> None:
    write_head(tmp_path / "head", find_model("--model", "demo").config, HeadForm())
    words = "--modes", "ring+draft" if name == "recurrent" else "pipeline+draft"
    with pytest.raises(ValueError, match="takes states of layers that stages"):
        prepare_as(name, tmp_path, "--draft", f"eagle:{tmp_path / 'head'}", *words, world_size=2)


@pytest.mark.parametrize(
    ("listed", "asked", "expected"),
    [
        (None, None, (2, 4, 5)),
        ([2, 4, 5], None, (2, 4, 5)),
        ([1, 3, 4], None, (2, 4, 5)),  # as SGLang counts
        ([1, 4, 6], (1, 4, 6), (1, 4, 6)),
        (None, (0, 3, 8), (0, 3, 8)),
    ],
)
@pytest.mark.parametrize("place", ["top", "eagle_config"])
def test_layers_are_counted_as_the_head_means_them(
    listed: list[int] | None,
    asked: tuple[int, ...] | None,
    expected: tuple[int, ...],
    place: str,
    target: Path,
    tmp_path: Path,
) -> None:
    write_head(tmp_path, TARGET, HeadForm(program="specforge"))
    stated = {"eagle_aux_hidden_state_layer_ids": listed}
    edit_config(**(stated if place == "top" else {"eagle_config": stated}))(tmp_path)
    config = RunConfig(draft=DraftSection(str(tmp_path), eagle_layers=asked))
    sources = (find_model("--model", str(path)) for path in (target, tmp_path))
    assert state_layers(config, *sources) == expected


# Of so many layers, those before whose input vLLM takes states where a head lists none:
# `get_eagle3_default_aux_hidden_state_layers` of its models, which divide rounding down.
VLLM_LAYERS = {
    **{7: (2, 3, 4), 8: (2, 4, 5), 16: (2, 8, 13), 27: (2, 13, 24), 28: (2, 14, 25)},
    **{31: (2, 15, 28), 32: (2, 16, 29), 33: (2, 16, 30), 61: (2, 30, 58), 80: (2, 40, 77)},
}


@pytest.mark.parametrize("num_layers", VLLM_LAYERS)
def test_a_head_that_lists_no_layers_takes_those_of_vllm(num_layers: int) -> None:
    """Also where the number of layers is odd; and a list that counts from outputs, as SGLang's."""
    expected = VLLM_LAYERS[num_layers]

    def found(listed: tuple[int, ...] | None) -> tuple[int, ...]:
        eagle = EagleConfig(target_vocab_size=9, state_size=9, capture=listed)
        target: Any = SimpleNamespace(name="t", config=SimpleNamespace(num_layers=num_layers))
        draft: Any = SimpleNamespace(name="d", config=SimpleNamespace(eagle=eagle, is_mtp=False))
        return state_layers(RunConfig(draft=DraftSection("d")), target, draft)

    assert found(None) == found(expected) == expected
    assert found(tuple(layer - 1 for layer in expected)) == expected


def test_names_of_other_programs_are_the_same_head(tmp_path: Path) -> None:
    """AngelSlim's prefix, SGLang's norms of states, EAGLE's pickled file, and its architecture."""
    form = HeadForm(fc_norm=True)
    found = random_head(TARGET, form)
    write_head(tmp_path / "one", TARGET, form)
    other = tmp_path / "other"
    write_head(other, TARGET, replace(form, program="specforge"))
    edit_config(architectures=["LlamaForCausalLM"], use_aux_norm=True, fc_norm="absent")(other)
    norms = {f"fc_norm.{i}.": f"aux_norm_{name}." for i, name in enumerate(("low", "mid", "high"))}
    renamed = {}
    for name, value in found.items():
        for old, new in norms.items():
            name = name.replace(old, new)
        renamed[f"model.{name.replace('layers.0.', 'midlayer.')}"] = value
    (other / "model.safetensors").unlink()
    torch.save(renamed, other / "pytorch_model.bin")
    first, second = (find_model("--draft", str(path)) for path in (tmp_path / "one", other))
    assert first.config.eagle is not None and second.config.eagle is not None
    kept = {"capture": None, "is_exact": False}
    assert replace(first.config.eagle, **kept) == second.config.eagle
    for name in first.weights.tensors:
        assert torch.equal(first.weights.read(name), second.weights.read(name)), name


@pytest.mark.parametrize("shares", [False, True], ids=["alone", "prefixes shared"])
@pytest.mark.parametrize("budget", [-1, 257])
def test_the_plan_has_the_bytes_of_a_head_its_cache_and_its_states(
    budget: int, shares: bool
) -> None:
    run_config = RunConfig(kv=KVSection(budget=budget)).with_draft("eagle:demo-eagle")
    run = find(run_config, Launch(0, 1, 0, 1), SetupCache())
    target_plan, head_plan = model_plans_of(run.config, run.models, 0)
    if shares:
        target_plan = replace(
            target_plan,
            block_tokens=16,
            cache_tokens=50_000,
            shares_prefixes=True,
            offloads=True,
            offload_tokens=999,
        )
        head_plan = head_plan.beside(target_plan)
    models = LoadedModels(torch.device("cpu"), Silent())
    alone = Group((0,), 0)
    runner = make_runner(target_plan, run.source, alone, models)
    draft = make_draft(run, ParallelGroups(0, 1, alone, draft=alone), models, target=target_plan)
    states = runner.observer(HiddenStates)
    assert draft is not None and draft.runner is not None and states is not None
    parameters = draft.runner.model.named_parameters()
    own = sum(p.nbytes for name, p in parameters if not name.startswith("embedding"))
    assert head_plan.weight_bytes == own
    assert head_plan.kv_bytes == draft.runner.cache.num_bytes
    assert target_plan.state_bytes == states.num_bytes
    for plan, own in ((target_plan, runner), (head_plan, draft.runner)):
        host = own.cache.host
        assert plan.host_bytes == (0 if host is None else host.num_bytes)
        assert plan.host_tokens == (1024 if shares else 0), "blocks of 64"
        whole = plan_of([plan])
        assert whole.kv + whole.draft_kv == plan.kv_bytes + plan.state_bytes + plan.host_bytes
