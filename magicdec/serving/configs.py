"""The configs of the systems that serve requests: of a rank that needs no other, of a stage, of one
process, and of a pass that drafts nothing; and what every system does with the models that it
found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from magicdec.config.resolve import without_collectives
from magicdec.config.resolved import ResolvedConfig
from magicdec.distributed.layer_split import StageTimes, is_auto, split_layers
from magicdec.distributed.layout import StageGrid
from magicdec.executor.descriptions import layer_obstacle
from magicdec.hardware.environment import Machine
from magicdec.model.checkpoint.source import ModelSource
from magicdec.names import BASELINE
from magicdec.pipeline.auto_split import check_source
from magicdec.serving.options import ServeOptions
from magicdec.setup.prepare import Prepared, ResolvedRun, SetupCache, complete


def alone_of(models: ResolvedRun, machine: Machine) -> ResolvedConfig:
    """The config of a rank that needs no other to compute what it holds, where this is resolved for
    all ranks."""
    draft = models.models.draft
    obstacles = (
        layer_obstacle(models.models.target),
        None if draft is None else layer_obstacle(draft),
    )
    return without_collectives(models.config, machine, *obstacles)


def without_drafts(config: ResolvedConfig) -> ResolvedConfig:
    """The config of a pass that drafts nothing."""
    decoding = replace(config.decoding, strategy=BASELINE, drafter=None)
    return replace(config, decoding=decoding, draft=None)


def of_stage(config: ResolvedConfig, ranks: Sequence[int]) -> ResolvedConfig:
    """The config of the ranks of one stage."""
    return replace(config, parallel=replace(config.parallel, rank_group=tuple(ranks)))


def complete_run(models: ResolvedRun, cache: SetupCache, options: ServeOptions) -> Prepared:
    """The run with a prompt for each request. Its memory is planned later, with that of all
    systems, and ranks have not agreed on anything."""
    count = len(options.shapes), options.counted_by
    return complete(models, cache, lambda launch, check: "", count)


def check_split(split: str | None, grid: StageGrid, source: ModelSource) -> None:
    """Raises ValueError for a split that cannot be, before anything is timed."""
    if split is not None and is_auto(split):
        check_source(split, source)
    any_times = [StageTimes(0.0, 1.0)] * grid.num_stages
    split_layers(split, grid.num_stages, source.config.num_layers, any_times)
