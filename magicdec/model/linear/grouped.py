"""GroupedLinear: a linear layer whose weights are numbers of 4 or 8 bits in groups of inputs. A
weight is number * scale + minimum, with a scale and, in some formats, a minimum for each output and
group.

That holds, to the bit, the block types of GGUF, GPTQ, AWQ, compressed-tensors and MXFP4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from magicdec.model.linear import triton

GROUPS = (16, 32, 64, 128)  # inputs
SCALES = ("float32", "bfloat16", "float16")  # in the order of `ScaleType` (packed_groups.h)
# Weights widened at a time. It bounds the extra memory, and should be small enough for them to stay
# in a core's cache until they are multiplied.
WIDENED = 1 << 19
# A GPU launches few kernels rather than small ones.
WIDENED_ON_GPU = 1 << 26


@dataclass(frozen=True)
class NumberFormat:
    """Numbers of `bits` (4 or 8) from `least` on, in groups of `group` inputs, with scales, and
    minima if it `has_minimum`, in the dtype `scale`."""

    bits: int
    group: int
    scale: str
    has_minimum: bool
    least: int

    @property
    def bytes_per_weight(self) -> Fraction:
        group_bytes = getattr(torch, self.scale).itemsize * (1 + self.has_minimum)
        return Fraction(self.bits, 8) + Fraction(group_bytes, self.group)


def common_format(formats: Sequence[NumberFormat]) -> NumberFormat:
    """The narrowest format that holds numbers of all `formats` exactly."""
    first = formats[0]
    bits = max(number_format.bits for number_format in formats)
    scales = {number_format.scale for number_format in formats}
    if bits == 4 and len({number_format.least for number_format in formats}) > 1:
        bits = 8
    return NumberFormat(
        bits,
        math.gcd(*(number_format.group for number_format in formats)),
        first.scale if len(scales) == 1 else "float32",
        any(number_format.has_minimum for number_format in formats),
        -128 if bits == 8 else first.least,
    )


@dataclass(frozen=True)
class GroupedNumbers:
    """A matrix: `numbers` int8 [N, K], `scale` [N, K / group], and `minimum` of the same shape or
    None. `order` int32 [K]: the input that each column belongs to; None if they are in the order of
    the inputs. GPTQ's act-order puts inputs into a group that are not neighbours."""

    format: NumberFormat
    numbers: Tensor
    scale: Tensor
    minimum: Tensor | None
    order: Tensor | None = None

    def to(self, wanted: NumberFormat) -> GroupedNumbers:
        """The same weights in a format that holds them, as `common_format` gives one."""
        repeats = self.format.group // wanted.group
        dtype = getattr(torch, wanted.scale)
        scale = self.scale.to(dtype).repeat_interleave(repeats, dim=1)
        minimum = self.minimum
        if minimum is not None:
            minimum = minimum.to(dtype).repeat_interleave(repeats, dim=1)
        elif wanted.has_minimum:
            minimum = torch.zeros_like(scale)
        return replace(self, format=wanted, scale=scale, minimum=minimum)

    def inputs(self, first: int, last: int) -> GroupedNumbers:
        """Those of some inputs, in smaller groups if they begin or end within one. Columns that
        have an order are not cut."""
        if self.order is not None:
            assert (first, last) == (0, len(self.order)), "it is checked"
            return self
        group = math.gcd(self.format.group, first, last)
        assert group in GROUPS, "it is checked"
        finer = self.to(replace(self.format, group=group))
        part = slice(first // group, last // group)
        minimum = finer.minimum
        return GroupedNumbers(
            finer.format,
            finer.numbers[:, first:last],
            finer.scale[:, part],
            None if minimum is None else minimum[:, part],
        )

    def dense(self) -> Tensor:
        """The weights, float32 [N, K], in the order of the inputs."""
        weights = self.widened()
        if self.order is None:
            return weights
        return torch.empty_like(weights).index_copy_(1, self.order.long(), weights)

    def widened(self) -> Tensor:
        """The weights, float32 [N, K], in the order of the columns."""
        numbers = self.numbers.unflatten(1, (-1, self.format.group)).float()
        weights = numbers * self.scale.float().unsqueeze(2)
        if self.minimum is not None:
            weights += self.minimum.float().unsqueeze(2)
        return weights.flatten(1)


def have_one_order(orders: Sequence[Tensor | None]) -> bool:
    """Whether columns that have these orders can stand one below the other."""
    first = orders[0]
    if first is None:
        return all(order is None for order in orders)
    return all(order is not None and torch.equal(order, first) for order in orders)


def stack_rows(parts: Sequence[GroupedNumbers]) -> GroupedNumbers:
    """The parts, whose columns have one order, one below the other, in their common format."""
    if len(parts) == 1:
        return parts[0]
    assert have_one_order([part.order for part in parts]), "it is checked"
    wanted = common_format([part.format for part in parts])
    alike = [part.to(wanted) for part in parts]
    minima = [part.minimum for part in alike if part.minimum is not None]
    return GroupedNumbers(
        wanted,
        torch.cat([part.numbers for part in alike]),
        torch.cat([part.scale for part in alike]),
        torch.cat(minima) if minima else None,
        parts[0].order,
    )


class GroupedLinear(nn.Module):
    """x [..., K] -> [..., N]. `weight` is [N, K] int8, or [N, K / 2] bytes: of each group the first
    half of its inputs in the lower halves of its bytes, the second in the upper ones, as number -
    least. `scale` and `minimum` are [K / group, N]. `order`: as in GroupedNumbers. Unless
    `adds_bias`, the caller adds `bias`.

    Weights are exact where x is float32, on a CPU, and for few rows on a GPU. For more rows there,
    in bfloat16, they are rounded to bfloat16 before they are multiplied.
    """

    order: Tensor | None

    def __init__(
        self, numbers: GroupedNumbers, bias: Tensor | None, adds_bias: bool = True
    ) -> None:
        super().__init__()
        self.format = numbers.format
        self.out_features, self.in_features = numbers.numbers.shape
        self.adds_bias = adds_bias
        self.bias = bias
        self.weight = nn.Parameter(compressed(numbers), requires_grad=False)
        self.scale = nn.Parameter(numbers.scale.T.contiguous(), requires_grad=False)
        minimum = numbers.minimum
        self.minimum = (
            None if minimum is None else nn.Parameter(minimum.T.contiguous(), requires_grad=False)
        )
        self.register_buffer("order", numbers.order)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.order is None else x.index_select(-1, self.order)
        width = x.shape[-1]
        on_gpu = x.device.type == "cuda"
        has_products = self.format.bits == 8 or self.format.group > 16  # a byte has two inputs
        if has_products and triton.serves(x.device.type, x.numel() // width, x.dtype):
            out = triton.multiply_groups(x, self.weight, self.scale, self.minimum, self.format)
        else:
            out = x.new_empty(*x.shape[:-1], self.out_features)
            wide = x if on_gpu or x.dtype == torch.float64 else x.float()
            step = max(1, (WIDENED_ON_GPU if on_gpu else WIDENED) // width)
            for first in range(0, self.out_features, step):
                weights = self.numbers(slice(first, first + step)).widened()
                out[..., first : first + step] = F.linear(wide, weights.to(wide.dtype))
        return out + self.bias if self.adds_bias and self.bias is not None else out

    def numbers(self, outputs: slice = slice(None)) -> GroupedNumbers:
        """The layer's numbers, or those of some outputs."""
        weight = self.weight[outputs]
        minimum = self.minimum
        return GroupedNumbers(
            self.format,
            expanded(weight, self.format),
            self.scale[:, outputs].T,
            None if minimum is None else minimum[:, outputs].T,
            self.order,
        )

    def dense(self) -> Tensor:
        return self.numbers().dense()


def compressed(numbers: GroupedNumbers) -> Tensor:
    """The `weight` of a layer."""
    wanted = numbers.format
    if wanted.bits == 8:
        return numbers.numbers.contiguous()
    groups = (numbers.numbers - wanted.least).to(torch.uint8).unflatten(1, (-1, wanted.group))
    low, high = groups.chunk(2, dim=2)
    return (low | high << 4).flatten(1)


def expanded(weight: Tensor, kind: NumberFormat) -> Tensor:
    """The numbers, int8 [N, K], of the `weight` of a layer or of some of its outputs."""
    if kind.bits == 8:
        return weight
    both = weight.unflatten(1, (-1, kind.group // 2))
    halves = torch.cat([both & 15, both >> 4], dim=2)
    return (halves.to(torch.int8) + kind.least).flatten(1)


def narrowed(numbers: GroupedNumbers) -> GroupedNumbers:
    """The same with scales and minima in bfloat16 or float16, if that holds each exactly."""
    for dtype in SCALES[1:]:
        kept = getattr(torch, dtype)
        parts = [part for part in (numbers.scale, numbers.minimum) if part is not None]
        if all(torch.equal(part.to(kept).float(), part.float()) for part in parts):
            return numbers.to(replace(numbers.format, scale=dtype))
    return numbers
