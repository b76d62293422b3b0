"""What every measurement for `--layer_split auto` does: it loads a few layers and times them in
rounds, from which follow a layer's time and what comes beside layers.

Must not know what a step is, nor what the times are for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from magicdec.config.resolved import ResolvedConfig
from magicdec.distributed.groups import Group
from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.checkpoint.source import ModelSource
from magicdec.pipeline.auto_split.choose import RankTimes
from magicdec.runner import ModelRunner
from magicdec.setup.loading import StagePart, kinds_of, load_kind, make_backend, make_executor

MOST_LAYERS = 4  # that are timed together
FEWEST_ROUNDS, ROUNDS, ENOUGH_S = 3, 20, 2.0

Timer = Callable[[], float]
"""Measures the seconds of a step."""


@dataclass(frozen=True)
class Timers:
    """Steps on a stage of one layer and on one of `num_layers`, neither with an end of the model,
    and on one of one layer with the ends that this rank's stage will have; None if it has none."""

    one: Timer
    several: Timer
    num_layers: int
    with_ends: Timer | None


def layers_to_time(source: ModelSource) -> int:
    """The layers of the larger of the stages that are timed."""
    return min(MOST_LAYERS, source.config.num_layers)


def load_layers(
    config: ResolvedConfig,
    source: ModelSource,
    group: Group,
    device: torch.device,
    part: StagePart,
    num_rows: int,
    max_tokens: int,
) -> ModelRunner:
    """A part of the target, with a cache that is not the zeros of fresh memory."""
    kinds, shard = kinds_of(config.model, config.model.target_dtype), Shard(group.index, group.size)
    model = load_kind(source, shard, kinds, device, part)
    backend, executor = make_backend(config.attention.backend), make_executor(kinds, model, group)
    runner = ModelRunner(model, backend, group, num_rows, max_tokens, executor=executor)
    for pool in (runner.cache.k, runner.cache.v):
        pool.fill_(0.1)
    return runner


def time_rounds(timers: Timers, group: Group, device: torch.device) -> RankTimes:
    """All are timed in turn, in several rounds, together with the other ranks of `group`. Each
    number is the fastest of its rounds, because noise only adds to it."""
    found: list[tuple[float, float, float]] = []
    end = time.perf_counter() + ENOUGH_S
    while len(found) < FEWEST_ROUNDS or (len(found) < ROUNDS and has_time(group, end, device)):
        passing_s = timers.one(), timers.several()
        found.append((*passing_s, 0.0 if timers.with_ends is None else timers.with_ends()))
    one_s, several_s, with_ends_s = map(min, zip(*found, strict=True))
    layer_s = (several_s - one_s) / (timers.num_layers - 1)
    if layer_s <= 0:  # only noise makes it so; a stage's time is then taken for that of its layers
        layer_s = several_s / timers.num_layers
    fixed_s = max(0.0, one_s - layer_s)
    has_ends = timers.with_ends is not None
    return RankTimes(layer_s, fixed_s, max(fixed_s, with_ends_s - layer_s) if has_ends else None)


def has_time(group: Group, end: float, device: torch.device) -> bool:
    """Whether the first rank of the group has time left, on all its ranks: they time together."""
    return bool(
        group.broadcast(torch.tensor([time.perf_counter() < end], device=device).int(), 0).item()
    )
