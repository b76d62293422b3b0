"""Measures what a decode step of a stage takes on this rank: a layer, and what comes beside its
layers. The code that serves the ring is timed, with a few layers and messages that come home at
once.

Owns the measurement. Must not know what the times are for. The ranks of a stage measure together,
with their all-reduces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from magicdec.config.resolved import ResolvedConfig
from magicdec.console import make_progress
from magicdec.distributed.channels.connect import Loopback, RingEnds
from magicdec.distributed.channels.message import Kind, Message
from magicdec.distributed.groups import Group, ParallelGroups
from magicdec.distributed.stages import StageGrid
from magicdec.distributed.start import stage_groups_before_run
from magicdec.hardware.environment import device_of
from magicdec.hardware.threads import use_threads
from magicdec.pipeline.auto_split.choose import RankTimes
from magicdec.pipeline.auto_split.timing import (
    Timers,
    layers_to_time,
    load_layers,
    time_rounds,
)
from magicdec.pipeline.recurrent import RecurrentPipeline
from magicdec.pipeline.speculation import Speculation, make_speculation
from magicdec.pipeline.stage import VERIFY, WANTED, Occupancy, Stage
from magicdec.request import Request
from magicdec.sampling.sampling import make_params
from magicdec.scheduling.plan import Limits
from magicdec.setup.loading import LoadedModels, StagePart
from magicdec.setup.prepare import Prepared

STEPS = 8  # of a round; with drafts, whose number depends on the acceptance, at least so many


@dataclass(frozen=True)
class DecodeStep:
    """What is timed: steps of `rows` rows that hold `context` tokens each, with `num_drafts` drafts
    of each row."""

    rows: int
    context: int
    num_drafts: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of a row in a message."""
        return 1 + self.num_drafts

    @property
    def new_tokens(self) -> int:
        """Tokens that a row takes at most beside `context`."""
        return (STEPS + 1) * self.num_tokens


@dataclass(frozen=True)
class Timed:
    """`run.config` is that of this rank's stage in `grid`, with drafts if the step has any."""

    run: Prepared
    grid: StageGrid
    step: DecodeStep

    @property
    def config(self) -> ResolvedConfig:
        """The config of the run for rows of the step's size."""
        config, step = self.run.config, self.step
        workload = replace(
            config.workload,
            batch_size=step.rows,
            prefix_len=step.context,
            gen_len=step.new_tokens,
        )
        return replace(config, workload=workload)

    @property
    def device(self) -> torch.device:
        return device_of(self.run.config.parallel.device, self.run.launch.local_rank)

    @property
    def is_first(self) -> bool:
        """Whether this rank is in the first stage."""
        return self.grid.stage_of(self.run.launch.rank) == 0

    @property
    def num_layers(self) -> int:
        """The layers of the larger of the two stages that are timed."""
        return layers_to_time(self.run.source)


@dataclass
class FilledStage(Stage):
    """Prompts are not computed; their rows count as filled. Messages of `num_tokens` tokens a row
    are computed."""

    num_tokens: int = 1

    def compute(self, x: Tensor, rows: Sequence[int], last_only: bool) -> Tensor:
        if x.shape[1] == self.num_tokens:
            return super().compute(x, rows, last_only)
        self.runner.cache.advance(rows, x.shape[1])
        model = self.runner.model
        return next(model.parameters()).new_zeros(x.shape[0], 1, model.config.hidden_size)


def measure_times(timed: Timed) -> RankTimes:
    """With the threads of the run. All ranks must call it."""
    config, launch = timed.config, timed.run.launch
    with use_threads(config.parallel.threads_of(launch.rank)):
        if timed.grid.tensor_parallel == 1:
            group = Group((launch.rank,), 0)
            place = launch.rank, launch.world_size, group, None, timed.grid
            return time_stages(timed, ParallelGroups(*place))
        place_of_groups = launch, timed.grid, timed.device, config.parallel.collectives
        with stage_groups_before_run(*place_of_groups) as groups:
            return time_stages(timed, groups)


def time_stages(timed: Timed, groups: ParallelGroups) -> RankTimes:
    group, step = groups.target, timed.step
    one, several = (load_stage(timed, group, n, has_ends=False) for n in (1, timed.num_layers))
    with_ends = None
    if timed.is_first:
        first, speculation = load_stage(timed, group, 1, has_ends=True), None
        if step.num_drafts:
            run = replace(timed.run, config=timed.config)
            models = LoadedModels(timed.device, make_progress(False))
            speculation = make_speculation(run, first.runner, groups, models)
        with_ends = partial(time_first, first, timed, speculation)
    passing = partial(time_passing, one, step), partial(time_passing, several, step)
    return time_rounds(Timers(*passing, timed.num_layers, with_ends), group, timed.device)


def load_stage(timed: Timed, group: Group, num_layers: int, has_ends: bool) -> FilledStage:
    """A stage with the model's first layers."""
    step, part = timed.step, StagePart(range(num_layers), has_ends)
    place = timed.config, timed.run.source, group, timed.device, part
    runner = load_layers(*place, step.rows, step.context + step.new_tokens)
    return FilledStage(runner, is_last=False, num_tokens=step.num_tokens)


def time_passing(stage: FilledStage, step: DecodeStep) -> float:
    """Seconds of a step on a stage that receives hidden states and sends hidden states. All drafts
    are rejected."""
    rows, width = tuple(range(step.rows)), stage.runner.model.config.hidden_size
    newest = next(stage.runner.model.parameters()).new_full((step.rows, 1, width), 0.1)
    inbound = Loopback()
    inbound.send(Message(Kind.HIDDEN, 0, WANTED, rows, newest.expand(-1, step.context, -1)))
    payload = newest.expand(-1, step.num_tokens, -1).contiguous()
    for kept in range(step.context, step.context + STEPS):
        if step.num_drafts:
            words = *rows, *[kept] * step.rows
            inbound.send(Message(Kind.HIDDEN, 0, VERIFY, words, payload))
        else:
            inbound.send(Message(Kind.HIDDEN, 0, WANTED, rows, payload))
    inbound.send(Message(Kind.FREE, words=rows))
    inbound.send(Message(Kind.END))
    stage.occupancy = Occupancy()
    stage.serve(RingEnds(inbound, Loopback()))
    return stage.occupancy.decode_s


def time_first(stage: FilledStage, timed: Timed, speculation: Speculation | None) -> float:
    """Seconds of a step on the first stage, from the hidden states that come home to the next ones
    that it sends."""
    loop, step = Loopback(), timed.step
    prefilled = step.rows * step.context
    limits = Limits(
        stage.runner.max_tokens, prefill_tokens=prefilled, step_tokens=step.num_tokens
    )  # fmt: skip
    place = stage, RingEnds(loop, loop), 1, step.rows, limits, step.context
    pipeline = RecurrentPipeline(*place, speculation=speculation)
    params = make_params(timed.config.sampling, STEPS * step.num_tokens + 1, (), 0)
    stage.occupancy = Occupancy()
    pipeline.serve([Request(i, (1,) * step.context, params) for i in range(step.rows)])
    return stage.occupancy.decode_s
