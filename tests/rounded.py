"""The numbers that a KV cache of codes has, by its definition."""

import torch
from scipy.linalg import hadamard
from torch import Tensor

CODES = [torch.int8, torch.uint8]  # of pools: int8, and int4, two in a byte


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
    """Keys [..., D], of which a Hadamard transform of each 16 dimensions is rounded as by
    `as_int4`, float32."""
    filling = -numbers.shape[-1] % 16
    whole = torch.nn.functional.pad(numbers.double(), (0, filling)).unflatten(-1, (-1, 16))
    matrix = torch.from_numpy(hadamard(16)).double()
    rounded = as_int4((whole @ matrix).flatten(-2).float()).double().unflatten(-1, (-1, 16))
    return (rounded @ matrix / 16).flatten(-2)[..., : numbers.shape[-1]].float()


def as_stored(numbers: Tensor, dtype: torch.dtype, are_keys: bool = False) -> Tensor:
    """Numbers [..., D], values if not keys, as a pool of this dtype has them, by the definition."""
    if dtype not in CODES:
        return numbers
    if dtype == torch.int8:
        return as_int8(numbers)
    return as_int4_keys(numbers) if are_keys else as_int4(numbers)
