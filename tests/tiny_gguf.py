"""Writes small GGUF files by the `gguf` package from tensors of Hugging Face names; holds no tests
itself."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

MOST_LAYERS = 7
STD = 0.1  # large enough that every layer changes the logits


def name_of(architecture: str, hf_name: str) -> str:
    """The GGUF name of a Hugging Face tensor, as llama.cpp's converter finds it."""
    known = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    table = gguf.get_tensor_name_map(known, MOST_LAYERS)
    name = table.get_name(hf_name, try_suffixes=(".weight", ".bias"))
    assert name is not None, hf_name
    return name


def parts_of(name: str, values: Tensor, architecture: str = "") -> list[tuple[str, Tensor]]:
    """The tensors that the converter makes of a parameter: those of all experts are stacked, gate
    and up apart, which gpt-oss has by turns, with inputs before outputs."""
    if name.endswith("sinks"):
        return [(f"{name}.weight", values)]
    if architecture == "gpt-oss" and ".experts." in name:
        stem = name.removesuffix("_bias")
        leaf = "bias" if name.endswith("_bias") else "weight"
        values = values if leaf == "bias" else values.transpose(1, 2)
        if stem.endswith("down_proj"):
            return [(f"{stem}.{leaf}", values)]
        names = [stem.replace("gate_up_proj", f"{part}_proj.{leaf}") for part in ("gate", "up")]
        return [(name, values[:, first::2]) for first, name in enumerate(names)]
    if name.endswith("experts.gate_up_proj"):
        halves = values.chunk(2, dim=1)
        names = [name.replace("gate_up_proj", f"{part}_proj.weight") for part in ("gate", "up")]
        return list(zip(names, halves, strict=True))
    return [(f"{name}.weight" if name.endswith("experts.down_proj") else name, values)]


def permuted(rows: Tensor, num_heads: int) -> Tensor:
    """Rows of q or k as llama.cpp's converter of Llama stores them: the definition, row by row."""
    size = len(rows) // num_heads
    out = torch.empty_like(rows)
    for h in range(num_heads):
        for i in range(size // 2):
            for j in range(2):
                out[h * size + 2 * i + j] = rows[h * size + j * (size // 2) + i]
    return out


def random_blocks(shape: tuple[int, ...], kind: Type, seed: int) -> NDArray[np.uint8]:
    """Random blocks [..., outputs, bytes of a row] of weights with a standard deviation of STD, or
    of about as much in MXFP4."""
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    rows = math.prod(shape[:-1])
    blocks = generator.integers(0, 256, (rows, shape[-1] // block, num_bytes), dtype=np.uint8)
    scales = {
        **{Type.Q4_0: (0,), Type.Q4_1: (0, 2), Type.Q5_0: (0,), Type.Q5_1: (0, 2)},
        **{Type.Q8_0: (0,), Type.IQ4_NL: (0,), Type.IQ4_XS: (0,), Type.Q6_K: (208,)},
        **{Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2)},
        Type.MXFP4: (),
    }[kind]
    values = {at: generator.normal(0, 1, blocks.shape[:2]) for at in scales}
    spread = 1.0
    for _ in range(2):  # first to see how large the weights of these scales are
        for at, scale in values.items():
            halves = (scale * spread).astype(np.float16)
            blocks[:, :, at : at + 2] = halves[:, :, None].view(np.uint8)
        if scales:
            spread *= STD / float(dequantize(blocks.reshape(rows, -1), kind).std())
    if kind == Type.MXFP4:
        blocks[:, :, 0] = generator.integers(122, 126, blocks.shape[:2])
    return blocks.reshape(*shape[:-1], -1)


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, NDArray[Any] | tuple[NDArray[np.uint8], Type]],
    strings: Mapping[str, Any] | None = None,
) -> None:
    """A file of tensors by GGUF names. `metadata` are without the architecture's name, `strings`
    with all of theirs; integers are uint32, lists arrays."""
    writer = gguf.GGUFWriter(path, architecture)
    named = {f"{architecture}.{key}": value for key, value in metadata.items()}
    for key, value in (named | dict(strings or {})).items():
        add: Any = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }[type(value)]
        add(key, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
