"""MXFP4 (OCP Microscaling Formats, 1.0), of the experts of gpt-oss: blocks of 32 numbers of 4 bits,
low half first, with a power of two."""

from __future__ import annotations

import torch
from torch import Tensor

from magicdec.model.checkpoint.quantized.matrix import Parts, QuantizedMatrix
from magicdec.model.checkpoint.quantized.method import QuantizationMethod, check_rest, names_of
from magicdec.model.families.fields import ConfigFields
from magicdec.model.linear.grouped import GroupedNumbers, NumberFormat

BLOCK = 32  # inputs
# Twice the number that a code of 4 bits stands for, which is whole.
DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
LARGEST = 252  # 6 * 2 ** (LARGEST - 127) is finite in float32
FORMAT = NumberFormat(8, BLOCK, "float32", False, -128)
EXPERTS = ".experts."


class Mxfp4(QuantizationMethod):
    """The matrices of experts are quantised, all others are not."""

    def __init__(self, table: ConfigFields) -> None:
        super().__init__(table)
        for name in names_of(table, "modules_to_not_convert"):
            if EXPERTS.strip(".") in name.split("."):
                raise ValueError(
                    f"modules_to_not_convert leaves out {name!r}, but experts are what MXFP4 is for"
                )
        check_rest(table, ("dequantize",))  # what transformers does with the weights it reads

    def is_marked(self, parts: Parts) -> bool:
        return "blocks" in parts

    def quantizes(self, module: str, is_head: bool) -> bool:
        return EXPERTS in module

    def matrix(self, parts: Parts, module: str) -> QuantizedMatrix:
        return Mxfp4Matrix(parts)


class Mxfp4Matrix(QuantizedMatrix):
    """`blocks` [N, K / 32, 16] and exponents `scales` [N, K / 32]."""

    leaves = ("blocks", "scales")
    format = FORMAT

    def __init__(self, parts: Parts) -> None:
        shape = parts.shape("blocks")
        if len(shape) != 3 or shape[2] != BLOCK // 2:
            raise parts.refusal("blocks", f"has shape {shape}, expected [N, K / {BLOCK}, 16]")
        parts.expect("blocks", shape, ("uint8",))
        parts.expect("scales", shape[:2], ("uint8",))
        self.parts = parts
        self.shape = shape[0], shape[1] * BLOCK

    def numbers(self, rows: slice, columns: slice) -> GroupedNumbers:
        blocks = slice(columns.start // BLOCK, columns.stop // BLOCK)
        scales = self.parts.read("scales", rows, blocks)
        try:
            return grouped_blocks(self.parts.read("blocks", rows, blocks), scales)
        except ValueError as error:
            raise self.parts.refusal("scales", f"is not read: {error}") from None

    def dense(self, rows: slice, columns: slice) -> Tensor:
        first = columns.start // BLOCK * BLOCK
        stop = -(-columns.stop // BLOCK) * BLOCK
        numbers = self.numbers(rows, slice(first, stop))
        return numbers.dense()[:, columns.start - first : columns.stop - first]


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
