"""Matrices in groups as `magicdec model convert` writes them, in tensors beside each other:

- `X.weight`: int8 [N, K] for 8 bits, uint8 [N, K / 2] for 4 (`GroupedLinear.weight`);
- `X.weight_scale`, and `X.weight_minimum` where there are minima: [N, K / group];
- `X.weight_least` [1] int8: the least number;
- `X.weight_order` [K] int32, unless columns are in the order of the inputs: the input of each.

Files from before 2026-11-27 have int8 matrices in the layout of their family, each with a float32
`X.weight_scale` [N] alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from magicdec.model.checkpoint.quantized.matrix import Parts, QuantizedMatrix, shape_of
from magicdec.model.checkpoint.quantized.weights import PrequantizedWeights
from magicdec.model.checkpoint.weight_files import StoredTensor, WeightSource
from magicdec.model.checkpoint.weight_map import find_pieces, untie_head
from magicdec.model.config import ModelConfig
from magicdec.model.linear.grouped import (
    GROUPS,
    SCALES,
    GroupedNumbers,
    NumberFormat,
    compressed,
    expanded,
)

BITS = {"int8": 8, "uint8": 4}


class ConvertedWeights(PrequantizedWeights):
    """Weights of a file that `magicdec model convert` wrote."""


def converted(source: WeightSource, config: ModelConfig) -> WeightSource:
    """The source with the weights of matrices that are stored in groups. Raises ValueError for
    tensors that are not those of one."""
    pieces = find_pieces(untie_head(config))
    if config.num_mtp_layers:
        pieces |= find_pieces(config.mtp_config())
    matrices: dict[str, QuantizedMatrix] = {}
    for name in source.tensors:
        module, _, leaf = name.rpartition(".")
        if leaf != "weight_scale" or f"{module}.weight" not in pieces:
            continue
        parts = Parts(source, module)
        is_transposed = pieces[f"{module}.weight"].transposed
        kind = ScaledRows if len(parts.shape(leaf)) == 1 else ConvertedMatrix
        matrices[module] = kind(parts, is_transposed)
    return ConvertedWeights(source, matrices) if matrices else source


def stored_parts(
    name: str, shape: tuple[int, int], kind: NumberFormat, has_order: bool
) -> dict[str, StoredTensor]:
    """The headers of the tensors that hold a matrix [N, K] in groups, by name."""
    outputs, width = shape
    group_tensor = StoredTensor((outputs, width // kind.group), kind.scale)
    stored = {
        name: StoredTensor(
            (outputs, width * kind.bits // 8), "int8" if kind.bits == 8 else "uint8"
        ),
        f"{name}_scale": group_tensor,
        f"{name}_minimum": group_tensor,
        f"{name}_least": StoredTensor((1,), "int8"),
        f"{name}_order": StoredTensor((width,), "int32"),
    }
    if not kind.has_minimum:
        del stored[f"{name}_minimum"]
    if not has_order:
        del stored[f"{name}_order"]
    return stored


def values_of_outputs(name: str, numbers: GroupedNumbers) -> dict[str, Tensor]:
    """The values of those of these tensors that have rows for outputs."""
    values = {name: compressed(numbers), f"{name}_scale": numbers.scale}
    if numbers.minimum is not None:
        values[f"{name}_minimum"] = numbers.minimum
    return values


def values_of_matrix(name: str, numbers: GroupedNumbers) -> dict[str, Tensor]:
    """The values of the others, which are the same for all outputs."""
    values = {f"{name}_least": torch.tensor([numbers.format.least], dtype=torch.int8)}
    if numbers.order is not None:
        values[f"{name}_order"] = numbers.order
    return values


class GroupsOfFile(QuantizedMatrix):
    """What both forms share."""

    def __init__(self, parts: Parts, is_transposed: bool) -> None:
        self.parts = parts
        self.is_transposed = is_transposed
        if "weight" not in parts:
            raise parts.refusal("weight", "is missing")

    def dense(self, rows: slice, columns: slice) -> Tensor:
        assert self.format is not None
        if self.order is not None:
            return self.numbers(rows, slice(0, self.shape[1])).dense()[:, columns]
        group = self.format.group
        first = columns.start // group * group
        stop = -(-columns.stop // group) * group
        numbers = self.numbers(rows, slice(first, stop))
        return numbers.dense()[:, columns.start - first : columns.stop - first]


class ConvertedMatrix(GroupsOfFile):
    def __init__(self, parts: Parts, is_transposed: bool) -> None:
        super().__init__(parts, is_transposed)
        outputs, num_bytes = shape_of(parts, "weight")
        parts.expect("weight", (outputs, num_bytes), tuple(BITS))
        bits = BITS[parts.dtype("weight")]
        width = num_bytes * 8 // bits
        groups = max(1, shape_of(parts, "weight_scale")[1])
        group = width // groups
        if group not in GROUPS or width % group:
            raise parts.refusal(
                "weight_scale",
                f"has shape {parts.shape('weight_scale')}, which makes no groups of "
                f"{', '.join(map(str, GROUPS))} of {width} inputs",
            )
        parts.expect("weight_scale", (outputs, groups), SCALES)
        scale = parts.dtype("weight_scale")
        self.leaves = ("weight", "weight_scale", "weight_least")
        has_minimum = "weight_minimum" in parts
        if has_minimum:
            parts.expect("weight_minimum", (outputs, groups), (scale,))
            self.leaves += ("weight_minimum",)
        parts.expect("weight_least", (1,), ("int8",))
        least = int(parts.read("weight_least"))
        if least > 0 or (bits == 8 and least != -128):
            raise parts.refusal("weight_least", f"is {least}, which no numbers of {bits} bits have")
        self.shape = outputs, width
        self.format = NumberFormat(bits, group, scale, has_minimum, least)
        if "weight_order" in parts:
            self.leaves += ("weight_order",)
            self.order = self._read_order()

    def _read_order(self) -> Tensor:
        width = self.shape[1]
        self.parts.expect("weight_order", (width,), ("int32",))
        order = self.parts.read("weight_order").clone()
        if not torch.equal(order.sort().values, torch.arange(width, dtype=torch.int32)):
            raise self.parts.refusal(
                "weight_order",
                f"does not have each of the inputs 0 to {width - 1} once; convert the checkpoint "
                "that it was made from again",
            )
        return order

    def numbers(self, rows: slice, columns: slice) -> GroupedNumbers:
        kind = self.format
        assert kind is not None
        byte_columns = slice(columns.start * kind.bits // 8, columns.stop * kind.bits // 8)
        groups = slice(columns.start // kind.group, columns.stop // kind.group)
        minimum = self.parts.read("weight_minimum", rows, groups) if kind.has_minimum else None
        return GroupedNumbers(
            kind,
            expanded(self.parts.read("weight", rows, byte_columns), kind),
            self.parts.read("weight_scale", rows, groups),
            minimum,
            self.order,
        )


class ScaledRows(GroupsOfFile):
    """int8 numbers with a float32 scale for each output, as groups that have the same one."""

    leaves = ("weight", "weight_scale")

    def __init__(self, parts: Parts, is_transposed: bool) -> None:
        super().__init__(parts, is_transposed)
        stored = shape_of(parts, "weight")
        outputs, width = stored[::-1] if is_transposed else stored
        parts.expect("weight", stored, ("int8",))
        parts.expect("weight_scale", (outputs,), ("float32",))
        held = [group for group in GROUPS if width % group == 0]
        if not held:
            raise parts.refusal(
                "weight",
                f"has {width} inputs, which groups of {GROUPS[0]} do not divide",
                "convert the checkpoint that it was made from again, in another dtype",
            )
        self.shape = outputs, width
        self.format = NumberFormat(8, max(held), "float32", False, -128)

    def numbers(self, rows: slice, columns: slice) -> GroupedNumbers:
        assert self.format is not None
        if self.is_transposed:
            numbers = self.parts.read("weight", columns, rows).T
        else:
            numbers = self.parts.read("weight", rows, columns)
        scale = self.parts.read("weight_scale", rows)
        groups = (columns.stop - columns.start) // self.format.group
        return GroupedNumbers(self.format, numbers, scale[:, None].expand(-1, groups), None)
