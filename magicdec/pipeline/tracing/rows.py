"""Numbers of every rank, brought to all ranks after a pass."""

from __future__ import annotations

import torch
from torch import Tensor

from magicdec.distributed.groups import Launch
from magicdec.hardware.threads import RankThreads, ThreadCount, check_threads


def gather_rows(rows: Tensor, world_size: int) -> list[Tensor]:
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


def gather_threads(name: str, count: ThreadCount, expected: int, launch: Launch) -> list[int]:
    """The measured threads of every rank in the pass of that name; `expected` and `count` are those
    of this rank. Raises AssertionError, on every rank, if a rank had others. All ranks must call
    it."""
    ours = torch.tensor([count.of_rank(launch.rank, expected)])
    rows = gather_rows(ours, launch.world_size)
    return check_threads(name, [RankThreads(*row[0].tolist()) for row in rows])
