"""gpt-oss as it is published: experts of a layer in one tensor, in MXFP4. The oracle is the class
of transformers with the weights that the blocks stand for, written out from the definition."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import make_runner, pack
from safetensors.torch import load_file, save_file
from test_gguf import trained_bpe
from tiny_families import MODELS, make_model
from tiny_quantized import LEFT_OUT, save_mxfp4

from magicdec.bench.model_check import check_model
from magicdec.distributed.tensor_parallel import Shard
from magicdec.hardware import costs
from magicdec.kv.view import SinksAndWindow
from magicdec.model.checkpoint import checked
from magicdec.model.checkpoint.finite import WeightsRefused
from magicdec.model.checkpoint.source import ModelSource, find_model, load_transformer
from magicdec.model.checkpoint.stacked_experts import stacked
from magicdec.model.families.hf_config import load_model_config
from magicdec.model.transformer import Transformer
from magicdec.names import STORED
from magicdec.runner.forward_batch import ForwardBatch

EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The directory, and transformers' model."""
    directory = tmp_path_factory.mktemp("gpt-oss")
    family, sizes = MODELS["gpt-oss"]
    model = make_model(family, sizes | {"intermediate_size": 96, "vocab_size": 420})
    save_mxfp4(directory, model)
    return directory, model


def loaded(source: ModelSource, shard: Shard = Shard()) -> Transformer:
    place = shard, None, torch.float32, torch.device("cpu")
    return load_transformer(source.config, source.weights, *place, stored_as=STORED)


def changed(
    published: tuple[Path, Any], target: Path, tensors: dict[str, Any], config: dict[str, Any]
) -> Path:
    """A copy with other tensors (None: without) and fields."""
    stored = load_file(published[0] / "model.safetensors") | tensors
    save_file({n: t for n, t in stored.items() if t is not None}, target / "model.safetensors")
    raw = json.loads((published[0] / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v != "gone"}))
    return target


@torch.inference_mode()
def test_logits_are_transformers(published: tuple[Path, Any]) -> None:
    """Past windows; with packed layers, and on a rank of four, whose inputs end within a block."""
    source = find_model("--model", str(published[0]))
    text = torch.arange(60).unsqueeze(0) * 7 % 131
    wanted = published[1](text).logits
    model = loaded(source)
    for own in (model, pack(loaded(source))):
        runner = make_runner(own, 1, 64)
        runner.allocate(0)
        found = runner.forward(ForwardBatch(text, [0], num_outputs=60))
        assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    share = loaded(source, Shard(2, 4))
    whole = model.blocks[1].mlp.down[3].dense()
    first, last = Shard(2, 4).mlp_units(96)
    assert 0 < first < last < 96 and last % 32
    assert torch.equal(share.blocks[1].mlp.down[3].dense(), whole[:, first:last])


def test_weights_are_those_that_transformers_reads(published: tuple[Path, Any]) -> None:
    """Its own function for blocks, in bfloat16, of which every weight is one."""
    convert = transformers.integrations.mxfp4.convert_moe_packed_tensors
    stored = load_file(published[0] / "model.safetensors")
    source = find_model("--model", str(published[0])).weights
    blocks = stored[f"{EXPERTS}.gate_up_proj_blocks"], stored[f"{EXPERTS}.gate_up_proj_scales"]
    theirs = convert(*blocks, dtype=torch.bfloat16)  # [E, hidden, 2 F]
    for expert in (0, 7):
        for first, name in enumerate(("gate_proj", "up_proj")):
            ours = source.read(f"{EXPERTS}.{expert}.{name}.weight")
            assert torch.equal(ours, theirs[expert, :, first::2].T.float())
            part = source.read(f"{EXPERTS}.{expert}.{name}.weight", (slice(3, 20), slice(33, 60)))
            assert torch.equal(part, ours[3:20, 33:60])


def test_a_published_config_is_read(published: tuple[Path, Any], tmp_path: Path) -> None:
    """With the fields of its own that the hub's files have."""
    own = {"experts_per_token": 3, "initial_context_length": 32, "attention_bias": True}
    path = changed(published, tmp_path, {}, own)
    read = load_model_config(path)
    assert replace(read, name="") == replace(load_model_config(published[0]), name="")
    experts = read.experts
    assert experts is not None and experts.gate is not None
    assert (experts.num_experts, experts.num_used, experts.gate.limit) == (8, 3, 0.5)
    assert not read.rope.truncate and read.windows == (None, 24)


def test_bytes_of_the_plan_are_those_that_are_held(published: tuple[Path, Any]) -> None:
    source = find_model("--model", str(published[0]))
    model = loaded(source)
    held = [*model.parameters(), *model.buffers()]
    size = sum(tensor.nbytes for tensor in held)
    planned = costs.stored_bytes(source.config, Shard(), 4, is_packed=False, low_bit=STORED)
    assert abs(planned - size) <= 0.01 * size


TENSORS: list[tuple[dict[str, Any], str]] = [
    ({"gate_up_proj_scales": None}, r"gate_proj.scales is missing"),
    ({"down_proj_scales": torch.zeros(8, 64, 2, dtype=torch.uint8)}, "scales has shape"),
    ({"down_proj_blocks": torch.zeros(8, 64, 48, dtype=torch.uint8)}, "expected 4 dimensions"),
    ({"gate_up_proj_bias": torch.zeros(8, 191)}, "many outputs for each of gate_proj, up_proj"),
    ({"gate_up_proj_bias": None}, "experts.0.gate_proj.bias is missing"),
    ({"down_proj": torch.zeros(8, 96, 64)}, "is stored as float32|is not read"),
]


@pytest.mark.parametrize(("tensors", "message"), TENSORS, ids=[m for _, m in TENSORS])
def test_tensors_that_do_not_fit_are_refused(
    published: tuple[Path, Any], tmp_path: Path, tensors: dict[str, Any], message: str
) -> None:
    tensors = {f"{EXPERTS}.{name}": tensor for name, tensor in tensors.items()}
    path = changed(published, tmp_path, tensors, {})
    with pytest.raises(ValueError, match=message) as caught:
        find_model("--model", str(path))
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_an_exponent_beyond_float32_is_refused(published: tuple[Path, Any], tmp_path: Path) -> None:
    scales = torch.full((8, 64, 3), 255, dtype=torch.uint8)
    path = changed(published, tmp_path, {f"{EXPERTS}.down_proj_scales": scales}, {})
    source = find_model("--model", str(path))
    with pytest.raises((ValueError, WeightsRefused), match=r"a scale of MXFP4 is 255, beyond 252"):
        loaded(source)


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"rope_parameters": "gone"}, "rope_parameters is missing"),
    ({"initial_context_length": 64}, "initial_context_length 64 is not supported"),
    ({"experts_per_token": 2}, "num_experts_per_tok 3 and experts_per_token 2 contradict"),
    ({"swiglu_limit": -1.0}, "swiglu_limit -1.0 is not a positive"),
    ({"num_experts_per_tok": 9}, "9 is more than the 8 experts"),
    ({"layer_types": ["chunked_attention"] * 3}, "'chunked_attention' is not supported"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    (
        {"quantization_config": {"quant_method": "mxfp4", **LEFT_OUT, "group": 3}},
        "group 3 is not known",
    ),
]


@pytest.mark.parametrize(("config", "message"), CONFIGS, ids=[m for _, m in CONFIGS])
def test_configs_that_would_be_computed_otherwise_are_refused(
    published: tuple[Path, Any], tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    path = changed(published, tmp_path, {}, config)
    with pytest.raises(ValueError, match=message):
        find_model("--model", str(path))


@torch.inference_mode()
def test_drafts_see_sinks_of_their_own_keys(published: tuple[Path, Any]) -> None:
    """A forward over a window of the cache has the sink logits of the model, as one of all keys."""
    source = find_model("--model", str(published[0]))
    model = loaded(source)
    outputs = []
    for block in (None, *model.blocks):
        if block is not None:
            block.attention.sinks.fill_(-40.0)  # none of them counts
        runner = make_runner(model, 1, 64)
        runner.allocate(0)
        runner.forward(ForwardBatch(torch.arange(40).unsqueeze(0), [0], num_outputs=1))
        outputs.append(runner.forward(ForwardBatch(torch.tensor([[5]]), [0], SinksAndWindow(2, 9))))
    assert all(not torch.equal(a, b) for a, b in pairwise(outputs))


def test_a_check_compares_it_with_transformers(
    published: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `magicdec model check`, whose transformers takes the stacked tensors."""
    monkeypatch.setenv(checked.VARIABLE, str(tmp_path / "checked"))
    path = changed(published, tmp_path, {}, {})
    trained_bpe("gpt-2").save(str(path / "tokenizer.json"))
    check = check_model(str(path), 1e-9)
    assert check.outcome == checked.EQUAL, check.lines


def test_experts_are_stacked_as_they_were(tmp_path: Path) -> None:
    family, sizes = MODELS["gpt-oss"]
    model = make_model(family, sizes)
    model.save_pretrained(tmp_path)
    read = find_model("--model", str(tmp_path)).weights
    found = stacked({name: read.read(name) for name in read.tensors})
    assert {name: tensor.shape for name, tensor in found.items()} == {
        name: tensor.shape for name, tensor in model.named_parameters()
    }
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name], parameter), name
