"""GgufWeights: the tensors of a GGUF file, by names and in the order of rows of Hugging Face."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from magicdec.model.checkpoint.weight_files import FileWeights, Index, StoredTensor
from magicdec.model.families.gguf_config import ROPE_DIVISORS, architecture_of
from magicdec.model.gguf.blocks import BLOCK_TYPES, FLOAT_TYPES, Groups
from magicdec.model.gguf.file import GgufFile, GgufTensor, read_gguf
from magicdec.model.linear.grouped import GroupedNumbers, NumberFormat
from magicdec.output.files import AGAIN, open_regular

# What "blk.N." and the end of a name stand for.
PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
PERMUTED = ("self_attn.q_proj", "self_attn.k_proj")
LAYER = re.compile(r"^blk\.(\d+)\.(\w+)\.(weight|bias)$")


def hf_name(name: str) -> str:
    """The Hugging Face name of a tensor; its own if it has none."""
    if match := LAYER.match(name):
        layer, part, leaf = match.groups()
        return f"model.layers.{layer}.{PARTS[part]}.{leaf}" if part in PARTS else name
    stem, _, leaf = name.rpartition(".")
    return f"{WHOLE[stem]}.{leaf}" if stem in WHOLE else name


class GgufWeights(FileWeights):
    """Weights of a GGUF file: float32 where they are stored in blocks, to the bit those of ggml's
    dequantisation. Tensors are read row by row; nothing is mapped."""

    def __init__(self, path: Path) -> None:
        self._read_header(path)
        super().__init__(path)

    def _read_header(self, path: Path) -> None:
        file = read_gguf(path)
        self._is_permuted = architecture_of(file).is_permuted
        self._head_dim = head_dim_of(file)
        self._stored = {
            hf_name(name): tensor for name, tensor in file.tensors.items() if name != ROPE_DIVISORS
        }

    def open(self, file: Path) -> dict[str, StoredTensor]:
        return {
            name: StoredTensor(tensor.shape, dtype_of(tensor), tensor.file, format_of(tensor))
            for name, tensor in self._stored.items()
        }

    def type_name(self, name: str) -> str:
        """ggml's name of a tensor's type, as "Q4_K"."""
        type_id = self._stored[name].type_id
        return (BLOCK_TYPES.get(type_id) or FLOAT_TYPES[type_id]).name

    def read(self, name: str, index: Index = ()) -> Tensor:
        rows, *columns = (*index, slice(None))[: len(self._stored[name].shape)]
        tensor = self._stored[name]
        if len(tensor.shape) == 1:
            return _floats(tensor, _read_bytes(tensor, 0, 1))[0][rows]
        values = self._rows_of(name, rows)
        dense = torch.from_numpy(values.dense()) if isinstance(values, Groups) else values
        return dense[(slice(None), *columns)]

    def read_numbers(self, name: str, index: Index = ()) -> GroupedNumbers:
        rows, columns = (*index, slice(None), slice(None))[:2]
        kind = format_of(self._stored[name])
        groups = self._rows_of(name, rows)
        assert kind is not None and isinstance(groups, Groups), "it is stored in groups"
        first, last, _ = columns.indices(groups.numbers.shape[1])
        assert first % kind.group == last % kind.group == 0, "whole groups, which is checked"
        part = slice(first // kind.group, last // kind.group)
        dtype = getattr(torch, kind.scale)
        minimum = groups.minimum
        return GroupedNumbers(
            kind,
            torch.from_numpy(groups.numbers)[:, columns],
            torch.from_numpy(groups.scale)[:, part].to(dtype),
            None if minimum is None else torch.from_numpy(minimum)[:, part].to(dtype),
        )

    def _rows_of(self, name: str, rows: slice) -> Groups | Tensor:
        """Rows of a matrix in Hugging Face's order, as groups if they are stored in blocks."""
        tensor = self._stored[name]
        first, last, step = rows.indices(tensor.shape[0])
        assert step == 1 and len(tensor.shape) == 2, "rows of a matrix are read in their order"
        order: NDArray[np.int64] | None = None
        start, end = first, last
        if self._is_permuted and name.rpartition(".")[0].endswith(PERMUTED):
            size = self._head_dim
            start, end = first // size * size, -(-last // size) * size
            order = unpermuted(end - start, size)[first - start : last - start]
        data = _read_bytes(tensor, start, end)
        if order is not None:
            data = data[order]
        if tensor.type_id in BLOCK_TYPES:
            return BLOCK_TYPES[tensor.type_id].groups(data)
        return _floats(tensor, data)


def unpermuted(num_rows: int, head_dim: int) -> NDArray[np.int64]:
    """For each row of q or k, in whole heads, the stored one: the converter of llama.cpp has put
    the two rows that are rotated together, which are half a head apart, beside each other."""
    rows = np.arange(num_rows).reshape(-1, head_dim // 2, 2)
    return rows.transpose(0, 2, 1).reshape(-1)


def head_dim_of(file: GgufFile) -> int:
    prefix = f"{file.architecture}."
    metadata = file.metadata
    default = metadata[f"{prefix}embedding_length"] // metadata[f"{prefix}attention.head_count"]
    return int(metadata.get(f"{prefix}attention.key_length", default))


def format_of(tensor: GgufTensor) -> NumberFormat | None:
    kind = BLOCK_TYPES.get(tensor.type_id)
    if kind is None or len(tensor.shape) != 2:
        return None
    return NumberFormat(kind.bits, kind.group, kind.scale, kind.has_minimum, kind.least)


def dtype_of(tensor: GgufTensor) -> str:
    plain = FLOAT_TYPES.get(tensor.type_id)
    return "float32" if plain is None else plain.dtype


def _read_bytes(tensor: GgufTensor, first: int, last: int) -> NDArray[np.uint8]:
    """The bytes of rows [last - first, row_bytes]. Raises ValueError if the file has ended or is
    gone."""
    width = tensor.row_bytes
    try:
        with open_regular(tensor.file) as file:
            file.seek(tensor.offset + first * width)
            data = file.read((last - first) * width)
    except OSError as error:
        raise ValueError(
            f"{tensor.file}: tensor {tensor.name} cannot be read ({error.strerror}); {AGAIN}"
        ) from None
    if len(data) != (last - first) * width:
        raise ValueError(
            f"{tensor.file}: tensor {tensor.name} is cut off, as the file has become shorter since "
            f"its header was read; {AGAIN}"
        )
    return np.frombuffer(bytearray(data), np.uint8).reshape(last - first, width)


def _floats(tensor: GgufTensor, rows: NDArray[np.uint8]) -> Tensor:
    kind = FLOAT_TYPES.get(tensor.type_id)
    if kind is None:
        return torch.from_numpy(BLOCK_TYPES[tensor.type_id].groups(rows).dense())
    values = torch.from_numpy(rows.view(kind.stored))
    return values.view(torch.bfloat16) if kind.dtype == "bfloat16" else values
