"""The CPU threads of each rank in a pass of one process, or of stages: what its config says, and
whether they were measured.

Must not know what a pass computes.
"""

from __future__ import annotations

import torch

from magicdec.config.resolved import ResolvedParallel
from magicdec.distributed.groups import Launch
from magicdec.hardware.threads import RankThreads, ThreadCount, check_threads
from magicdec.pipeline.tracing.rows import gather_rows


def expected_threads(parallel: ResolvedParallel, launch: Launch, is_one_process: bool) -> int:
    """Those of this rank. One process on the first rank has the threads of all ranks of its host,
    and the others wait."""
    if not is_one_process:
        return parallel.threads_of(launch.rank)
    return parallel.threads_on(launch.local_ranks) if launch.rank == 0 else 0


def gather_threads(name: str, count: ThreadCount, expected: int, launch: Launch) -> list[int]:
    """The measured threads of every rank; `expected` and `count` are those of this rank. Raises
    AssertionError, on every rank, if a rank had others. All ranks must call it."""
    ours = torch.tensor([count.of_rank(launch.rank, expected)])
    rows = gather_rows(ours, launch.world_size)
    return check_threads(name, [RankThreads(*row[0].tolist()) for row in rows])
