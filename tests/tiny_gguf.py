"""Writes small GGUF files by the `gguf` package from tensors of Hugging Face names; holds no tests
itself."""

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

from magicdec.model.checkpoint.gguf_weights import PARTS, WHOLE

OURS = {f"blk.{{}}.{ours}": f"model.layers.{{}}.{theirs}" for ours, theirs in PARTS.items()} | WHOLE
MOST_LAYERS = 4
STD = 0.1  # large enough that every layer changes the logits


def name_of(hf_name: str) -> str:
    """The GGUF name of a Hugging Face tensor."""
    stem, _, leaf = hf_name.rpartition(".")
    for layer in range(MOST_LAYERS):
        for ours, theirs in OURS.items():
            if theirs.format(layer) == stem:
                return f"{ours.format(layer)}.{leaf}"
    raise KeyError(hf_name)


def permuted(rows: Tensor, num_heads: int) -> Tensor:
    """Rows of q or k as llama.cpp's converter of Llama stores them: the definition, row by row."""
    size = len(rows) // num_heads
    out = torch.empty_like(rows)
    for h in range(num_heads):
        for i in range(size // 2):
            for j in range(2):
                out[h * size + 2 * i + j] = rows[h * size + j * (size // 2) + i]
    return out


def random_blocks(shape: tuple[int, int], kind: Type, seed: int) -> NDArray[np.uint8]:
    """Random blocks [outputs, bytes of a row] of weights with a standard deviation of STD, or of
    about as much in MXFP4."""
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (shape[0], shape[1] // block, num_bytes), dtype=np.uint8)
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
            spread *= STD / float(dequantize(blocks.reshape(shape[0], -1), kind).std())
    if kind == Type.MXFP4:
        blocks[:, :, 0] = generator.integers(122, 126, blocks.shape[:2])
    return blocks.reshape(shape[0], -1)


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
