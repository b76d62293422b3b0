"""Matrices of checkpoints that another program quantised: integers with scales and zero points, and
floating-point numbers with scales."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from magicdec.model.checkpoint.weight_files import WeightSource
from magicdec.model.linear.grouped import GROUPS, GroupedNumbers, NumberFormat, narrowed
from magicdec.output.files import AGAIN

WORD = 32  # bits of an element of a packed tensor
# Weights that are made at a time, which bounds the extra memory of up to 13 bytes for each.
MADE = 1 << 22
SCALE_DTYPES = ("float16", "bfloat16", "float32")
EXPONENTS = "float8_e8m0fnu"  # E8M0: a power of two, which float32 has


class Parts:
    """The stored tensors of one module: `X.qweight` and others of module X."""

    def __init__(self, source: WeightSource, module: str) -> None:
        self.source = source
        self.module = module

    def name(self, leaf: str) -> str:
        return f"{self.module}.{leaf}"

    def __contains__(self, leaf: str) -> bool:
        return self.name(leaf) in self.source.tensors

    def shape(self, leaf: str) -> tuple[int, ...]:
        return self.source.tensors[self.name(leaf)].shape

    def dtype(self, leaf: str) -> str:
        return self.source.tensors[self.name(leaf)].dtype

    def read(self, leaf: str, *index: slice) -> Tensor:
        return self.source.read(self.name(leaf), index)

    def read_packed(
        self,
        leaf: str,
        bits: int,
        packed: slice,
        other: slice,
        dim: int,
        order: Sequence[int] | None = None,
    ) -> Tensor:
        """Codes, uint8 [other, packed], of a tensor that is packed along `dim`. `order`: the places
        in a word, from the lowest bits on, in which its codes stand."""
        in_word = WORD // bits
        words = slice(packed.start // in_word, -(-packed.stop // in_word))
        stored = self.read(leaf, *((words, other) if dim == 0 else (other, words)))
        codes = unpacked(stored.T if dim == 0 else stored, bits)
        if order is not None:
            codes = codes.unflatten(-1, (-1, in_word))[..., list(order)].flatten(-2)
        start = words.start * in_word
        return codes[:, packed.start - start : packed.stop - start]

    def refusal(self, leaf: str, what: str, way_out: str = AGAIN) -> ValueError:
        name = self.name(leaf)
        return ValueError(f"{self.source.where(name)}: {name} {what}; {way_out}")

    def expect(self, leaf: str, shape: tuple[int, ...], dtypes: Sequence[str]) -> None:
        """Raise ValueError unless the tensor is there with this shape and one of these dtypes."""
        if leaf not in self:
            raise self.refusal(leaf, f"is missing, expected shape {shape}")
        if self.shape(leaf) != shape:
            raise self.refusal(leaf, f"has shape {self.shape(leaf)}, expected {shape}")
        if self.dtype(leaf) not in dtypes:
            found = self.dtype(leaf)
            raise self.refusal(leaf, f"is stored as {found}, expected {' or '.join(dtypes)}")


class QuantizedMatrix(ABC):
    """A weight [N, K] that is presented in place of the tensors `leaves` of its module. `format` is
    None if it is dense, in float32. `is_transposed`: its family names it as [K, N]. `order`: of the
    columns of its numbers, as in GroupedNumbers."""

    shape: tuple[int, int]
    leaves: tuple[str, ...]
    is_transposed: bool = False
    format: NumberFormat | None = None
    order: Tensor | None = None
    file: Path | None = None

    @abstractmethod
    def dense(self, rows: slice, columns: slice) -> Tensor:
        """Weights, float32."""

    def numbers(self, rows: slice, columns: slice) -> GroupedNumbers:
        """Of whole groups of columns; of all columns if they have an order."""
        raise AssertionError("it is stored in groups")


class IntegerMatrix(QuantizedMatrix):
    """weight = scale * (code - zero), which is computed exactly or rounded once, to float32.

    Codes are unsigned, of 4 or 8 bits. An input k has the scale and zero point of group
    `group_of[k]`, or of k // group_size. Where the inputs of groups are not contiguous, columns of
    numbers are sorted by their groups. That weight is dense if a group then has another size, or if
    no format holds the numbers.

    Raises:
        ValueError: a group has no number of one, or no format holds numbers whose groups are
            contiguous. The message names file and tensor.
    """

    def __init__(
        self,
        parts: Parts,
        shape: tuple[int, int],
        bits: int,
        group_size: int,
        group_of: Tensor | None = None,
    ) -> None:
        self.parts = parts
        self.shape = shape
        self.bits = bits
        self.group_size = group_size
        self.num_groups = -(-shape[1] // group_size)
        self.group_of = self._if_scattered(group_of)
        if self.group_of is None:
            self._choose_format()
        else:
            groups, order = self.group_of.sort(stable=True)
            if torch.equal(groups, self._contiguous()):
                self._choose_format()
            if self.format is not None:
                self.order = order.int()

    @property
    @abstractmethod
    def scale_leaf(self) -> str: ...

    @abstractmethod
    def codes(self, rows: slice, columns: slice) -> Tensor:
        """uint8 [rows, columns]."""

    @abstractmethod
    def scales(self, rows: slice) -> Tensor:
        """[rows, groups] in the stored dtype."""

    @abstractmethod
    def zeros(self, rows: slice) -> Tensor:
        """int16 [rows, groups]."""

    def _if_scattered(self, group_of: Tensor | None) -> Tensor | None:
        """`group_of` unless it says no more than `group_size`."""
        if group_of is None:
            return None
        first = int(group_of.min())
        last = int(group_of.max())
        if first < 0 or last >= self.num_groups:
            raise ValueError(
                f"{self.parts.source.where(self.parts.name(self.scale_leaf))}: the groups of "
                f"{self.parts.module} are numbered {first} to {last}, expected 0 to "
                f"{self.num_groups - 1}; {AGAIN}"
            )
        return None if torch.equal(group_of.long(), self._contiguous()) else group_of.long()

    def _contiguous(self) -> Tensor:
        return torch.arange(self.shape[1]) // self.group_size

    def _choose_format(self) -> None:
        """The narrowest format that holds the weights exactly. A scale in 16 bits times a code or a
        zero point is exact in float32, and so are their differences."""
        held = [g for g in GROUPS if self.group_size % g == 0 and self.shape[1] % g == 0]
        if not held:
            self._refuse(
                f"has groups of {self.group_size} of {self.shape[1]} inputs, which no group of "
                f"{', '.join(map(str, GROUPS))} divides",
                "choose a checkpoint with such groups",
            )
            return
        group = max(held)
        rows = slice(0, self.shape[0])
        dtype = self.parts.dtype(self.scale_leaf)
        zeros = self.zeros(rows)
        zero = int(zeros.min())
        is_constant = zero == int(zeros.max())
        if is_constant and self.bits == 4:
            self.format = NumberFormat(4, group, dtype, False, -zero)
        elif is_constant and zero == 128:
            self.format = NumberFormat(8, group, dtype, False, -128)
        elif dtype != "float32":
            least = 0 if self.bits == 4 else -128
            self.format = NumberFormat(self.bits, group, "float32", True, least)
            scale = self.scales(rows)
            whole = GroupedNumbers(self.format, scale, scale.float(), self._minima(scale, zeros))
            self.format = narrowed(whole).format
        elif self.bits == 4:  # code - zero fits into 8 bits
            self.format = NumberFormat(8, group, dtype, False, -128)
        else:
            self._refuse(
                "is in float32 beside 8-bit numbers with zero points, which is not read",
                "choose a checkpoint with scales in float16 or bfloat16, or a symmetric one",
            )

    def _refuse(self, what: str, way_out: str) -> None:
        """Scattered weights are dense instead."""
        if self.group_of is None:
            raise self.parts.refusal(self.scale_leaf, what, way_out)

    def _minima(self, scale: Tensor, zeros: Tensor) -> Tensor:
        """Those of numbers that are code + least."""
        assert self.format is not None, "it was chosen"
        return scale.float() * (-self.format.least - zeros)

    def numbers(self, rows: slice, columns: slice) -> GroupedNumbers:
        kind = self.format
        assert kind is not None, "it is stored in groups"
        assert columns.start % kind.group == columns.stop % kind.group == 0, "whole groups"
        is_whole = (columns.start, columns.stop) == (0, self.shape[1])
        assert self.order is None or is_whole, "all inputs"
        dtype = getattr(torch, kind.scale)
        groups = torch.arange(columns.start, columns.stop, kind.group) // self.group_size
        scale = self.scales(rows)[:, groups]
        zeros = self.zeros(rows)[:, groups]
        minimum = self._minima(scale, zeros).to(dtype) if kind.has_minimum else None
        width = columns.stop - columns.start
        numbers = torch.empty(len(scale), width, dtype=torch.int8)
        for part in made_together(rows, width):
            place = slice(part.start - rows.start, part.stop - rows.start)
            codes = self.codes(part, columns).to(torch.int16)
            if self.order is not None:
                codes = codes[:, self.order]
            if kind.has_minimum:
                numbers[place] = codes.add_(kind.least)
            else:
                numbers[place] = codes.sub_(zeros[place].repeat_interleave(kind.group, dim=1))
        return GroupedNumbers(kind, numbers, scale.to(dtype), minimum, self.order)

    def dense(self, rows: slice, columns: slice) -> Tensor:
        inputs = torch.arange(columns.start, columns.stop)
        groups = inputs // self.group_size if self.group_of is None else self.group_of[columns]
        scale = self.scales(rows)
        zeros = self.zeros(rows)
        weights = torch.empty(len(scale), len(inputs))
        for part in made_together(rows, len(inputs)):
            place = slice(part.start - rows.start, part.stop - rows.start)
            codes = self.codes(part, columns).to(torch.int16)
            weights[place] = codes.sub_(zeros[place][:, groups])
            weights[place] *= scale[place][:, groups]
        return weights


class ScaledMatrix(QuantizedMatrix):
    """weight = stored number * scale, rounded once, to float32. A scale [.., ..] belongs to a
    `block` of outputs and inputs, of which the last ones may be smaller."""

    def __init__(self, parts: Parts, scale_leaf: str, block: tuple[int, int]) -> None:
        parts.expect("weight", shape_of(parts, "weight"), ("float8_e4m3fn",))
        self.parts = parts
        self.scale_leaf = scale_leaf
        self.block = block
        self.shape = shape_of(parts, "weight")
        self.leaves = ("weight", scale_leaf)
        counts = [-(-size // part) for size, part in zip(self.shape, block, strict=True)]
        found = parts.shape(scale_leaf)
        is_scalar = counts == [1, 1] and found in ((), (1,))
        expected = found if is_scalar else (counts[0], counts[1])
        parts.expect(scale_leaf, expected, (*SCALE_DTYPES, EXPONENTS))

    def dense(self, rows: slice, columns: slice) -> Tensor:
        stored = self.parts.read(self.scale_leaf).float()
        scale = stored if stored.dim() == 2 else stored.reshape(1, 1)
        outputs = torch.arange(rows.start, rows.stop) // self.block[0]
        inputs = torch.arange(columns.start, columns.stop) // self.block[1]
        weights = self.parts.read("weight", rows, columns).float()
        for first in range(0, len(weights), WORD):  # of scales, no tensor of this size is made
            place = slice(first, first + WORD)
            weights[place] *= scale[outputs[place]][:, inputs]
        return weights


def made_together(rows: slice, width: int) -> Iterator[slice]:
    """Parts of `rows`, each of about MADE weights."""
    step = max(MADE // max(width, 1) // WORD, 1) * WORD
    for first in range(rows.start, rows.stop, step):
        yield slice(first, min(first + step, rows.stop))


def shape_of(parts: Parts, leaf: str) -> tuple[int, int]:
    """Raises ValueError unless the tensor is a matrix."""
    shape = parts.shape(leaf)
    if len(shape) != 2:
        raise parts.refusal(leaf, f"has shape {shape}, expected a matrix")
    return shape[0], shape[1]


def unpacked(words: Tensor, bits: int) -> Tensor:
    """uint8 [..., W * 32 / bits] of int32 [..., W], from the lowest bits on."""
    # A clone has the usual strides; `contiguous` keeps others where a size is 1.
    data = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 8:
        return data
    return torch.stack([data & 15, data >> 4], dim=-1).flatten(-2)
