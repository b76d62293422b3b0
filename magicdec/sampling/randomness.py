"""Random numbers without a generator's state: each is a hash of (request seed, output position,
purpose).

So every rank draws the same number without exchanging it, a request draws the same numbers in any
batch, and rewinding needs no care. A step may draw for positions that it then does not reach, and
the next step draws the same numbers for them again: what was emitted before a position never
depended on that position's numbers, so they are still fresh.

Source: SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"),
whose i-th output is a function of state and i alone.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)  # as int64, whose products and sums wrap
MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


class Purpose(IntEnum):
    """What a position's random number decides. One position may use all three."""

    DRAFT = 0  # which token a draft model proposes there
    ACCEPT = 1  # whether verification takes it
    RESAMPLE = 2  # which token the target itself gives: correction, bonus, or without any draft


def splitmix64(state: Tensor, index: Tensor) -> Tensor:
    """Output `index` (from 0) of the generator started at `state`: int64, broadcast, 64 random
    bits."""
    return _mix(state + (index + 1) * GAMMA)


def uniforms(seeds: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    """float64 in [0, 1) for each of `positions` [B] or [B, K] (int64, counted in the request's
    output) of the requests with `seeds` [B]."""
    started = _mix(seeds).view(-1, *[1] * (positions.ndim - 1))
    bits = splitmix64(started, positions * len(Purpose) + int(purpose))
    return _shift_right(bits, 11).double() * 2.0**-53


def uniforms_ahead(
    seeds: Tensor, emitted: Tensor, count: int, purpose: Purpose, skip: int = 0
) -> Tensor:
    """float64 [B, count] for the next `count` output positions of requests with `seeds` [B] that
    have `emitted` [B] tokens, `skip` positions further on (a draft token is that many places ahead
    of the committed output)."""
    first = emitted.unsqueeze(1) + skip
    return uniforms(seeds, first + torch.arange(count, device=seeds.device), purpose)


def derive_seed(seed: int, request_id: int) -> int:
    """A request's own seed, 0 <= seed < 2^63."""
    bits = splitmix64(_mix(torch.tensor(seed)), torch.tensor(request_id))
    return int(_shift_right(bits, 1))


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finalizer: a bijection of 64 bits."""
    x = (x ^ _shift_right(x, 30)) * MULTIPLIERS[0]
    x = (x ^ _shift_right(x, 27)) * MULTIPLIERS[1]
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Zeros come in from the left; `>>` of int64 copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
