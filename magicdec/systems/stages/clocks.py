"""The gathering of all ranks' spans by the first rank's clock. Ranks of one host share its
monotonic clock; for another host, half of the fastest round trip bounds the error (Cristian 1989,
"Probabilistic clock synchronization")."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from magicdec.distributed.channels.message import Traffic
from magicdec.distributed.groups import Launch
from magicdec.distributed.layout import StageGrid
from magicdec.distributed.values import all_gather_values
from magicdec.systems.stages.spans import Span, Spans

ROUNDS = 20


@dataclass(frozen=True)
class Ahead:
    """How far a clock is ahead of the first rank's, and the largest possible error of that."""

    ahead_s: float = 0.0
    error_s: float = 0.0


def clocks_of(launch: Launch) -> list[Ahead]:
    """The clock of each rank; right on rank 0 alone. All ranks must call it together."""
    if launch.local_world_size == launch.world_size:
        return [Ahead()] * launch.world_size
    return compare_clocks(launch.rank, launch.world_size)


def compare_clocks(rank: int, world_size: int) -> list[Ahead]:
    """The clock of each rank by exchanged times, also for ranks of one host."""
    if rank == 0:
        return [Ahead(), *map(_ask, range(1, world_size))]
    answer = torch.empty(1, dtype=torch.float64)
    for _ in range(ROUNDS):
        dist.recv(answer, 0)
        answer[0] = time.perf_counter()
        dist.send(answer, 0)
    return [Ahead()] * world_size


def _ask(other: int) -> Ahead:
    answer = torch.empty(1, dtype=torch.float64)
    comparisons = list[Ahead]()
    for _ in range(ROUNDS):
        begin_s = time.perf_counter()
        dist.send(answer, other)
        dist.recv(answer, other)
        error_s = (time.perf_counter() - begin_s) / 2
        comparisons.append(Ahead(answer.item() - begin_s - error_s, error_s))
    return min(comparisons, key=lambda comparison: comparison.error_s)


def gather_spans(spans: Spans, clocks: Sequence[Ahead]) -> list[Spans]:
    """The spans of every rank. All ranks must call it; the times are right on rank 0 alone."""
    by_rank = all_gather_values(list(spans), list[Span], len(clocks))
    return [
        Spans(
            replace(span, begin_s=span.begin_s - clock.ahead_s, end_s=span.end_s - clock.ahead_s)
            for span in rank_spans
        )
        for rank_spans, clock in zip(by_rank, clocks, strict=True)
    ]


def gather_leaders(
    launch: Launch, grid: StageGrid, spans: Spans, sent: Traffic
) -> tuple[list[Spans], list[Traffic], float]:
    """The spans and the sent messages of the first rank of each stage, and the largest error of the
    times. All ranks must call it; right on rank 0 alone."""
    clocks = clocks_of(launch)
    by_rank = gather_spans(spans, clocks)
    sent_by_rank = all_gather_values(sent, Traffic, launch.world_size)
    leaders = grid.leaders
    error_s = max(clocks[leader].error_s for leader in leaders)
    return (
        [by_rank[leader] for leader in leaders],
        [sent_by_rank[leader] for leader in leaders],
        error_s,
    )
