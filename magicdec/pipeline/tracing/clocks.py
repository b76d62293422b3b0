"""How far the clocks of ranks on other hosts are ahead of the first rank's.

A rank answers the first rank with its time. The answer lies between the sending and the arrival, so
that the middle of the fastest round trip is wrong by half of it at most (Cristian 1989,
"Probabilistic clock synchronization"). Ranks of one host share its monotonic clock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from magicdec.distributed.groups import Launch

ROUNDS = 20


@dataclass(frozen=True)
class Ahead:
    """Of the clock of the first rank, and the largest possible error of that."""

    ahead_s: float = 0.0
    error_s: float = 0.0


def clocks_of(launch: Launch, ranks: Sequence[int]) -> list[Ahead]:
    """On rank 0, the clock of each of `ranks`. Rank 0 and these ranks must call it together."""
    if launch.local_world_size == launch.world_size:
        return [Ahead() for _ in ranks]
    found = compare_clocks(launch.rank, [rank for rank in ranks if rank != 0])
    return [found.get(rank, Ahead()) for rank in ranks]


def compare_clocks(rank: int, others: Sequence[int]) -> dict[int, Ahead]:
    """On rank 0, the clocks of `others`; empty elsewhere. Rank 0 and all others must call it
    together."""
    if rank == 0:
        return {other: _ask(other) for other in others}
    if rank in others:
        answer = torch.empty(1, dtype=torch.float64)
        for _ in range(ROUNDS):
            dist.recv(answer, 0)
            answer[0] = time.perf_counter()
            dist.send(answer, 0)
    return {}


def _ask(other: int) -> Ahead:
    answer, found = torch.empty(1, dtype=torch.float64), list[Ahead]()
    for _ in range(ROUNDS):
        asked_s = time.perf_counter()
        dist.send(answer, other)
        dist.recv(answer, other)
        error_s = (time.perf_counter() - asked_s) / 2
        found.append(Ahead(answer.item() - asked_s - error_s, error_s))
    return min(found, key=lambda each: each.error_s)
