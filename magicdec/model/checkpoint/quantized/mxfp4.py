"""MXFP4 as of gpt-oss: blocks of 32 numbers of 4 bits, low half first, with a power of two. Its
checkpoints are refused, because only mixtures of experts have it."""

from __future__ import annotations

import torch
from torch import Tensor

from magicdec.model.checkpoint.quantized.matrix import Parts, QuantizedMatrix
from magicdec.model.checkpoint.quantized.method import QuantizationMethod
from magicdec.model.families.fields import ConfigFields
from magicdec.model.linear.grouped import GroupedNumbers, NumberFormat

BLOCK = 32  # inputs
# Twice the number that a code of 4 bits stands for, which is whole.
DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
LARGEST = 252  # 6 * 2 ** (LARGEST - 127) is finite in float32
FORMAT = NumberFormat(8, BLOCK, "float32", False, -128)


class Mxfp4(QuantizationMethod):
    def __init__(self, table: ConfigFields) -> None:
        super().__init__(table)
        raise ValueError(
            "quant_method mxfp4 is that of gpt-oss, a mixture of experts, which is not read"
        )

    def is_marked(self, parts: Parts) -> bool:
        raise NotImplementedError

    def quantizes(self, module: str, is_head: bool) -> bool:
        raise NotImplementedError

    def matrix(self, parts: Parts, module: str) -> QuantizedMatrix:
        raise NotImplementedError


def grouped_blocks(blocks: Tensor, scales: Tensor) -> GroupedNumbers:
    """Of `blocks` uint8 [N, K / 32, 16] and exponents `scales` uint8 [N, K / 32], exactly. Raises
    ValueError for an exponent that stands for NaN, or with which 6 is infinite in float32."""
    if bool((scales > LARGEST).any()):
        raise ValueError(f"a scale of MXFP4 is {int(scales.max())}, beyond {LARGEST}")
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(1)
    numbers = torch.tensor(DOUBLED, dtype=torch.int8)[codes.long()]
    # 2 ** -127 and half of it are no normal numbers, but float32 has them.
    scale = torch.ldexp(torch.ones(scales.shape), scales.int() - 128)
    return GroupedNumbers(FORMAT, numbers, scale, None)
