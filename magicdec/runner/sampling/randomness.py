"""Random numbers without the state of a generator: each number is a hash of (request seed, output
position, purpose).

Every rank therefore computes the same number without communication, a request gets the same numbers
in any batch, and going back to an earlier state needs no special care. A step may draw numbers for
positions that it does not reach in the end, and the next step draws the same numbers for them
again. That is correct, because no token that was emitted before a position depends on the numbers
of that position. Where a position needs several numbers, for every token of the vocabulary, each of
them is a hash of the position's number.

Source: SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"). Its
i-th output depends only on its initial state and on i.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)  # as int64; products and sums wrap around
MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


class Purpose(IntEnum):
    """What a random number decides. One output position may use all three purposes."""

    DRAFT = 0  # which token a draft model proposes there
    ACCEPT = 1  # whether verification accepts it
    RESAMPLE = 2  # which token the target chooses: a correction, a bonus or an undrafted token
    # In coupled sampling (`coupled`) the draft model chooses with the numbers of RESAMPLE too.


def splitmix64(state: Tensor, index: Tensor) -> Tensor:
    """Output number `index`, counted from 0, of the generator that starts at `state`: 64 random
    bits as int64. The two tensors are broadcast."""
    return _mix(state + (index + 1) * GAMMA)


def uniforms(seeds: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    """A random number, float64 in [0, 1), for each of `positions` [B, K] of the requests with
    `seeds` [B]. Positions are int64 and counted in the request's output."""
    bits = splitmix64(_mix(seeds).unsqueeze(1), positions * len(Purpose) + int(purpose))
    return _shift_right(bits, 11).double() * 2.0**-53


def exponentials(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """A number with the exponential distribution of mean 1 for each of `tokens`, [N] or [B, T, N],
    at each of `positions` [B, T] of the texts of the requests with `seeds` [B]: float64 [B, T, N],
    finite and larger than 0."""
    seeds = seeds.unsqueeze(1)
    bits = splitmix64(_mix(seeds), positions * len(Purpose) + int(Purpose.RESAMPLE))
    bits = splitmix64(bits.unsqueeze(-1), tokens)
    # 52 bits, so that adding a half is exact: the logarithm is neither that of 0 nor that of 1.
    unit = _shift_right(bits, 12).double().add_(0.5).mul_(2.0**-52)
    return unit.log_().neg_()


def derive_seed(seed: int, request_id: int) -> int:
    """The seed of one request, 0 <= seed < 2^63."""
    bits = splitmix64(_mix(torch.tensor(seed)), torch.tensor(request_id))
    return int(_shift_right(bits, 1))


def _mix(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64, which is a bijection on 64 bits."""
    x = (x ^ _shift_right(x, 30)).mul_(MULTIPLIERS[0])
    x = x.bitwise_xor_(_shift_right(x, 27)).mul_(MULTIPLIERS[1])
    return x.bitwise_xor_(_shift_right(x, 31))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift to the right and fill with zeros; `>>` alone would copy the sign bit of an int64."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)
