"""The config of each pass of `magicdec recurrent`, made from that of a model over all ranks."""

from __future__ import annotations

from dataclasses import replace

from magicdec.config.resolved import ResolvedConfig, ResolvedParallel
from magicdec.distributed.groups import Launch
from magicdec.distributed.stages import StageGrid
from magicdec.names import BASELINE


def of_stage(config: ResolvedConfig, grid: StageGrid, stage: int) -> ResolvedConfig:
    """The config of the ranks of one stage."""
    parallel = replace(config.parallel, rank_group=grid.ranks_of(stage))
    return replace(config, parallel=parallel)


def without_drafts(config: ResolvedConfig) -> ResolvedConfig:
    """The config of a pass that drafts nothing."""
    decoding = replace(config.decoding, strategy=BASELINE, drafter=None)
    return replace(config, decoding=decoding, draft=None)


def of_one_process(config: ResolvedConfig, num_rows: int) -> ResolvedConfig:
    """The config of the whole model on the first rank, with that many rows."""
    parallel = replace(config.parallel, rank_group=(0,))
    workload = replace(config.workload, batch_size=num_rows)
    return replace(config, parallel=parallel, workload=workload)


def expected_threads(parallel: ResolvedParallel, launch: Launch, is_one_process: bool) -> int:
    """The CPU threads of this rank. One process on the first rank has those of all ranks of its
    host, and the others wait."""
    if not is_one_process:
        return parallel.threads_of(launch.rank)
    return parallel.threads_on(launch.local_ranks) if launch.rank == 0 else 0
