"""Brings what the stages of a ring counted to the first rank.

Owns the messages for it, and how times of several clocks become those of one. Must not know how
anything is counted.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from magicdec.distributed.groups import Launch
from magicdec.distributed.stages import StageGrid
from magicdec.pipeline.metrics import StageUse
from magicdec.pipeline.stage import Occupancy
from magicdec.pipeline.tracing.clocks import Ahead, clocks_of
from magicdec.pipeline.tracing.ends import CountingEnds
from magicdec.pipeline.tracing.rows import gather_rows
from magicdec.pipeline.tracing.trace import RingTrace, StageTrace, spans_of


def gather(
    launch: Launch, grid: StageGrid, spent: Occupancy, counting: CountingEnds
) -> tuple[list[StageUse], RingTrace | None]:
    """What the first rank of each stage counted, and the spans if they were asked for. All ranks
    must call it; the times are right on rank 0 alone."""
    traffic, leaders = counting.traffic, [grid.ranks_of(n)[0] for n in range(grid.num_stages)]
    ours = [spent.total_s, spent.waiting_s, spent.decode_s, counting.sent_bytes]
    ours += [traffic.num_sent, traffic.sent_s, traffic.num_taken, traffic.taken_s]
    found = gather_rows(torch.tensor([ours], dtype=torch.float64), grid.world_size)
    ahead = clocks_of(launch, leaders)
    uses = uses_of([found[leader][0].tolist() for leader in leaders], ahead)
    if traffic.trace is None:
        return uses, None
    return uses, gather_spans(launch, leaders, ahead, traffic.trace)


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
    launch: Launch, leaders: Sequence[int], ahead: Sequence[Ahead], trace: StageTrace
) -> RingTrace | None:
    """The spans of all stages, on rank 0."""
    ours = torch.tensor(trace.spans, dtype=torch.float64).view(-1, 2)
    found = gather_rows(ours, launch.world_size)
    if launch.rank != 0:
        return None
    stages = [found[leader].flatten().tolist() for leader in leaders]
    assert all(len(times) == 2 * len(trace.samples) for times in stages), "a span for each message"
    return RingTrace(
        [spans_of(times, each.ahead_s) for times, each in zip(stages, ahead, strict=True)],
        spans_of(trace.head_spans),
        trace.samples,
        trace.are_prompts,
        max(each.error_s for each in ahead),
    )


def gather_memory(launch: Launch, samples: array[float]) -> list[Tensor]:
    """The samples of every rank by the clock of the first, [N, 2]: seconds and bytes. `samples` are
    those of this rank's `MemorySampler`. All ranks must call it; the times are right on rank 0
    alone."""
    ours = torch.tensor(samples, dtype=torch.float64).view(-1, 2)
    found = gather_rows(ours, launch.world_size)
    for of_rank, clock in zip(found, clocks_of(launch, range(launch.world_size)), strict=True):
        of_rank[:, 0] -= clock.ahead_s
    return found
