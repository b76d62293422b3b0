"""WeightFormat: what follows from the format of matrices in fewer bits than activations, without a
tensor: their bytes, which sizes they divide, and what can multiply them. Imports no torch.

A new format of `names.DRAFT_WEIGHTS` has a line in `WEIGHT_FORMATS`, and what rounds to it and
multiplies it in `model/linear/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import gcd

from magicdec.names import FP8

LEAST_GROUP = 16  # the fewest inputs that share a scale, of any format that layers have


@dataclass(frozen=True)
class WeightFormat:
    """Inputs share a scale of `scale_bytes` in groups of `most_group` (None: all of an output), or
    the largest part of it that divides them, at least `least_group`, which must. `is_native`: our
    kernels multiply it, so that it can be packed and in native steps; else torch does, layer by
    layer. Outputs are filled up to a multiple of `output_multiple` beside what packing fills up."""

    bits: int
    least_group: int
    most_group: int | None
    scale_bytes: int = 2
    output_multiple: int = 1
    is_native: bool = True

    def bytes_of(self, inputs: int) -> Fraction:
        """Bytes of a weight of a matrix with so many inputs, with its share of a scale."""
        group = inputs
        if self.most_group is not None:
            group = max(self.least_group, gcd(self.most_group, inputs))
        return Fraction(self.bits, 8) + Fraction(self.scale_bytes, group)


# Of `names.DRAFT_WEIGHTS`.
WEIGHT_FORMATS = {
    "int8": WeightFormat(8, LEAST_GROUP, 128),
    "int4": WeightFormat(4, 32, 32),
    "int4_g128": WeightFormat(4, 32, 128),
    FP8: WeightFormat(8, 16, None, scale_bytes=4, output_multiple=16, is_native=False),
}


def is_native(weights: str | None) -> bool:
    """Whether our kernels multiply matrices in `weights`, which may be a floating-point type, or as
    a checkpoint stores them."""
    return weights not in WEIGHT_FORMATS or WEIGHT_FORMATS[weights].is_native
