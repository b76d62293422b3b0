"""Quantizer: how float32 weights become numbers in groups. A format is a function and an object
below, and a line of the table QUANTIZERS (`magicdec/names.py`).

int8 and int4 round to multiples of the scale as it is stored; the others are llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from magicdec.model.linear.grouped import GROUPS, GroupedNumbers, NumberFormat

CUTS = (0.92, 0.84)  # of the largest of a group, on a grid of 4 bits

Rounded = tuple[Tensor, Tensor, Tensor | None]
"""Numbers [N, groups, group], scales and, if there are any, minima [N, groups, 1]."""


@dataclass(frozen=True)
class Quantizer:
    """A matrix has the widest of `groups` that divides its inputs. `quantize` rounds weights
    [N, groups, group], float32."""

    bits: int
    groups: tuple[int, ...]
    scale: str
    has_minimum: bool
    least: int
    quantize: Callable[[Tensor], Rounded]

    @property
    def least_group(self) -> int:
        return min(self.groups)

    def divides(self, width: int) -> bool:
        """Whether groups divide so many inputs."""
        return width % self.least_group == 0

    def format(self, width: int) -> NumberFormat:
        """The format of matrices with so many inputs."""
        assert self.divides(width), "it is checked"
        group = max(group for group in self.groups if width % group == 0)
        return NumberFormat(self.bits, group, self.scale, self.has_minimum, self.least)

    def __call__(self, rows: Tensor, kind: NumberFormat | None = None) -> GroupedNumbers:
        """The numbers of weights [N, K], float32; `kind` is the format of the matrix of which they
        are some inputs. Scales are not finite where weights are not, or exceed what the scales can
        hold."""
        kind = kind or self.format(rows.shape[1])
        numbers, scale, minimum = self.quantize(rows.unflatten(1, (-1, kind.group)))
        dtype = getattr(torch, kind.scale)
        return GroupedNumbers(
            kind,
            numbers.nan_to_num_(0.0).to(torch.int8).flatten(1),
            scale.squeeze(2).to(dtype),
            None if minimum is None else minimum.squeeze(2).to(dtype),
        )


def to_int8(groups: Tensor) -> Rounded:
    """-127 to 127, to nearest, ties to even."""
    scale = (largest_magnitude(groups) / 127).bfloat16()
    return (groups / nonzero(scale)).round_().clamp_(-127, 127), scale, None


def to_int4(groups: Tensor) -> Rounded:
    """The largest of a group is -8."""
    return *_cut(groups, largest_signed(groups) / -8), None


def to_clipped_int4(groups: Tensor) -> Rounded:
    """As `to_int4`, or with the largest cut off, by which of CUTS has the least squared error."""
    largest = largest_signed(groups) / -8
    numbers, scale = _cut(groups, largest)
    least = _squared_error(numbers, scale, groups)
    for share in CUTS:
        others, other_scale = _cut(groups, largest * share)
        error = _squared_error(others, other_scale, groups)
        is_less = error < least
        numbers = torch.where(is_less, others, numbers)
        scale = torch.where(is_less, other_scale, scale)
        least = torch.minimum(error, least)
    return numbers, scale, None


def _cut(groups: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    scale = scale.bfloat16()
    return (groups / nonzero(scale)).round_().clamp_(-8, 7), scale


def _squared_error(numbers: Tensor, scale: Tensor, groups: Tensor) -> Tensor:
    return (numbers * scale.float() - groups).square_().sum(2, keepdim=True)


def to_q8_0(groups: Tensor) -> Rounded:
    scale = largest_magnitude(groups) / 127
    quotients = groups * inverse(scale)
    # Halves away from zero: `round` alone would take them to even numbers.
    whole = quotients.abs().floor()
    halves = ((quotients.abs() - whole) * 2).floor_()
    return (whole + halves).copysign_(quotients), scale, None


def to_q4_0(groups: Tensor) -> Rounded:
    scale = largest_signed(groups) / -8
    return (groups * inverse(scale) + 8.5).trunc_().clamp_(0, 15) - 8, scale, None


def to_q4_1(groups: Tensor) -> Rounded:
    minimum = groups.amin(2, keepdim=True)
    scale = (groups.amax(2, keepdim=True) - minimum) / 15
    return ((groups - minimum) * inverse(scale) + 0.5).trunc_().clamp_(0, 15), scale, minimum


def largest_magnitude(groups: Tensor) -> Tensor:
    return torch.maximum(groups.amax(2, keepdim=True), -groups.amin(2, keepdim=True))


def largest_signed(groups: Tensor) -> Tensor:
    """The number of the largest magnitude, with its sign."""
    return groups.gather(2, groups.abs().argmax(2, keepdim=True))


def nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1.0, scale.float())


def inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


INT8 = Quantizer(8, GROUPS, "bfloat16", False, -128, to_int8)
INT4 = Quantizer(4, (32,), "bfloat16", False, -8, to_int4)
INT4_G128 = Quantizer(4, (32, 64, 128), "bfloat16", False, -8, to_clipped_int4)
Q8_0 = Quantizer(8, (32,), "float16", False, -128, to_q8_0)
Q4_0 = Quantizer(4, (32,), "float16", False, -8, to_q4_0)
Q4_1 = Quantizer(4, (32,), "float16", True, 0, to_q4_1)
