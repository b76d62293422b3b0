"""Random numbers as hashes of (request seed, output position, purpose), without a generator's
state.

All ranks compute the same numbers, a request gets the same in any batch, and a step that goes back
draws the same again, which is correct, because no token before a position depends on its numbers.
Source: SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)  # as int64; products and sums wrap around
MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


class Purpose(IntEnum):
    """The decision of a random number. A position may use all three."""

    DRAFT = 0  # which token a draft model proposes there
    ACCEPT = 1  # whether verification accepts it
    RESAMPLE = 2  # which token the target chooses: a correction, a bonus or an undrafted token
    # In coupled sampling (`coupled`) the draft model chooses with the numbers of RESAMPLE too.


def splitmix64(state: Tensor, index: Tensor) -> Tensor:
    """Output `index`, from 0, of the generator that starts at `state`: 64 random bits as int64,
    broadcast."""
    return _mix(state + (index + 1) * GAMMA)


def uniforms(seeds: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    """Random numbers float64 in [0, 1) for output `positions` [B, K] of requests with `seeds`
    [B]."""
    bits = splitmix64(_mix(seeds).unsqueeze(1), positions * len(Purpose) + int(purpose))
    return _shift_right(bits, 11).double() * 2.0**-53


def exponentials(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Exponential numbers of mean 1 for `tokens` [N] or [B, T, N] at text `positions` [B, T] of
    requests with `seeds` [B]: float64 [B, T, N], finite and positive."""
    seeds = seeds.unsqueeze(1)
    bits = splitmix64(_mix(seeds), positions * len(Purpose) + int(Purpose.RESAMPLE))
    bits = splitmix64(bits.unsqueeze(-1), tokens)
    # 52 bits, so that adding a half is exact: the logarithm is neither that of 0 nor that of 1.
    unit = _shift_right(bits, 12).double().add_(0.5).mul_(2.0**-52)
    return unit.log_().neg_()


def derive_seed(seed: int, request_id: int) -> int:
    bits = splitmix64(_mix(torch.tensor(seed)), torch.tensor(request_id))
    return int(_shift_right(bits, 1))


def _mix(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64, a bijection on 64 bits."""
    x = (x ^ _shift_right(x, 30)).mul_(MULTIPLIERS[0])
    x = x.bitwise_xor_(_shift_right(x, 27)).mul_(MULTIPLIERS[1])
    return x.bitwise_xor_(_shift_right(x, 31))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift; `>>` alone would copy the sign bit."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)
