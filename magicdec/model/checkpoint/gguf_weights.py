"""GgufWeights: the tensors of a GGUF file, by names and in the order of rows of Hugging Face."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from magicdec.model.checkpoint.gguf_tensors import Order, PlacedTensor, placed_tensors
from magicdec.model.checkpoint.weight_files import FileWeights, Index, StoredTensor
from magicdec.model.families.family import find_family
from magicdec.model.families.gguf_config import load_gguf_config
from magicdec.model.gguf.blocks import BLOCK_TYPES, FLOAT_TYPES, Groups
from magicdec.model.gguf.file import GgufTensor, read_gguf
from magicdec.model.linear.grouped import GroupedNumbers, NumberFormat
from magicdec.output.files import AGAIN, open_regular


class GgufWeights(FileWeights):
    """Weights of a GGUF file: float32 where they are stored in blocks, to the bit those of ggml's
    dequantisation. Tensors are read row by row; nothing is mapped."""

    def __init__(self, path: Path) -> None:
        config = load_gguf_config(path)
        names = find_family(config.architecture).names(config)
        self._never_in_groups = tuple(
            f".{gate}.weight" for gate in (names.router, names.shared_gate)
        )
        self._placed = placed_tensors(read_gguf(path), config)
        super().__init__(path)

    def open(self, file: Path) -> dict[str, StoredTensor]:
        """The gates of a mixture are never held in groups."""
        found = {}
        for name, placed in self._placed.items():
            is_changed = placed.is_decay or placed.offset
            dtype = "float32" if is_changed else dtype_of(placed.stored)
            numbers = None if name.endswith(self._never_in_groups) else format_of(placed)
            found[name] = StoredTensor(placed.shape, dtype, placed.stored.file, numbers)
        return found

    def type_name(self, name: str) -> str:
        """ggml's name of a tensor's type, as "Q4_K"."""
        type_id = self._placed[name].stored.type_id
        return (BLOCK_TYPES.get(type_id) or FLOAT_TYPES[type_id]).name

    def read(self, name: str, index: Index = ()) -> Tensor:
        placed = self._placed[name]
        rows, *others = (*index, slice(None))[: len(placed.shape)]
        if len(placed.shape) == 1:
            whole = _floats(placed.stored, _read_bytes(placed.stored, 0, 1))[0]
            vector = (whole if placed.rows is None else whole[placed.rows])[rows]
            if placed.is_decay:
                return (-vector.double()).log().float()
            # Exact: what is stored is a sum with the offset, rounded to float32.
            return vector.float() - placed.offset if placed.offset else vector
        values = _rows_of(placed, rows)
        dense = torch.from_numpy(values.dense()) if isinstance(values, Groups) else values
        dense = dense if placed.columns is None else dense[:, placed.columns]
        dense = dense.unsqueeze(1) if placed.has_channels else dense
        return dense[(slice(None), *others)]

    def read_numbers(self, name: str, index: Index = ()) -> GroupedNumbers:
        placed = self._placed[name]
        rows, columns = (*index, slice(None), slice(None))[:2]
        kind = format_of(placed)
        groups = _rows_of(placed, rows)
        assert kind is not None and isinstance(groups, Groups), "it is stored in groups"
        if placed.columns is not None:
            groups = in_order(groups, placed.columns, kind.group)
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


def _rows_of(placed: PlacedTensor, rows: slice) -> Groups | Tensor:
    """Rows of a matrix in Hugging Face's order, as groups if they are stored in blocks; columns are
    as they are stored."""
    tensor = placed.stored
    first, last, step = rows.indices(placed.shape[0])
    assert step == 1 and len(tensor.shape) == 2, "rows of a matrix are read in their order"
    if placed.rows is None:
        data = _read_bytes(tensor, first, last)
    else:
        data = _read_rows(tensor, placed.rows[first:last])
    if tensor.type_id in BLOCK_TYPES:
        return BLOCK_TYPES[tensor.type_id].groups(data)
    return _floats(tensor, data)


def in_order(groups: Groups, columns: Order, size: int) -> Groups:
    """With the columns in an order that leaves the `size` of each group beside each other."""
    order = columns[::size] // size
    minimum = groups.minimum
    return Groups(
        groups.numbers[:, columns],
        groups.scale[:, order],
        None if minimum is None else minimum[:, order],
    )


def format_of(placed: PlacedTensor) -> NumberFormat | None:
    """None if its order of columns does not leave those of a group beside each other."""
    kind = BLOCK_TYPES.get(placed.stored.type_id)
    if kind is None or len(placed.shape) != 2:
        return None
    if placed.columns is not None:
        groups = placed.columns.reshape(-1, kind.group)
        if (groups != groups[:, :1] // kind.group * kind.group + np.arange(kind.group)).any():
            return None
    return NumberFormat(kind.bits, kind.group, kind.scale, kind.has_minimum, kind.least)


def dtype_of(tensor: GgufTensor) -> str:
    plain = FLOAT_TYPES.get(tensor.type_id)
    return "float32" if plain is None else plain.dtype


def _read_rows(tensor: GgufTensor, rows: Order) -> NDArray[np.uint8]:
    """The bytes of rows in any order, of which neighbours in the file are read together."""
    ascending = np.sort(rows)
    ends = np.flatnonzero(np.diff(ascending) != 1) + 1
    runs = np.split(ascending, ends) if len(rows) else []
    parts = [_read_bytes(tensor, int(run[0]), int(run[-1]) + 1) for run in runs]
    data = np.concatenate([_read_bytes(tensor, 0, 0), *parts])
    found: NDArray[np.uint8] = data[np.searchsorted(ascending, rows)]
    return found


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
