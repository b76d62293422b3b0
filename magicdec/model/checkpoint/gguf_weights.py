"""GgufWeights: the tensors of a GGUF file, by names and in the order of rows of Hugging Face."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from magicdec.model.checkpoint.weight_files import FileWeights, Index, StoredTensor
from magicdec.model.families.family import Names, find_family
from magicdec.model.families.gguf_architectures import STACKED, architecture_of
from magicdec.model.families.gguf_config import ROPE_DIVISORS, load_gguf_config
from magicdec.model.gguf.blocks import BLOCK_TYPES, FLOAT_TYPES, Groups
from magicdec.model.gguf.file import GgufTensor, read_gguf
from magicdec.model.linear.grouped import GroupedNumbers, NumberFormat
from magicdec.output.files import AGAIN, open_regular

LAYER = re.compile(r"^blk\.(\d+)\.(\w+)\.(weight|bias)$")
PERMUTED = ("attn_q", "attn_k")
SINKS = "attn_sinks"
NORM = "norm.weight"  # the end of the names that llama.cpp's converter adds an offset to


def parts_of_layer(names: Names, mlp_norm: str = "ffn_norm") -> dict[str, str]:
    """What stands between "blk.N." and the end of a name, and what it is called in the family's
    layers."""
    query, key, value = names.qkv
    gate, up = names.gate_up
    parts = {
        "attn_norm": names.attention_norm,
        "attn_q": query,
        "attn_k": key,
        "attn_v": value,
        "attn_q_norm": names.q_norm,
        "attn_k_norm": names.k_norm,
        "attn_output": names.output,
        "post_attention_norm": names.post_attention_norm,
        mlp_norm: names.mlp_norm,
        "ffn_gate": gate,
        "ffn_up": up,
        "ffn_down": names.down,
        "ffn_gate_inp": names.router,
        "post_ffw_norm": names.post_mlp_norm,
    }
    return {ours: theirs for ours, theirs in parts.items() if theirs}


def parts_of_experts(names: Names) -> dict[str, str]:
    """The same of tensors that hold a matrix of every expert; "{}" is the expert's number."""
    gate, up = names.expert_gate_up
    parts = {"ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": names.expert_down}
    return {ours: names.expert + theirs for ours, theirs in parts.items()}


def hf_name(name: str, names: Names = Names(), mlp_norm: str = "ffn_norm") -> str:
    """The Hugging Face name of a tensor; its own if it has none. Of stacked experts it has a "{}"
    for the number."""
    if match := LAYER.match(name):
        layer, part, leaf = match.groups()
        if part == SINKS:
            return f"{names.layer.format(layer)}{names.sinks}"
        known = parts_of_layer(names, mlp_norm) | parts_of_experts(names)
        return f"{names.layer.format(layer)}{known[part]}.{leaf}" if part in known else name
    stem, _, leaf = name.rpartition(".")
    whole = {"token_embd": names.embedding, "output_norm": names.norm, "output": names.head}
    return f"{whole[stem]}.{leaf}" if stem in whole else name


def expert_tensors(tensor: GgufTensor) -> list[GgufTensor]:
    """Each expert's matrix [outputs, inputs] of a stacked tensor [experts, outputs, inputs], or its
    bias of [experts, outputs]."""
    experts, *outputs = tensor.shape[:-1]
    size = math.prod(outputs) * tensor.row_bytes
    return [
        replace(tensor, shape=tensor.shape[1:], offset=tensor.offset + number * size)
        for number in range(experts)
    ]


class GgufWeights(FileWeights):
    """Weights of a GGUF file: float32 where they are stored in blocks, to the bit those of ggml's
    dequantisation. Tensors are read row by row; nothing is mapped."""

    def __init__(self, path: Path) -> None:
        self._read_header(path)
        super().__init__(path)

    def _read_header(self, path: Path) -> None:
        file = read_gguf(path)
        config = load_gguf_config(path)
        names = find_family(config.architecture).names(config)
        self._head_dim = config.head_dim
        self._norm_offset = names.norm_offset
        self._router = f".{names.router}.weight"
        architecture = architecture_of(file)
        permuted = PERMUTED if architecture.is_permuted else ()
        self._permuted = tuple(f".{parts_of_layer(names)[part]}" for part in permuted)
        self._stored: dict[str, GgufTensor] = {}
        for name, tensor in file.tensors.items():
            theirs = hf_name(name, names, architecture.mlp_norm)
            if config.experts is not None and STACKED.match(name):
                matrices = expert_tensors(tensor)
                self._stored |= {theirs.format(i): matrix for i, matrix in enumerate(matrices)}
            elif name != ROPE_DIVISORS:
                self._stored[theirs] = tensor

    def open(self, file: Path) -> dict[str, StoredTensor]:
        """The router of a mixture is never held in groups."""
        found = {}
        for name, tensor in self._stored.items():
            dtype = "float32" if self._offset(name) else dtype_of(tensor)
            numbers = None if name.endswith(self._router) else format_of(tensor)
            found[name] = StoredTensor(tensor.shape, dtype, tensor.file, numbers)
        return found

    def _offset(self, name: str) -> float:
        """What the converter has added to the weights of norms that Hugging Face stores less 1."""
        return self._norm_offset if name.endswith(NORM) else 0.0

    def _is_permuted(self, name: str) -> bool:
        """Whether its rows, or the numbers of a bias, are in the order of adjacent pairs."""
        return name.rpartition(".")[0].endswith(self._permuted)

    def type_name(self, name: str) -> str:
        """ggml's name of a tensor's type, as "Q4_K"."""
        type_id = self._stored[name].type_id
        return (BLOCK_TYPES.get(type_id) or FLOAT_TYPES[type_id]).name

    def read(self, name: str, index: Index = ()) -> Tensor:
        rows, *columns = (*index, slice(None))[: len(self._stored[name].shape)]
        tensor = self._stored[name]
        if len(tensor.shape) == 1:
            whole = _floats(tensor, _read_bytes(tensor, 0, 1))[0]
            if self._is_permuted(name):
                whole = whole[unpermuted(len(whole), self._head_dim)]
            vector = whole[rows]
            # Exact: what is stored is a sum with the offset, rounded to float32.
            return vector.float() - self._offset(name) if self._offset(name) else vector
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
        start = first
        end = last
        if self._is_permuted(name):
            size = self._head_dim
            start = first // size * size
            end = -(-last // size) * size
            order = unpermuted(end - start, size)[first - start : last - start]
        data = _read_bytes(tensor, start, end)
        if order is not None:
            data = data[order]
        if tensor.type_id in BLOCK_TYPES:
            return BLOCK_TYPES[tensor.type_id].groups(data)
        return _floats(tensor, data)


def unpermuted(num_rows: int, head_dim: int) -> NDArray[np.int64]:
    """For each output of q or k, in whole heads, the stored one: the converter of llama.cpp has put
    the two outputs that are rotated together, which are half a head apart, beside each other."""
    rows = np.arange(num_rows).reshape(-1, head_dim // 2, 2)
    return rows.transpose(0, 2, 1).reshape(-1)


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
