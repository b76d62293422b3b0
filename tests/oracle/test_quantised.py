"""Checkpoints that another program quantised: whole models against transformers on the weights that
their formats define, slices, and settings and tensors that are refused."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import test_gguf
import torch
import transformers
from conftest import Command, make_runner
from safetensors.torch import load_file, save_file
from test_gguf import check_logits, reference_model, trained_bpe
from tiny_quantized import (
    Integers,
    Layer,
    awq,
    fp8,
    gptq,
    packed,
    plain_integers,
    save_quantized,
    write_table,
)
from torch import Tensor

from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.checkpoint.convert import convert
from magicdec.model.checkpoint.quantized import matrix
from magicdec.model.checkpoint.quantized.mxfp4 import grouped_blocks
from magicdec.model.checkpoint.source import ModelSource, find_model, find_stored_config
from magicdec.model.linear.grouped import GroupedLinear
from magicdec.model.transformer import Transformer
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.setup.loading import load_kind
from magicdec.setup.model_checks import check_stored_groups
from magicdec.setup.model_plan import Kinds

Making = Callable[[tuple[int, int], int], Layer]


def gptq_layer(bits: int, group: int, less: int, **settings: Any) -> Making:
    def made(shape: tuple[int, int], seed: int) -> Layer:
        return gptq(Integers(shape, bits, group, seed, **settings), bits, less)

    return made


def awq_layer(shape: tuple[int, int], seed: int) -> Layer:
    return awq(Integers(shape, 4, 64, seed))


def compressed_layer(
    bits: int, group: int, is_symmetric: bool, is_packed: bool = True, **settings: Any
) -> Making:
    def made(shape: tuple[int, int], seed: int) -> Layer:
        zero = 1 << (bits - 1) if is_symmetric else None
        numbers = Integers(shape, bits, group, seed, zero=zero, **settings)
        write = partial(packed, bits=bits) if is_packed else plain_integers
        return write(numbers, is_symmetric=is_symmetric)

    return made


def fp8_layer(leaf: str, form: str, block: tuple[int, int] | None = None) -> Making:
    def made(shape: tuple[int, int], seed: int) -> Layer:
        whole = (1, shape[1]) if form == "channels" else shape
        return fp8(shape, block or whole, leaf, seed, form)

    return made


def gptq_table(bits: int = 4, group: int = 128, **more: Any) -> dict[str, Any]:
    table = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False}
    return table | {"sym": True, "checkpoint_format": "gptq", "damp_percent": 0.1} | more


def awq_table(**more: Any) -> dict[str, Any]:
    table = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}
    return table | {"version": "gemm", "modules_to_not_convert": None} | more


def compressed_table(
    form: str, weights: dict[str, Any], ignore: list[str] | None = None, **more: Any
) -> dict[str, Any]:
    full = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None, "dynamic": False}
    full |= {"actorder": None, "block_structure": None, "observer": "minmax"} | weights
    group = {"targets": ["Linear"], "weights": full, "input_activations": None} | more
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "global_compression_ratio": 1.5,
        "ignore": ["lm_head"] if ignore is None else ignore,
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group | {"output_activations": None}},
    }


def fp8_table(block: list[int] | None, **more: Any) -> dict[str, Any]:
    table = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    return table | {"weight_block_size": block, "modules_to_not_convert": ["lm_head"]} | more


CHANNEL = {"strategy": "channel", "symmetric": True}
DYNAMIC = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
INT = "int-quantized"
FLOAT = "float-quantized"
PACK = "pack-quantized"
BF16 = torch.bfloat16
# By name: the table of the config, what makes a layer, and the bits and scale of its numbers.
FORMATS: dict[str, tuple[dict[str, Any], Making, tuple[int, str, bool] | None]] = {
    "gptq, symmetric": (gptq_table(), gptq_layer(4, 128, 1, zero=8), (4, "float16", False)),
    "gptq, zero points": (
        gptq_table(group=32, sym=False),
        gptq_layer(4, 32, 1),
        (4, "float32", True),
    ),
    "gptq, second version": (
        gptq_table(group=64, sym=False, checkpoint_format="gptq_v2"),
        gptq_layer(4, 64, 0, scale=BF16),
        (4, "float32", True),
    ),
    "gptq, float32 scales": (
        gptq_table(group=64, sym=False),
        gptq_layer(4, 64, 1, scale=torch.float32),
        (8, "float32", False),
    ),
    "gptq, 8 bits, one group": (
        gptq_table(8, -1),
        gptq_layer(8, -1, 1, zero=128),
        (8, "float16", False),
    ),
    "gptq, 8 bits, zero points": (
        gptq_table(8, 96, sym=False),
        gptq_layer(8, 96, 1),
        (8, "float32", True),
    ),
    "gptq, act-order": (
        gptq_table(desc_act=True, sym=False),
        gptq_layer(4, 128, 1, scattered=0),
        (4, "float32", True),
    ),
    "gptq, act-order, second version": (
        gptq_table(8, 32, desc_act=True, checkpoint_format="gptq_v2"),
        gptq_layer(8, 32, 0, zero=128, scattered=0),
        (8, "float16", False),
    ),
    "awq": (awq_table(), awq_layer, (4, "float32", True)),
    "packed, group": (
        compressed_table(PACK, {"num_bits": 4, "strategy": "group", "group_size": 32}),
        compressed_layer(4, 32, True, scale=BF16),
        (4, "bfloat16", False),
    ),
    "packed, zero points": (
        compressed_table(
            PACK, {"num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": False}
        ),
        compressed_layer(4, 128, False, scale=BF16),
        (4, "float32", True),
    ),
    "packed, act-order": (
        compressed_table(
            PACK, {"num_bits": 4, "strategy": "group", "group_size": 64, "actorder": "group"}
        ),
        compressed_layer(4, 64, True, scale=BF16, scattered=0),
        (4, "bfloat16", False),
    ),
    "packed, 8 bits, channel": (
        compressed_table(PACK, CHANNEL),
        compressed_layer(8, -1, True, scale=torch.float32),
        (8, "float32", False),
    ),
    "packed, 8 bits, zero points": (
        compressed_table(PACK, CHANNEL | {"symmetric": False}),
        compressed_layer(8, -1, False),
        (8, "float32", True),
    ),
    "integers, channel": (
        compressed_table(INT, CHANNEL),
        compressed_layer(8, -1, True, False, scale=BF16),
        (8, "bfloat16", False),
    ),
    "integers, zero points": (
        compressed_table(INT, {"strategy": "group", "group_size": 64, "symmetric": False}),
        compressed_layer(8, 64, False, False),
        (8, "float32", True),
    ),
    "fp8, blocks": (
        fp8_table([128, 128]),
        fp8_layer("weight_scale_inv", "blocks", (128, 128)),
        None,
    ),
    "fp8, ragged blocks": (
        fp8_table([96, 160]),
        fp8_layer("weight_scale_inv", "blocks", (96, 160)),
        None,
    ),
    "fp8, exponents": (
        fp8_table([128, 128], scale_fmt="ue8m0"),
        fp8_layer("weight_scale_inv", "exponents", (128, 128)),
        None,
    ),
    "fp8, one scale": (fp8_table(None), fp8_layer("weight_scale_inv", "scalar"), None),
    "floats, channel": (
        compressed_table(FLOAT, CHANNEL | {"type": "float"}, input_activations=DYNAMIC),
        fp8_layer("weight_scale", "channels"),
        None,
    ),
    "floats, one scale": (
        compressed_table(FLOAT, {"strategy": "tensor", "type": "float"}),
        fp8_layer("weight_scale", "one"),
        None,
    ),
    "floats, blocks": (
        compressed_table(
            FLOAT, {"strategy": "block", "type": "float", "block_structure": [128, 128]}
        ),
        fp8_layer("weight_scale", "blocks", (128, 128)),
        None,
    ),
}


def saved(path: Path, name: str, **settings: Any) -> Any:
    table, made, _ = FORMATS[name]
    model = reference_model(settings.pop("kind", "Llama"))
    save_quantized(path, model, table, made, **settings)
    return model


def check_values(source: ModelSource, model: Any, kind: tuple[int, str, bool] | None) -> None:
    """All weights and slices of them, to the bit, as floats and as numbers in groups."""
    for name, parameter in model.named_parameters():
        assert torch.equal(source.weights.read(name), parameter.data), name
        if parameter.dim() == 1:
            continue
        tensor = source.weights.tensors[name]
        form = tensor.numbers
        assert (form is None) == (kind is None or name.startswith(("lm_head", "model.embed")))
        for rows in (slice(0, 7), slice(60, 70), slice(1, len(parameter) - 3)):
            for columns in (slice(33, 95), slice(90, 203)):  # within a block, and across blocks
                found = source.weights.read(name, (rows, columns))
                assert torch.equal(found, parameter.data[rows, columns]), (name, rows)
            if form is None:
                continue
            assert (form.bits, form.scale, form.has_minimum) == kind
            has_order = source.weights.input_order(name) is not None
            columns = slice(None) if has_order else slice(form.group, 2 * form.group)
            numbers = source.weights.read_numbers(name, (rows, columns))
            assert numbers.format == form and numbers.scale.dtype == getattr(torch, form.scale)
            assert torch.equal(numbers.dense(), parameter.data[rows, columns]), (name, rows)
            assert form.least <= int(numbers.numbers.min())
            assert int(numbers.numbers.max()) < form.least + 2**form.bits


@pytest.fixture(autouse=True)
def few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are made in several parts."""
    monkeypatch.setattr(matrix, "MADE", 1 << 16)


# What is particular to each of these, another format has as well.
COMPOUND = {
    "gptq, 8 bits, zero points",
    "gptq, act-order, second version",
    "packed, zero points",
    "fp8, blocks",
    "floats, one scale",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.wide) if n in COMPOUND else n for n in FORMATS],
)
def test_a_model_computes_as_transformers_on_the_defined_weights(name: str, tmp_path: Path) -> None:
    model = saved(tmp_path, name)
    source = find_model("--model", str(tmp_path))
    kind = FORMATS[name][2]
    assert source.has_groups == (kind is not None)
    check_values(source, model, kind)
    check_logits(tmp_path, model)


@pytest.mark.parametrize("weights", ["stored", "int8"])
def test_ranks_share_a_quantised_mlp_in_whole_groups(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """80 units are 5 groups of 16, of which 3 ranks have two, two and one. Their partial products
    make the MLP of transformers with the weights that the numbers stand for."""
    monkeypatch.setattr(test_gguf, "WIDE", 80)
    model = saved(tmp_path, "integers, channel")
    if weights == "int8":
        round_as_int8(model)
    source = find_model("--model", str(tmp_path))
    kinds = Kinds("float32", weights)
    parts = [load_kind(source, Shard(rank, 3), kinds, torch.device("cpu")) for rank in range(3)]
    x = torch.randn(2, 5, 256, generator=torch.Generator().manual_seed(2))
    for layer, theirs in enumerate(model.model.layers):
        mlps = [part.blocks[layer].mlp for part in parts]
        assert all(isinstance(mlp.down, GroupedLinear) for mlp in mlps)
        assert [mlp.hidden(x).shape[-1] for mlp in mlps] == [32, 32, 16]
        with torch.inference_mode():
            partial = [mlp(x, lambda product: product) for mlp in mlps]
            expected = theirs.mlp(x)
        difference = (torch.stack(partial).sum(dim=0) - expected).abs().max()
        assert difference <= 1e-5 * expected.abs().max()


def round_as_int8(model: Any) -> None:
    """Round an MLP as its definition says: to multiples of a group's largest magnitude / 127, in
    bfloat16."""
    for layer in model.model.layers:
        for name, group in (("gate_proj", 128), ("up_proj", 128), ("down_proj", 16)):
            weight = getattr(layer.mlp, name).weight.data
            groups = weight.unflatten(1, (-1, group))
            scale = (groups.abs().amax(dim=2, keepdim=True) / 127).bfloat16().float()
            weight.copy_(((groups / scale).round().clamp(-127, 127) * scale).flatten(1))


def test_biases_and_layers_that_are_not_quantised(tmp_path: Path) -> None:
    """Qwen2's biases on q, k and v; a layer by name and one by pattern are plain."""
    model = reference_model("Qwen2")
    made = FORMATS["packed, group"][1]
    table = FORMATS["packed, group"][0] | {
        "ignore": ["lm_head", "model.layers.0.mlp.up_proj", r"re:.*layers\.1\.self_attn\.o_proj"]
    }

    def is_plain(module: str) -> bool:
        return module.endswith(("lm_head", "0.mlp.up_proj", "1.self_attn.o_proj"))

    save_quantized(tmp_path, model, table, made, is_plain)
    check_values_of_plain(find_model("--model", str(tmp_path)), model)


def test_lists_that_programs_read_differently(tmp_path: Path) -> None:
    """ "mlp.up" names up_proj to AutoAWQ, and nothing to transformers: the tensors decide."""
    table = awq_table(modules_to_not_convert=["mlp.up", "layers.1.self_attn"])
    for part, others in (("plain", ("mlp.up_proj",)), ("quantised", ())):
        model = reference_model("Llama")
        ends = ("lm_head", *others)

        def is_plain(module: str, ends: tuple[str, ...] = ends) -> bool:
            return module.endswith(ends) or "layers.1.self_attn" in module

        save_quantized(tmp_path / part, model, table, awq_layer, is_plain)
        check_values_of_plain(find_model("--model", str(tmp_path / part)), model)
    write_table(tmp_path / part, awq_table(modules_to_not_convert=["up_proj"]))
    refused(tmp_path / part, r"model\.layers\.0\.mlp\.up_proj is quantised, though the quanti")


def check_values_of_plain(source: ModelSource, model: Any) -> None:
    for name, parameter in model.named_parameters():
        assert torch.equal(source.weights.read(name), parameter.data), name
    loaded = load_kind(source, Shard(), Kinds("float32", "stored"), torch.device("cpu"))
    text = torch.arange(40)[None]
    runner = make_runner(loaded, 1, 64)
    runner.allocate(0)
    with torch.inference_mode():
        expected = model(text).logits
        found = runner.forward(ForwardBatch(text, [0], num_outputs=40))
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    ("name", "group"), [("gptq, zero points", 32), ("packed, 8 bits, channel", 128)]
)
def test_two_ranks_hold_the_halves_of_the_whole_matrices(
    name: str, group: int, tmp_path: Path
) -> None:
    saved(tmp_path, name)
    source = find_model("--model", str(tmp_path))
    halves = [
        load_kind(source, Shard(rank, 2), Kinds("float32", "stored"), torch.device("cpu"))
        for rank in range(2)
    ]
    whole = load_kind(source, Shard(), Kinds("float32", "float32"), torch.device("cpu"))
    down = [half.blocks[1].mlp.down for half in halves]
    assert all(part.format.group == group for part in down)
    expected = whole.blocks[1].mlp.down.weight
    assert torch.equal(torch.cat([part.dense() for part in down], dim=1), expected)


def loaded_groups(source: ModelSource, shard: Shard = Shard()) -> Transformer:
    return load_kind(source, shard, Kinds("float32", "stored"), torch.device("cpu"))


def weights_of(layer: torch.nn.Module) -> Tensor:
    return layer.dense() if isinstance(layer, GroupedLinear) else cast(Tensor, layer.weight)


def layers_of(block: torch.nn.Module) -> list[torch.nn.Module]:
    names = ("attention.qkv", "attention.output", "mlp.gate_up", "mlp.down")
    return [block.get_submodule(name) for name in names]


@pytest.mark.parametrize("name", ["gptq, act-order", "packed, act-order"])
def test_ranks_that_cut_inputs_in_an_order_widen_them(name: str, tmp_path: Path) -> None:
    """Two of four matrices of a layer; the others keep their order. Three ranks, which cannot share
    the inputs in groups, are not refused."""
    saved(tmp_path, name)
    source = find_model("--model", str(tmp_path))
    check_stored_groups("stored", "--model m", 3, source, "--target_dtype bfloat16")
    whole = load_kind(source, Shard(), Kinds("float32", "float32"), torch.device("cpu"))
    assert all(
        isinstance(layer, GroupedLinear) for layer in layers_of(loaded_groups(source).blocks[1])
    )
    halves = [layers_of(loaded_groups(source, Shard(rank, 2)).blocks[1]) for rank in range(2)]
    for half in halves:
        assert [isinstance(layer, GroupedLinear) for layer in half] == [True, False, True, False]
    expected = [weights_of(layer) for layer in layers_of(whole.blocks[1])]
    for place in (1, 3):
        parts = [weights_of(half[place]) for half in halves]
        assert torch.equal(torch.cat(parts, dim=1), expected[place])
    gate_up = [weights_of(half[2]).chunk(2) for half in halves]
    both = torch.cat([torch.cat(pair) for pair in zip(*gate_up, strict=True)])
    assert torch.equal(both, expected[2])


def test_matrices_in_unlike_orders_are_not_stacked(tmp_path: Path) -> None:
    """q, k and v, and gate and up, are widened then; the others are held in groups."""

    def made(shape: tuple[int, int], seed: int) -> Layer:
        return gptq(Integers(shape, 4, 64, seed, scattered=seed), 4, 1)

    model = reference_model("Llama")
    save_quantized(tmp_path, model, gptq_table(group=64, desc_act=True, sym=False), made)
    source = find_model("--model", str(tmp_path))
    check_values(source, model, (4, "float32", True))
    check_values_of_plain(source, model)
    held = [
        isinstance(layer, GroupedLinear) for layer in layers_of(loaded_groups(source).blocks[0])
    ]
    assert held == [False, True, False, True]
    assert 0.5 < source.config.plain_share < 1


@pytest.mark.parametrize(
    ("group", "spoil"), [(8, False), (64, True)], ids=["groups of 8", "unequal groups"]
)
def test_scattered_groups_that_no_layer_has_are_widened(
    group: int, spoil: bool, tmp_path: Path
) -> None:
    def made(shape: tuple[int, int], seed: int) -> Layer:
        numbers = Integers(shape, 4, group, seed, zero=8, scattered=0)
        if spoil:
            numbers.group_of[:3] = 1
        return gptq(numbers, 4, 1)

    model = reference_model("Llama")
    save_quantized(tmp_path, model, gptq_table(group=group, desc_act=True), made)
    source = find_model("--model", str(tmp_path))
    assert not source.has_groups
    check_values(source, model, None)
    check_logits(tmp_path, model)


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda order: order.clamp(min=1), "does not have each of the inputs 0 to 255 once"),
        (lambda order: order + 1, "does not have each of the inputs 0 to 255 once"),
        (lambda order: order[1:].clone(), r"has shape \(255,\), expected \(256,\)"),
        (lambda order: order.long(), "is stored as int64, expected int32"),
    ],
)
def test_an_order_that_is_none_is_refused(
    spoil: Callable[[Tensor], Tensor], what: str, ordered_file: Path, tmp_path: Path
) -> None:
    """Kernels read activations at these places without a look at them."""
    tensors = load_file(ordered_file)
    name = f"{Q0}.weight_order"
    tensors[name] = spoil(tensors[name])
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((ordered_file.parent / "config.json").read_text())
    refused(tmp_path, rf"model\.safetensors: {name} {what}")


@pytest.fixture(scope="module")
def ordered_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ordered")
    saved(path / "in", "gptq, act-order")
    out = path / "out" / "model.safetensors"
    convert(find_model("--model", str(path / "in")), out, None)
    return out


def tensors_of(path: Path) -> dict[str, Tensor]:
    return load_file(path / "model.safetensors")


WAYS_OUT = "fetch or convert|choose|correct|name it there|set attention_bias or mlp_bias"


def refused(path: Path, message: str) -> None:
    """In one line, with the file first and a way out last."""
    with pytest.raises(ValueError, match=message) as caught:
        find_model("--model", str(path))
    line = str(caught.value)
    assert re.fullmatch(rf"{re.escape(str(path))}\S*: .*; ({WAYS_OUT}) .*", line), line


GPTQ_SAVED = "gptq, zero points"
WEIGHTS = {"num_bits": 4, "strategy": "group", "group_size": 32}
SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "bitsandbytes"}, "quantization_config: quant_method bitsandbytes is not"),
    (
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.1.mlp.experts"]},
        "modules_to_not_convert leaves out 'model.layers.1.mlp.experts'",
    ),
    ({"quant_method": "mxfp4", "block_size": 16}, "block_size 16 is not known, and might"),
    (gptq_table(2), r"bits 2 is not read; those that are: 4, 8"),
    (gptq_table(3), r"bits 3 is not read"),
    (gptq_table(checkpoint_format="marlin"), "checkpoint_format 'marlin' is not read"),
    (gptq_table(format="gptq_v2"), "checkpoint_format and format contradict"),
    (gptq_table(dynamic={r"-:.*down_proj": {}}), "dynamic .* is not read; only its absence is"),
    (gptq_table(pack_dtype="int64"), "pack_dtype 'int64' is not read"),
    (gptq_table(group_size=0), "group_size 0 is neither"),
    (gptq_table(group_size=None), "group_size None is neither"),
    (gptq_table(whatever=1), "whatever 1 is not known, and might change"),
    (gptq_table(sym=7), "sym 7 is not supported"),
    (awq_table(version="gemv"), "version 'gemv' is not read; those that are: gemm"),
    (awq_table(bits=3), "bits 3 is not read"),
    (awq_table(zero_point=False), "zero_point False is not read"),
    (awq_table(modules_to_not_convert="lm_head"), "'lm_head' is not a list of names"),
    (fp8_table([128, 128], activation_scheme="static"), "activation_scheme 'static' is not read"),
    (fp8_table([128]), r"weight_block_size \[128\] is not two whole numbers"),
    (fp8_table(None, fmt="e5m2"), "fmt 'e5m2' is not read"),
    (fp8_table(None, modules_to_convert=["lm_head"]), "modules_to_convert .* is not read"),
    (fp8_table(None, ignored_layers=["("]), r"'\(' is not a regular expression"),
    (compressed_table("nvfp4-pack-quantized", WEIGHTS), "'nvfp4-pack-quantized' is not read"),
    (
        compressed_table("marlin-24", WEIGHTS),
        "format 'marlin-24' is not read; those that are: pack-",
    ),
    (compressed_table(PACK, WEIGHTS | {"num_bits": 3}), "group_0: num_bits 3 is not read"),
    (compressed_table(PACK, WEIGHTS | {"type": "float"}), "type 'float' is not read"),
    (compressed_table(PACK, WEIGHTS | {"dynamic": True}), "dynamic True is not read"),
    (compressed_table(PACK, WEIGHTS | {"strategy": "tensor"}), "strategy 'tensor' is not read"),
    (compressed_table(PACK, WEIGHTS | {"new": 1}), "new 1 is not known"),
    (
        compressed_table(PACK, WEIGHTS, input_activations=DYNAMIC),
        "input_activations .* is not read",
    ),
    (compressed_table(INT, CHANNEL, input_activations=DYNAMIC | {"type": "int"}), "input_activ"),
    (
        compressed_table(
            FLOAT, CHANNEL | {"type": "float"}, input_activations=DYNAMIC | {"dynamic": False}
        ),
        "input_activations .* and dynamic FP8",
    ),
    (compressed_table(PACK, WEIGHTS) | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    (compressed_table(PACK, WEIGHTS) | {"quantization_status": "frozen"}, "'frozen' is not read"),
    (compressed_table(PACK, WEIGHTS) | {"transform_config": {"a": 1}}, "transform_config"),
    (compressed_table(PACK, WEIGHTS) | {"sparsity_config": {"format": "2:4"}}, "sparsity_config"),
    (compressed_table(PACK, WEIGHTS) | {"config_groups": {}}, "config_groups {} is not a table"),
    ({"quant_method": "gptq", "group_size": 128}, "bits None is not read"),
]


@pytest.fixture(scope="module")
def gptq_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gptq")
    saved(path, GPTQ_SAVED)
    return path


@pytest.mark.parametrize(("table", "message"), SETTINGS)
def test_settings_that_are_not_read_are_refused(
    gptq_directory: Path, tmp_path: Path, table: dict[str, Any], message: str
) -> None:
    (tmp_path / "model.safetensors").symlink_to(gptq_directory / "model.safetensors")
    (tmp_path / "config.json").write_text((gptq_directory / "config.json").read_text())
    write_table(tmp_path, table)
    refused(tmp_path, rf"config\.json: .*{message}.*; choose a checkpoint in bfloat16")


Q0 = "model.layers.0.self_attn.q_proj"
Changes = Callable[[dict[str, Tensor]], None]


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Changes:
    return lambda tensors: tensors.update({name: change(tensors[name])})


def named(name: str, value: Tensor) -> Changes:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{Q0}.scales"), "scales is missing, expected shape"),
        (changed(f"{Q0}.scales", lambda v: v[:-1].clone()), r"scales has shape \(7, 256\), expec"),
        (changed(f"{Q0}.qzeros", lambda v: v.short()), "qzeros is stored as int16, expected int32"),
        (
            named(f"{Q0}.qweight", torch.ones(8192).int()),
            r"qweight has shape .*, expected a matrix",
        ),
        (named(f"{Q0}.qweight", torch.tensor(1)), r"q_proj.qweight has shape \(\), expected a ma"),
        (changed(f"{Q0}.g_idx", lambda v: v + 1), "are numbered 1 to 8, expected 0 to 7"),
        (changed(f"{Q0}.qzeros", lambda v: v | 15), "zero point of 15, which .* gptq_v2"),
        (named(f"{Q0}.input_scale", torch.ones(1)), "input_scale is not read, and might change"),
        (lambda t: t.pop(f"{Q0}.qweight"), "q_proj.weight is missing"),
        (named("lm_head.qweight", torch.ones(32, 97).int()), "lm_head is quantised, though the"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    gptq_directory: Path, tmp_path: Path, change: Changes, message: str
) -> None:
    tensors = tensors_of(gptq_directory)
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((gptq_directory / "config.json").read_text())
    refused(tmp_path, message)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("awq", named(f"{Q0}.qweight", torch.tensor(1)), "qweight has shape"),
        ("awq", lambda t: t.pop(f"{Q0}.qzeros"), "qzeros is missing, expected shape"),
        ("packed, group", lambda t: t.pop(f"{Q0}.weight_shape"), "weight_shape is missing"),
        (
            "packed, group",
            changed(f"{Q0}.weight_scale", lambda v: v.int()),
            "weight_scale is stored as int32, expected float16 or bfloat16 or float32",
        ),
        (
            "integers, zero points",
            lambda t: t.pop(f"{Q0}.weight_zero_point"),
            "weight_zero_point is missing",
        ),
        (
            "fp8, blocks",
            lambda t: t.pop(f"{Q0}.weight_scale_inv"),
            "weight_scale_inv or weight_scale is expected beside the weight, found 0",
        ),
        ("fp8, blocks", named(f"{Q0}.weight_scale_inv", torch.ones(3, 2)), "expected \\(2, 2\\)"),
        ("fp8, blocks", lambda t: t.pop(f"{Q0}.weight"), "q_proj.weight is missing, expected"),
    ],
)
def test_tensors_of_other_formats_that_do_not_fit_are_refused(
    name: str, change: Changes, message: str, tmp_path: Path
) -> None:
    saved(tmp_path, name)
    tensors = tensors_of(tmp_path)
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    refused(tmp_path, rf"model\.safetensors: .*layers\.0\.self_attn\..*{message}")


def with_biases(path: Path, value: float) -> None:
    tensors = tensors_of(path)
    marks = (".scales", ".weight_scale", ".weight_scale_inv")
    for module in {name.rpartition(".")[0] for name in tensors if name.endswith(marks)}:
        tensors[f"{module}.bias"] = torch.full((1,), value, dtype=torch.float16).expand(8).clone()
    save_file(tensors, path / "model.safetensors")


@pytest.mark.narrow(2)
@pytest.mark.parametrize("name", ["gptq, zero points", "awq", "packed, group", "fp8, blocks"])
def test_biases_of_zeros_are_none(name: str, tmp_path: Path) -> None:
    """Programs for GPTQ have stored one for each matrix."""
    model = saved(tmp_path, name)
    with_biases(tmp_path, 0.0)
    check_values(find_model("--model", str(tmp_path)), model, FORMATS[name][2])
    check_logits(tmp_path, model)
    with_biases(tmp_path, 0.5)
    refused(
        tmp_path, r"proj\.bias of shape \(8,\) is not part of the model; .* and \d+ more; set at"
    )


def test_zero_points_of_zeros_are_none(tmp_path: Path) -> None:
    """As the first versions of compressed-tensors stored them for symmetric weights."""
    model = saved(tmp_path, "integers, channel")
    tensors = tensors_of(tmp_path)
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        tensors[name.replace("scale", "zero_point")] = torch.zeros(tensors[name].shape).to(
            torch.int8
        )
    save_file(tensors, tmp_path / "model.safetensors")
    check_values(find_model("--model", str(tmp_path)), model, FORMATS["integers, channel"][2])
    tensors[f"{Q0}.weight_zero_point"][3] = 1
    save_file(tensors, tmp_path / "model.safetensors")
    refused(tmp_path, "q_proj.weight_zero_point is not read, and might change the result")


BESIDE = "quantize_config.json"
OLD_AWQ = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}


def without(table: dict[str, Any], *fields: str) -> dict[str, Any]:
    return {field: value for field, value in table.items() if field not in fields}


@pytest.mark.narrow(3)
@pytest.mark.parametrize("has_config", [False, True])
@pytest.mark.parametrize(
    ("name", "file", "changes"),
    [
        ("gptq, zero points", BESIDE, {"model_file_base_name": "model"}),
        ("gptq, second version", BESIDE, {"quant_method": "gptq"}),
        ("awq", "quant_config.json", OLD_AWQ),
        ("awq", BESIDE, awq_table()),
    ],
)
def test_settings_in_a_file_of_their_own(
    name: str, file: str, changes: dict[str, Any], has_config: bool, tmp_path: Path
) -> None:
    """Alone, as older programs wrote them, and beside the same ones in config.json."""
    model = saved(tmp_path, name)
    table = FORMATS[name][0]
    own = changes if table["quant_method"] == "awq" else without(table, "quant_method") | changes
    (tmp_path / file).write_text(json.dumps(own))
    if not has_config:
        write_table(tmp_path, {})
    check_values(find_model("--model", str(tmp_path)), model, FORMATS[name][2])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (gptq_table(8, 32, sym=False), "bits 8 contradicts the quantization_config of .*says 4"),
        (gptq_table(group=64, sym=False), "group_size 64 contradicts .*says 32; correct"),
        (gptq_table(group=32), "sym True contradicts .*which says False; correct the one"),
        (gptq_table(group=32, sym=False, lm_head=True), "lm_head True contradicts .*config.json;"),
        (gptq_table(group=32, sym=False, bits=2), "bits 2 contradicts .*which says 4; correct"),
        (awq_table(), "quant_method 'awq' contradicts .*which says 'gptq'; correct"),
        (gptq_table(group=32, sym=False, whatever=1), "whatever 1 is not known, and might ch"),
        ({"sym": False, "checkpoint_format": "gptq_v2"}, "checkpoint_format 'gptq_v2' contradicts"),
    ],
)
def test_settings_that_two_files_state_differently_are_refused(
    settings: dict[str, Any], message: str, gptq_directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").symlink_to(gptq_directory / "model.safetensors")
    (tmp_path / "config.json").write_text((gptq_directory / "config.json").read_text())
    (tmp_path / BESIDE).write_text(json.dumps(settings))
    refused(tmp_path, rf"quantize_config\.json: {message}")


def test_settings_of_modelopt_beside_a_plain_config_are_refused(
    gptq_directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").symlink_to(gptq_directory / "model.safetensors")
    (tmp_path / "config.json").write_text((gptq_directory / "config.json").read_text())
    write_table(tmp_path, {})
    content = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    refused(tmp_path, r"hf_quant_config\.json: quant_method 'modelopt' is not read; choose a check")


def test_nothing_is_written_beside_such_a_file(gptq_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((gptq_directory / "config.json").read_text())
    write_table(tmp_path, {})
    (tmp_path / BESIDE).write_text(json.dumps(gptq_table()))
    source = find_model("--model", str(gptq_directory))
    with pytest.raises(ValueError, match=r"the quantize_config\.json there says how weights are"):
        convert(source, tmp_path / "model.safetensors", None)


def test_a_module_of_two_groups_of_settings_is_refused(tmp_path: Path) -> None:
    table = FORMATS["packed, group"][0]
    groups = table["config_groups"]
    twice = table | {"config_groups": groups | {"group_1": groups["group_0"]}}
    saved(tmp_path, "packed, group")
    write_table(tmp_path, twice)
    refused(tmp_path, "q_proj.weight belongs to group_0 and group_1 of config_groups alike")


def test_a_plain_matrix_that_should_be_quantised_is_refused(tmp_path: Path) -> None:
    for name in ("gptq, symmetric", "awq", "packed, group", "fp8, blocks"):
        path = tmp_path / name.replace(" ", "")
        saved(path, name, is_plain=lambda module: module in ("lm_head", Q0))
        refused(path, r"q_proj\.weight is stored as float32, though the quantization_config of")


def test_a_symmetric_checkpoint_in_the_other_version_is_refused(tmp_path: Path) -> None:
    """As some programs write them: zero points of the second version under the first's name."""
    model = reference_model("Llama")
    save_quantized(tmp_path, model, gptq_table(), gptq_layer(4, 128, 0, zero=8))
    refused(
        tmp_path, "zero point of 8, but a symmetric matrix of 4 bits in the format gptq stores 7"
    )
    write_table(tmp_path, gptq_table(checkpoint_format="gptq_v2"))
    check_values(find_model("--model", str(tmp_path)), model, (4, "float16", False))


def test_groups_that_no_layer_has_are_refused(tmp_path: Path) -> None:
    save_quantized(
        tmp_path, reference_model("Llama"), gptq_table(group=8), gptq_layer(4, 8, 1, zero=8)
    )
    refused(tmp_path, "groups of 8 of 256 inputs, which no group of 16, 32, 64, 128 divides")


def test_eight_bits_with_zero_points_need_short_scales(tmp_path: Path) -> None:
    table = gptq_table(8, 64, sym=False)
    made = gptq_layer(8, 64, 1, scale=torch.float32)
    save_quantized(tmp_path, reference_model("Llama"), table, made)
    refused(tmp_path, "scales is in float32 beside 8-bit numbers with zero points")


def test_a_head_that_is_quantised(tmp_path: Path) -> None:
    model = reference_model("Llama")
    table = gptq_table(group=32, lm_head=True)
    made = gptq_layer(4, 32, 1, zero=8)
    save_quantized(tmp_path, model, table, made, is_plain=lambda module: False)
    source = find_model("--model", str(tmp_path))
    assert source.weights.tensors["lm_head.weight"].numbers is not None
    check_logits(tmp_path, model)
    write_table(tmp_path, table | {"lm_head": False})
    refused(tmp_path, "lm_head is quantised, though the quantization_config of")


@pytest.mark.parametrize("name", ["gptq, zero points", "fp8, blocks"])
def test_a_family_with_other_names(name: str, tmp_path: Path) -> None:
    """GPT-J: its layers are `transformer.h`, and its head has a bias."""
    torch.manual_seed(0)
    config = transformers.GPTJConfig(
        vocab_size=97, n_positions=256, n_embd=256, n_layer=2, n_head=4, rotary_dim=32, n_inner=512
    )
    model = transformers.GPTJForCausalLM(config).eval()
    save_quantized(tmp_path, model, *FORMATS[name][:2])
    check_logits(tmp_path, model)
    source = find_model("--model", str(tmp_path))
    assert (source.weights.tensors["transformer.h.0.mlp.fc_in.weight"].numbers is None) == (
        FORMATS[name][2] is None
    )


def test_transposed_matrices_are_refused(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=97, n_positions=64, n_embd=64, n_layer=1, n_head=2)
    save_quantized(tmp_path, transformers.GPT2LMHeadModel(config), *FORMATS["awq"][:2])
    refused(tmp_path, "GPT2LMHeadModel stores its matrices transposed, which is not read quantised")


def test_a_tied_head_is_not_quantised(tmp_path: Path) -> None:
    model = reference_model("Llama", tie_word_embeddings=True)
    save_quantized(tmp_path, model, *FORMATS["awq"][:2])
    assert find_model("--model", str(tmp_path)).config.tie_word_embeddings
    check_logits(tmp_path, model)


@pytest.mark.parametrize(
    "name", ["packed, zero points", "awq", "gptq, zero points", "gptq, act-order"]
)
def test_converting_keeps_the_numbers_or_writes_plain_weights(tmp_path: Path, name: str) -> None:
    """In a directory of their own, with a config that does not call them quantised."""
    model = saved(tmp_path / "in", name)
    source = find_model("--model", str(tmp_path / "in"))
    with pytest.raises(ValueError, match="quantization_config, which does not fit what is written"):
        convert(source, tmp_path / "in" / "model.pth", None)
    for dtype in (None, "float32"):
        convert(source, tmp_path / "out" / "model.safetensors", dtype)
        found = find_model("--model", str(tmp_path / "out"))
        assert found.has_groups == (dtype is None)
        assert not dtype or found.config.stored_bytes is None
        assert dtype or found.config.stored_bytes == source.config.stored_bytes
        for tensor, parameter in model.named_parameters():
            assert torch.equal(found.weights.read(tensor), parameter.data), tensor
            part = slice(3, 70), slice(33, 95)
            if parameter.dim() == 2:
                assert torch.equal(found.weights.read(tensor, part), parameter.data[part]), tensor
        if dtype is None:
            theirs, ours = (loaded_groups(weights).state_dict() for weights in (source, found))
            assert theirs.keys() == ours.keys()
            assert all(torch.equal(theirs[key], ours[key]) for key in theirs)


def test_a_plan_needs_the_weights(tmp_path: Path) -> None:
    saved(tmp_path, "awq")
    assert find_stored_config("--model", str(tmp_path)).stored_bytes is not None
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="does not say how large the weights are"):
        find_stored_config("--model", str(tmp_path))


@pytest.mark.narrow(1)
@pytest.mark.parametrize("name", ["gptq, zero points", "gptq, act-order", "fp8, blocks"])
def test_a_directory_runs(name: str, tmp_path: Path, command: Command) -> None:
    """As numbers in groups, or as plain weights in the dtype of the run."""
    table, made, kind = FORMATS[name]
    model = reference_model("Llama", vocab_size=420)
    save_quantized(tmp_path, model, table, made)
    trained_bpe("llama-bpe").save(str(tmp_path / "tokenizer.json"))
    flags = ("--model", tmp_path, "--device", "cpu", "--prefix_len", 64, "--gen_len", 8, "--B", 1)
    done = command("run", *flags, "--draft", "self", "--budget", 33, "--out", tmp_path / "runs")
    assert done.code == 0, done.err
    _, record = map(json.loads, (tmp_path / "runs").read_text().splitlines())
    used = record["config"]["model"]
    assert used["target_dtype"] == ("stored" if kind else used["dtype"])
    done = command("model", "check", tmp_path)
    assert done.out.splitlines()[-1] == f"{tmp_path} is computed as transformers computes it"


def test_mxfp4_blocks() -> None:
    """Every byte, and the smallest and largest exponents: value = E2M1 * 2 ** (scale - 127)."""
    blocks = torch.arange(256, dtype=torch.uint8).reshape(4, 4, 16)
    scales = torch.tensor([0, 1, 2, 126, 127, 128, 200, 252] * 2, dtype=torch.uint8).reshape(4, 4)
    found = grouped_blocks(blocks, scales)
    magnitudes = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    dense = found.dense()
    for row in range(4):
        for group in range(4):
            for place in range(32):
                byte = int(blocks[row, group, place // 2])
                code = byte >> 4 if place % 2 else byte & 15
                value = magnitudes[code & 7] * 2.0 ** (int(scales[row, group]) - 127)
                value = -value if code >> 3 else value
                assert float(dense[row, group * 32 + place]) == value
    with pytest.raises(ValueError, match="is 253, beyond 252"):
        grouped_blocks(blocks, scales.clamp(min=253))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_integers_are_those_of_compressed_tensors(bits: int, is_symmetric: bool) -> None:
    """What its own functions unpack from our test's words."""
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    zero = 1 << (bits - 1) if is_symmetric else None
    numbers = Integers((96, 256), bits, 64, bits, zero=zero)
    leaves, _ = packed(numbers, bits, is_symmetric)
    middle = 1 << (bits - 1)
    found = helpers.unpack_from_int32(leaves["weight_packed"], bits, torch.Size((96, 256)))
    assert torch.equal(found.int(), torch.from_numpy(numbers.codes - middle).int())
    if not is_symmetric:
        stored = leaves["weight_zero_point"]
        found = helpers.unpack_from_int32(stored, bits, torch.Size((96, 4)), packed_dim=0)
        assert torch.equal(found.int(), torch.from_numpy(numbers.zeros - middle).int())
