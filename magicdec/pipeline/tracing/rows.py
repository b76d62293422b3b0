"""Numbers of every rank, brought to all ranks after a pass."""

from __future__ import annotations

import torch
from torch import Tensor


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
