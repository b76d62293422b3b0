"""The numbers that a KV cache of codes has, by its definition."""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
CODES = [torch.int8, torch.uint8, FP8]  # of pools: int8, int4, two in a byte, and FP8


def as_fp8(numbers: Tensor) -> Tensor:
    """Numbers rounded to a sign, an exponent from -6 to 8 and three bits, at most 448, float32."""
    magnitudes = numbers.double().abs()
    exponents = magnitudes.clamp(min=2**-6).log2().floor()
    steps = 2 ** (exponents - 3)
    rounded = (magnitudes / steps).round() * steps  # of two as near, to the even one
    return (rounded.clamp(max=448) * numbers.sign()).float()


def as_int8(numbers: Tensor) -> Tensor:
    """Numbers [..., D] rounded to 127ths of each token's largest magnitude, float32."""
    scales = numbers.float().abs().amax(-1, keepdim=True) / 127
    return (numbers.float() / scales.clamp(min=1e-30)).round() * scales


def as_int4(numbers: Tensor) -> Tensor:
    """Numbers [..., D] rounded to multiples from -8 to 7 of a bfloat16 scale, float32. Of each 32,
    the one of the largest magnitude becomes -8."""
    parts = []
    for group in numbers.float().split(32, dim=-1):
        largest = group.gather(-1, group.abs().argmax(-1, keepdim=True))
        scales = (largest / -8).bfloat16().float()
        parts.append((group / torch.where(scales == 0, 1, scales)).round().clamp(-8, 7) * scales)
    return torch.cat(parts, dim=-1)


def as_int4_keys(numbers: Tensor) -> Tensor:
    """Keys [..., D], of which the `mixed` 16 dimensions are rounded as by `as_int4`, float32."""
    filling = -numbers.shape[-1] % 16
    whole = torch.nn.functional.pad(numbers.float(), (0, filling)).unflatten(-1, (-1, 16))
    rounded = as_int4(mixed(whole).flatten(-2)).unflatten(-1, (-1, 16))
    return (mixed(rounded) / 16).flatten(-2)[..., : numbers.shape[-1]]


def mixed(numbers: Tensor) -> Tensor:
    """The Hadamard transform of numbers [..., 16], by sums and differences of those whose places
    differ in one bit, the lowest first: the order belongs to the format, since of a sum near a half
    the last bit decides the code."""
    place = torch.arange(16)
    for bit in (1, 2, 4, 8):
        sign = torch.where(place & bit != 0, -1.0, 1.0)
        numbers = numbers[..., place ^ bit] + sign * numbers
    return numbers


def as_stored(numbers: Tensor, dtype: torch.dtype, are_keys: bool = False) -> Tensor:
    """Numbers [..., D], values if not keys, as a pool of this dtype has them, by the definition."""
    if dtype not in CODES:
        return numbers
    if dtype == FP8:
        return as_fp8(numbers)
    if dtype == torch.int8:
        return as_int8(numbers)
    return as_int4_keys(numbers) if are_keys else as_int4(numbers)
