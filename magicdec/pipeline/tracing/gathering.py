"""Brings what the stages of a ring counted to the first rank.

Owns the messages for it, and how times of several clocks become those of one. Must not know how
anything is counted.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
import torch.distributed as dist

from magicdec.distributed.groups import Launch
from magicdec.distributed.stages import StageGrid
from magicdec.pipeline.metrics import StageUse
from magicdec.pipeline.stage import Occupancy
from magicdec.pipeline.tracing.clocks import Ahead, compare_clocks
from magicdec.pipeline.tracing.ends import CountingEnds
from magicdec.pipeline.tracing.trace import RingTrace, StageTrace, spans_of


def gather(
    launch: Launch, grid: StageGrid, spent: Occupancy, counting: CountingEnds
) -> tuple[list[StageUse], RingTrace | None]:
    """What the first rank of each stage counted, and the spans if they were asked for. All ranks
    must call it; the times are right on rank 0 alone."""
    traffic, leaders = counting.traffic, [grid.ranks_of(n)[0] for n in range(grid.num_stages)]
    ours = [spent.total_s, spent.waiting_s, spent.decode_s, counting.sent_bytes]
    ours += [traffic.num_sent, traffic.sent_s, traffic.num_taken, traffic.taken_s]
    found = exchange(ours, grid.world_size)
    is_one_host = launch.local_world_size == launch.world_size
    clocks = {} if is_one_host else compare_clocks(launch.rank, leaders[1:])
    ahead = [clocks.get(leader, Ahead()) for leader in leaders]
    uses = uses_of([found[leader] for leader in leaders], ahead)
    if traffic.trace is None:
        return uses, None
    return uses, gather_spans(launch.rank, leaders, ahead, traffic.trace)


def exchange(ours: Sequence[float], world_size: int) -> list[list[float]]:
    """The numbers of every rank, on every rank."""
    if world_size == 1:
        return [[*ours]]
    sent = torch.tensor(ours, dtype=torch.float64)
    found = [torch.empty_like(sent) for _ in range(world_size)]
    dist.all_gather(found, sent)
    return [each.tolist() for each in found]


def uses_of(found: Sequence[Sequence[float]], ahead: Sequence[Ahead]) -> list[StageUse]:
    """`found` and the clocks are those of each stage. What a stage takes, the stage before it has
    sent; every message that was sent has been taken."""
    uses = []
    for stage, numbers in enumerate(found):
        total_s, waiting_s, decode_s, num_bytes, num_sent, _, taken, taken_s = numbers
        sent_s, between_s = found[stage - 1][5], ahead[stage].ahead_s - ahead[stage - 1].ahead_s
        queued_s = max(0.0, taken_s - sent_s - taken * between_s)
        counts = int(num_bytes), int(num_sent)
        uses.append(StageUse(total_s, waiting_s, decode_s, *counts, queued_s))
    return uses


def gather_spans(
    rank: int, leaders: Sequence[int], ahead: Sequence[Ahead], trace: StageTrace
) -> RingTrace | None:
    """The spans of all stages, on rank 0."""
    if rank != 0:
        if rank in leaders:
            ours = torch.tensor(trace.spans, dtype=torch.float64)
            dist.send(torch.tensor([len(ours)]), 0)
            dist.send(ours, 0)
        return None
    others = [receive(leader) for leader in leaders[1:]]
    stages = [trace.spans, *others]
    assert all(len(times) == 2 * len(trace.samples) for times in stages), "a span for each message"
    return RingTrace(
        [spans_of(times, each.ahead_s) for times, each in zip(stages, ahead, strict=True)],
        spans_of(trace.head_spans),
        trace.samples,
        trace.are_prompts,
        max(each.error_s for each in ahead),
    )


def receive(rank: int) -> array[float]:
    """The times that a rank sends."""
    count = torch.empty(1, dtype=torch.int64)
    dist.recv(count, rank)
    times = torch.empty(int(count), dtype=torch.float64)
    dist.recv(times, rank)
    return array("d", times.tolist())
