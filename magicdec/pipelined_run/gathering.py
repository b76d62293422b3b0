"""Brings what every rank has noted to all ranks, as plain numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from magicdec.pipelined_run.spans import Span, What


def gather_spans(found: Sequence[Span], world_size: int) -> list[list[Span]]:
    """The spans of every rank. All ranks must call it."""
    rows = [(s.what, s.run, s.begin_s, s.end_s, s.value) for s in found]
    ours = torch.tensor(rows, dtype=torch.float64).view(-1, 5)
    return [from_tensor(each) for each in gather(ours, world_size)]


def from_tensor(rows: Tensor) -> list[Span]:
    return [
        Span(What(int(what)), int(run), begin_s, end_s, int(value))
        for what, run, begin_s, end_s, value in rows.tolist()
    ]


def gather(rows: Tensor, world_size: int) -> list[Tensor]:
    """The `rows` [N, K] of every rank on every rank; N may differ. All ranks must call it."""
    if world_size == 1:
        return [rows]
    import torch.distributed as dist

    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(sizes, torch.tensor([len(rows)]))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, rows.shape[1], dtype=rows.dtype)
    padded[: len(rows)] = rows
    found = [torch.empty_like(padded) for _ in range(world_size)]
    if longest:
        dist.all_gather(found, padded)
    return [each[: int(size)] for each, size in zip(found, sizes, strict=True)]
