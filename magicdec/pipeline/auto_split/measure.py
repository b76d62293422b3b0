"""Measures what a decode step of a stage takes on this rank: a layer, and what comes beside its
layers. The code that serves the ring is timed, with a few layers and messages that come home at
once.

Owns the measurement. Must not know what the times are for. Tensor-parallel ranks measure their
shards without all-reduces, because no process group exists yet.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from magicdec.config.resolved import ResolvedConfig
from magicdec.distributed.channels.connect import Loopback, RingEnds
from magicdec.distributed.channels.message import Kind, Message
from magicdec.distributed.groups import Group
from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.checkpoint.source import ModelSource
from magicdec.pipeline.auto_split.choose import RankTimes
from magicdec.pipeline.recurrent import RecurrentPipeline
from magicdec.pipeline.stage import WANTED, Occupancy, Stage
from magicdec.request import Request
from magicdec.runner import ModelRunner
from magicdec.sampling.sampling import make_params
from magicdec.scheduling.plan import Limits
from magicdec.setup.loading import StagePart, kinds_of, load_kind, make_backend, make_executor

MOST_LAYERS = 4  # that are timed together
FEWEST_ROUNDS, ROUNDS, ENOUGH_S = 3, 20, 2.0
STEPS = 8  # of a round


@dataclass(frozen=True)
class Timed:
    """What is timed: steps of `rows` rows that hold `context` tokens each, on the shard of a rank.
    `is_first`: this rank is in the first stage."""

    config: ResolvedConfig
    source: ModelSource
    shard: Shard
    rows: int
    context: int
    is_first: bool
    device: torch.device

    @property
    def num_layers(self) -> int:
        """The layers of the larger of the two stages that are timed."""
        return min(MOST_LAYERS, self.source.config.num_layers)


class FilledStage(Stage):
    """Prompts are not computed; their rows count as filled."""

    def compute(self, x: Tensor, rows: Sequence[int], last_only: bool) -> Tensor:
        if x.shape[1] == 1:
            return super().compute(x, rows, last_only)
        self.runner.cache.advance(rows, x.shape[1])
        model = self.runner.model
        return next(model.parameters()).new_zeros(x.shape[0], 1, model.config.hidden_size)


def measure_times(timed: Timed) -> RankTimes:
    """With the threads of the run. The number of threads is afterwards what it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(timed.config.parallel.threads)
    try:
        return time_stages(timed)
    finally:
        torch.set_num_threads(before)


def time_stages(timed: Timed) -> RankTimes:
    """All are timed in turn, in several rounds. Each number is the fastest of its rounds, because
    noise only adds to it."""
    one, several = (load_stage(timed, n, has_ends=False) for n in (1, timed.num_layers))
    first = load_stage(timed, 1, has_ends=True) if timed.is_first else None
    found: list[tuple[float, float, float]] = []
    end = time.perf_counter() + ENOUGH_S
    while len(found) < FEWEST_ROUNDS or (len(found) < ROUNDS and time.perf_counter() < end):
        times = time_passing(one, timed), time_passing(several, timed)
        found.append((*times, 0.0 if first is None else time_first(first, timed)))
    one_s, several_s, first_s = map(min, zip(*found, strict=True))
    layer_s = (several_s - one_s) / (timed.num_layers - 1)
    if layer_s <= 0:  # only noise makes it so; a stage's time is then taken for that of its layers
        layer_s = several_s / timed.num_layers
    fixed_s = max(0.0, one_s - layer_s)
    return RankTimes(layer_s, fixed_s, None if first is None else max(fixed_s, first_s - layer_s))


def load_stage(timed: Timed, num_layers: int, has_ends: bool) -> FilledStage:
    """A stage with the model's first layers, and a cache that is not the zeros of fresh memory."""
    config, part = timed.config, StagePart(range(num_layers), has_ends)
    kinds, group = kinds_of(config.model, config.model.target_dtype), Group((0,), 0)
    model = load_kind(timed.source, timed.shard, kinds, timed.device, part)
    backend, executor = make_backend(config.attention.backend), make_executor(kinds, model, group)
    sizes = timed.rows, timed.context + STEPS + 1
    runner = ModelRunner(model, backend, group, *sizes, executor=executor)
    for pool in (runner.cache.k, runner.cache.v):
        pool.fill_(0.1)
    return FilledStage(runner, is_last=False)


def time_passing(stage: FilledStage, timed: Timed) -> float:
    """Seconds of a step on a stage that receives hidden states and sends hidden states."""
    rows, width = tuple(range(timed.rows)), timed.source.config.hidden_size
    newest = next(stage.runner.model.parameters()).new_full((timed.rows, 1, width), 0.1)
    inbound = Loopback()
    for payload in (newest.expand(-1, timed.context, -1), *[newest] * STEPS):
        inbound.send(Message(Kind.HIDDEN, 0, WANTED, rows, payload))
    inbound.send(Message(Kind.FREE, words=rows))
    inbound.send(Message(Kind.END))
    stage.occupancy = Occupancy()
    stage.serve(RingEnds(inbound, Loopback()))
    return stage.occupancy.decode_s


def time_first(stage: FilledStage, timed: Timed) -> float:
    """Seconds of a step on the first stage, from the hidden states that come home to the next ones
    that it sends."""
    loop = Loopback()
    limits = Limits(stage.runner.max_tokens, prefill_tokens=timed.rows * timed.context)
    place = 1, timed.rows, limits, timed.context
    pipeline = RecurrentPipeline(stage, RingEnds(loop, loop), *place)
    params = make_params(timed.config.sampling, STEPS + 1, (), 0)
    requests = [Request(i, (1,) * timed.context, params) for i in range(timed.rows)]
    pipeline.serve(requests)
    return statistics.median(b - a for a, b in pairwise(requests[0].token_times_s))
