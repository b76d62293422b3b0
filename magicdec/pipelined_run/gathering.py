"""Brings the spans of every rank to the first rank, by the first rank's clock."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from magicdec.distributed.groups import Launch
from magicdec.pipeline.tracing.clocks import clocks_of
from magicdec.pipeline.tracing.rows import gather_rows
from magicdec.pipelined_run.spans import Span, What


def gather_spans(found: Sequence[Span], launch: Launch) -> list[list[Span]]:
    """The spans of every rank. All ranks must call it; the times are right on rank 0 alone."""
    rows = [(s.what, s.run, s.begin_s, s.end_s, s.value) for s in found]
    ours = torch.tensor(rows, dtype=torch.float64).view(-1, 5)
    by_rank = gather_rows(ours, launch.world_size)
    clocks = clocks_of(launch, range(launch.world_size))
    return [from_tensor(rows, clock.ahead_s) for rows, clock in zip(by_rank, clocks, strict=True)]


def from_tensor(rows: Tensor, ahead_s: float) -> list[Span]:
    """`rows` [N, 5] by a clock that is ahead of the first rank's by so much."""
    return [
        Span(What(int(what)), int(run), begin_s - ahead_s, end_s - ahead_s, int(value))
        for what, run, begin_s, end_s, value in rows.tolist()
    ]
