"""The block types of GGUF (ggml's ggml-common.h and ggml-quants.c): what the bytes of a block are,
as numbers of 4 or 8 bits in groups with a scale and, for some types, a minimum. Imports no torch.

A weight is number * scale + minimum in float32, which are the bits of the format's own
dequantisation: no product of a number and a scale has more than 24 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[Any]
"""uint8."""
Floats = NDArray[np.float32]
# The values of a number of 4 bits: of IQ4_NL and IQ4_XS, and of MXFP4, doubled.
NONLINEAR = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


class Groups(NamedTuple):
    """Rows [R, K] in groups of G inputs: `numbers` int8 [R, K], `scale` [R, K / G] and `minimum`
    [R, K / G] float32, or no minimum."""

    numbers: NDArray[np.int8]
    scale: Floats
    minimum: Floats | None

    def dense(self) -> Floats:
        """The weights, float32 [R, K]."""
        rows, groups = self.scale.shape
        numbers = self.numbers.reshape(rows, groups, -1).astype(np.float32)
        weights = numbers * self.scale[:, :, None]
        if self.minimum is not None:
            weights += self.minimum[:, :, None]
        return weights.reshape(rows, -1)


@dataclass(frozen=True)
class BlockType:
    """A type of blocks of `block` numbers in `num_bytes` bytes. Numbers are `least` to `least` +
    2^`bits` - 1, in groups of `group`. `scale` is the narrowest type that holds each scale and
    minimum. `unpack` takes blocks [n, num_bytes]."""

    name: str
    block: int
    num_bytes: int
    bits: int
    least: int
    group: int
    has_minimum: bool
    scale: str
    unpack: Callable[[Bytes], Groups]

    def groups(self, rows: Bytes) -> Groups:
        """Of rows [R, bytes]."""
        found = self.unpack(rows.reshape(-1, self.num_bytes))
        numbers = found.numbers.reshape(len(rows), -1)
        minimum = None if found.minimum is None else found.minimum.reshape(len(rows), -1)
        return Groups(numbers, found.scale.reshape(len(rows), -1), minimum)


@dataclass(frozen=True)
class FloatType:
    """A type of plain numbers. `dtype` is torch's name, `stored` numpy's type of the bytes."""

    name: str
    dtype: str
    stored: str
    num_bytes: int
    block: int = 1


def half(blocks: Bytes, at: int) -> Floats:
    """The float16 at a byte of each block, as float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def nibbles(qs: Bytes) -> Bytes:
    """[n, 16] bytes -> [n, 32]: the lower halves, then the upper ones."""
    return np.concatenate([qs & 15, qs >> 4], axis=1)


def fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """The bits of the 32-bit number at a byte of each block, as 16 or 0 [n, 32]."""
    bits = np.unpackbits(np.ascontiguousarray(blocks[:, at : at + 4]), axis=1, bitorder="little")
    return bits << 4


def signed(numbers: Bytes, zero: int = 0) -> NDArray[np.int8]:
    return (numbers.astype(np.int16) - zero).astype(np.int8)


def q4_0(b: Bytes) -> Groups:
    return Groups(signed(nibbles(b[:, 2:]), 8), half(b, 0), None)


def q4_1(b: Bytes) -> Groups:
    return Groups(signed(nibbles(b[:, 4:])), half(b, 0), half(b, 2))


def q5_0(b: Bytes) -> Groups:
    return Groups(signed(nibbles(b[:, 6:]) | fifth_bits(b, 2), 16), half(b, 0), None)


def q5_1(b: Bytes) -> Groups:
    return Groups(signed(nibbles(b[:, 8:]) | fifth_bits(b, 4)), half(b, 0), half(b, 2))


def q8_0(b: Bytes) -> Groups:
    return Groups(np.ascontiguousarray(b[:, 2:]).view(np.int8), half(b, 0), None)


def iq4_nl(b: Bytes) -> Groups:
    return Groups(NONLINEAR[nibbles(b[:, 2:])], half(b, 0), None)


def iq4_xs(b: Bytes) -> Groups:
    high = np.ascontiguousarray(b[:, 2:4]).view(np.uint16).astype(np.int32)
    g = np.arange(8)
    low = b[:, 4:8][:, g // 2].astype(np.int32) >> 4 * (g % 2) & 15
    scales = (low | (high >> 2 * g & 3) << 4) - 32
    numbers = nibbles(b[:, 8:].reshape(-1, 16)).reshape(-1, 256)
    return Groups(NONLINEAR[numbers], half(b, 0) * scales.astype(np.float32), None)


def mxfp4(b: Bytes) -> Groups:
    exponents = b[:, :1].astype(np.int32) - 128  # of half the scale, since E2M1 is doubled
    return Groups(E2M1[nibbles(b[:, 1:])], np.ldexp(np.float32(1), exponents), None)


def pairs_of_bits(qs: Bytes) -> Bytes:
    """[n, 64] -> [n, 256] numbers of two bits: of each half of 32 bytes the lowest pairs first."""
    halves = qs.reshape(-1, 2, 1, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return (halves >> shifts & 3).reshape(-1, 256)


def q2_k(b: Bytes) -> Groups:
    scales = half(b, 80) * (b[:, :16] & 15).astype(np.float32)
    minima = half(b, 82) * (b[:, :16] >> 4).astype(np.float32)
    return Groups(signed(pairs_of_bits(b[:, 16:80])), scales, -minima)


def q3_k(b: Bytes) -> Groups:
    planes = np.arange(8, dtype=np.uint8)[:, None]
    high = (b[:, None, :32] >> planes & 1).reshape(-1, 256)
    numbers = signed(pairs_of_bits(b[:, 32:96]) | high << 2, 4)
    s = b[:, 96:108]
    low = np.concatenate([s[:, :8] & 15, s[:, :8] >> 4], axis=1)
    shifts = np.repeat(np.arange(0, 8, 2, dtype=np.uint8), 4)
    scales = (low | (np.tile(s[:, 8:], (1, 4)) >> shifts & 3) << 4).astype(np.float32) - 32
    return Groups(numbers, half(b, 108) * scales, None)


def scales_and_minima(b: Bytes) -> tuple[Floats, Floats]:
    """Of Q4_K and Q5_K, whose scales and minima have six bits."""
    s = b[:, 4:16]
    first = s[:, :4]
    second = s[:, 4:8]
    third = s[:, 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return half(b, 0) * scales.astype(np.float32), half(b, 2) * minima.astype(np.float32)


def q4_k(b: Bytes) -> Groups:
    scales, minima = scales_and_minima(b)
    chunks = b[:, 16:].reshape(-1, 4, 32)
    numbers = np.stack([chunks & 15, chunks >> 4], axis=2).reshape(-1, 256)
    return Groups(signed(numbers), scales, -minima)


def q5_k(b: Bytes) -> Groups:
    scales, minima = scales_and_minima(b)
    chunks = b[:, 48:].reshape(-1, 4, 32)
    low = np.stack([chunks & 15, chunks >> 4], axis=2).reshape(-1, 8, 32)
    planes = np.arange(8, dtype=np.uint8)[:, None]
    high = (b[:, None, 16:48] >> planes & 1) << 4
    return Groups(signed((low | high).reshape(-1, 256)), scales, -minima)


def q6_k(b: Bytes) -> Groups:
    ql = b[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([ql & 15, ql >> 4], axis=2).reshape(-1, 2, 4, 32)
    qh = b[:, 128:192].reshape(-1, 2, 1, 32)
    high = qh >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    scales = np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(np.float32)
    numbers = signed((low | high << 4).reshape(-1, 256), 32)
    return Groups(numbers, half(b, 208) * scales, None)


F16 = "float16"
F32 = "float32"
# By ggml's number of the type.
BLOCK_TYPES = {
    2: BlockType("Q4_0", 32, 18, 4, -8, 32, False, F16, q4_0),
    3: BlockType("Q4_1", 32, 20, 4, 0, 32, True, F16, q4_1),
    6: BlockType("Q5_0", 32, 22, 8, -128, 32, False, F16, q5_0),
    7: BlockType("Q5_1", 32, 24, 8, -128, 32, True, F16, q5_1),
    8: BlockType("Q8_0", 32, 34, 8, -128, 32, False, F16, q8_0),
    10: BlockType("Q2_K", 256, 84, 4, 0, 16, True, F32, q2_k),
    11: BlockType("Q3_K", 256, 110, 4, -8, 16, False, F32, q3_k),
    12: BlockType("Q4_K", 256, 144, 4, 0, 32, True, F32, q4_k),
    13: BlockType("Q5_K", 256, 176, 8, -128, 32, True, F32, q5_k),
    14: BlockType("Q6_K", 256, 210, 8, -128, 16, False, F32, q6_k),
    20: BlockType("IQ4_NL", 32, 18, 8, -128, 32, False, F16, iq4_nl),
    23: BlockType("IQ4_XS", 256, 136, 8, -128, 32, False, F32, iq4_xs),
    39: BlockType("MXFP4", 32, 17, 8, -128, 32, False, F32, mxfp4),
}
FLOAT_TYPES = {
    0: FloatType("F32", "float32", "<f4", 4),
    1: FloatType("F16", "float16", "<f2", 2),
    28: FloatType("F64", "float64", "<f8", 8),
    30: FloatType("BF16", "bfloat16", "<i2", 2),
}
RETIRED = {4, 5, 31, 32, 33, 36, 37, 38}
# Names of types that are not read, for messages.
OTHER_TYPES = {
    **{9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 29: "IQ1_M"},
    **{34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4", 41: "Q1_0"},
}


def type_name(type_id: int) -> str:
    kind = BLOCK_TYPES.get(type_id) or FLOAT_TYPES.get(type_id)
    return kind.name if kind is not None else OTHER_TYPES.get(type_id, f"number {type_id}")
