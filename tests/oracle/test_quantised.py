"""Checkpoints that another program quantised: whole models against transformers on the weights that
their formats define, slices, and settings and tensors that are refused."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_gguf import HIDDEN, LAYERS, check_logits, reference_model
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
from magicdec.model.checkpoint.quantized.mxfp4 import grouped_blocks
from magicdec.model.checkpoint.source import ModelSource, find_model
from magicdec.setup.loading import load_kind
from magicdec.setup.model_plan import Kinds

Making = Callable[[tuple[int, int], int], Layer]


def of_gptq(bits: int, group: int, less: int, **settings: Any) -> Making:
    def made(shape: tuple[int, int], seed: int) -> Layer:
        return gptq(Integers(shape, bits, group, seed, **settings), bits, less)

    return made


def of_awq(shape: tuple[int, int], seed: int) -> Layer:
    return awq(Integers(shape, 4, 64, seed))


def of_compressed(
    bits: int, group: int, is_symmetric: bool, is_packed: bool = True, **settings: Any
) -> Making:
    def made(shape: tuple[int, int], seed: int) -> Layer:
        zero = 1 << (bits - 1) if is_symmetric else None
        numbers = Integers(shape, bits, group, seed, zero=zero, **settings)
        write = partial(packed, bits=bits) if is_packed else plain_integers
        return write(numbers, is_symmetric=is_symmetric)

    return made


def of_fp8(leaf: str, form: str, block: tuple[int, int] | None = None) -> Making:
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
INT, FLOAT, PACK = "int-quantized", "float-quantized", "pack-quantized"
BF16 = torch.bfloat16
# By name: the table of the config, what makes a layer, and the bits and scale of its numbers.
FORMATS: dict[str, tuple[dict[str, Any], Making, tuple[int, str, bool] | None]] = {
    "gptq, symmetric": (gptq_table(), of_gptq(4, 128, 1, zero=8), (4, "float16", False)),
    "gptq, zero points": (
        gptq_table(group=32, sym=False),
        of_gptq(4, 32, 1),
        (4, "float32", True),
    ),
    "gptq, second version": (
        gptq_table(group=64, sym=False, checkpoint_format="gptq_v2"),
        of_gptq(4, 64, 0, scale=BF16),
        (4, "float32", True),
    ),
    "gptq, float32 scales": (
        gptq_table(group=64, sym=False),
        of_gptq(4, 64, 1, scale=torch.float32),
        (8, "float32", False),
    ),
    "gptq, 8 bits, one group": (gptq_table(8, -1), of_gptq(8, -1, 1, zero=128), (8, "float16", False)),
    "gptq, 8 bits, zero points": (
        gptq_table(8, 96, sym=False),
        of_gptq(8, 96, 1),
        (8, "float32", True),
    ),
    "gptq, act-order": (
        gptq_table(desc_act=True, sym=False),
        of_gptq(4, 128, 1, is_scattered=True),
        None,
    ),
    "awq": (awq_table(), of_awq, (4, "float32", True)),
    "packed, group": (
        compressed_table(PACK, {"num_bits": 4, "strategy": "group", "group_size": 32}),
        of_compressed(4, 32, True, scale=BF16),
        (4, "bfloat16", False),
    ),
    "packed, zero points": (
        compressed_table(
            PACK, {"num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": False}
        ),
        of_compressed(4, 128, False, scale=BF16),
        (4, "float32", True),
    ),
    "packed, 8 bits, channel": (
        compressed_table(PACK, CHANNEL),
        of_compressed(8, -1, True, scale=torch.float32),
        (8, "float32", False),
    ),
    "packed, 8 bits, zero points": (
        compressed_table(PACK, CHANNEL | {"symmetric": False}),
        of_compressed(8, -1, False),
        (8, "float32", True),
    ),
    "integers, channel": (
        compressed_table(INT, CHANNEL),
        of_compressed(8, -1, True, False, scale=BF16),
        (8, "bfloat16", False),
    ),
    "integers, zero points": (
        compressed_table(INT, {"strategy": "group", "group_size": 64, "symmetric": False}),
        of_compressed(8, 64, False, False),
        (8, "float32", True),
    ),
    "fp8, blocks": (fp8_table([128, 128]), of_fp8("weight_scale_inv", "blocks", (128, 128)), None),
    "fp8, ragged blocks": (
        fp8_table([96, 160]),
        of_fp8("weight_scale_inv", "blocks", (96, 160)),
        None,
    ),
    "fp8, one scale": (fp8_table(None), of_fp8("weight_scale_inv", "scalar"), None),
    "floats, channel": (
        compressed_table(
            FLOAT, CHANNEL | {"type": "float"}, input_activations=DYNAMIC
        ),
        of_fp8("weight_scale", "channels"),
        None,
    ),
    "floats, one scale": (
        compressed_table(FLOAT, {"strategy": "tensor", "type": "float"}),
        of_fp8("weight_scale", "one"),
        None,
    ),
    "floats, blocks": (
        compressed_table(
            FLOAT, {"strategy": "block", "type": "float", "block_structure": [128, 128]}
        ),
        of_fp8("weight_scale", "blocks", (128, 128)),
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
            found = source.weights.read(name, (rows, slice(33, 95)))
            assert torch.equal(found, parameter.data[rows, 33:95]), (name, rows)
            if form is None:
                continue
            assert (form.bits, form.scale, form.has_minimum) == kind
            columns = slice(form.group, 2 * form.group)
            numbers = source.weights.read_numbers(name, (rows, columns))
            assert numbers.format == form and numbers.scale.dtype == getattr(torch, form.scale)
            assert torch.equal(numbers.dense(), parameter.data[rows, columns]), (name, rows)
            assert form.least <= int(numbers.numbers.min())
            assert int(numbers.numbers.max()) < form.least + 2**form.bits


@pytest.mark.parametrize("name", list(FORMATS))
def test_a_model_computes_as_transformers_on_the_defined_weights(name: str, tmp_path: Path) -> None:
    model = saved(tmp_path, name)
    source = find_model("--model", str(tmp_path))
    kind = FORMATS[name][2]
    assert source.has_groups == (kind is not None)
    check_values(source, model, kind)
    check_logits(tmp_path, model)


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


def check_values_of_plain(source: ModelSource, model: Any) -> None:
    for name, parameter in model.named_parameters():
        assert torch.equal(source.weights.read(name), parameter.data), name
    loaded = load_kind(source, Shard(), Kinds("float32", "stored"), torch.device("cpu"))
    text = torch.arange(40)[None]
    from conftest import make_runner

    runner = make_runner(loaded, 1, 64)
    runner.allocate(0)
    with torch.inference_mode():
        expected = model(text).logits
        found = runner.forward(text, [0], num_outputs=40)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
