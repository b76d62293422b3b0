"""The split of `--layer_split auto`: every rank times a few layers (`Timing`), and all ranks choose
the same split from these times before any process group of the run exists."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any, ClassVar

import torch

from magicdec.config.capacity import Capacity
from magicdec.config.resolved import ResolvedConfig
from magicdec.distributed.channels.message import Ends, Kind, Loopback, Message
from magicdec.distributed.groups import Group, Launch, ParallelGroups, exchange_texts
from magicdec.distributed.layer_split import FLAG, StageTimes, is_auto, split_layers
from magicdec.distributed.layout import StageGrid
from magicdec.distributed.start import stage_groups_before_run
from magicdec.hardware.environment import device_of, release_memory
from magicdec.hardware.threads import use_threads
from magicdec.output.console import make_progress
from magicdec.runner.model_runner import ModelRunner
from magicdec.setup.loading import LoadedModels, make_runner
from magicdec.setup.model_plan import ModelPlan, StagePart
from magicdec.setup.prepare import Prepared
from magicdec.systems.stages.spans import Spans
from magicdec.systems.stages.stage import MessageHandler, StageLoop

STEPS = 8  # of a round; with drafts, whose number depends on the acceptance, at least so many
MOST_LAYERS = 4  # that are timed together
ROUNDS = 5

Timer = Callable[[], float]
"""Measures the seconds of a step."""


@dataclass(frozen=True)
class RankTimes:
    """Seconds of a step on one rank: per layer, beside the layers without an end of the model
    (`fixed_s`), and with its own stage's end (`own_fixed_s`, None without one)."""

    layer_s: float
    fixed_s: float
    own_fixed_s: float | None


@dataclass(frozen=True)
class ChosenSplit:
    """The layers of the stages. `layer_split` is the recorded flag, with counts in place of `auto`;
    `reason` has the times behind `auto`."""

    layers: tuple[range, ...]
    layer_split: str | None
    reason: str = ""


def choose_split(
    text: str | None,
    stages: Sequence[Sequence[int]],
    num_layers: int,
    launch: Launch,
    source: str,
    find_times: Callable[[], RankTimes | None],
) -> ChosenSplit:
    """The split of a model among `stages`, given as the ranks of each stage. All ranks must call
    it, with any split. `find_times` returns None on a rank without a stage; `source` names its
    measurement. Raises ValueError on every rank if their splits differ."""
    needs_times = is_auto(text) and len(stages) > 1
    facts: dict[str, Any] = {"asked": text, "host": launch.local_ranks[0]}
    if needs_times:
        own = find_times()
        facts |= {"times": None if own is None else asdict(own)}
    by_rank = list(map(json.loads, exchange_texts(launch, json.dumps(facts), "layer split")))
    for rank, theirs in enumerate(by_rank):
        if theirs["asked"] != by_rank[0]["asked"]:
            here = by_rank[0]["asked"]
            there = theirs["asked"]
            raise ValueError(f"{FLAG}: rank 0 has {here}, rank {rank} has {there}")
    times = stage_times(stages, by_rank) if needs_times else None
    layers = split_layers(text, len(stages), num_layers, times)
    if not is_auto(text):
        return ChosenSplit(layers, text)
    counts = [len(layer) for layer in layers]
    reason = "" if times is None else explain(counts, times, source)
    return ChosenSplit(layers, ",".join(map(str, counts)), reason)


def stage_times(
    stages: Sequence[Sequence[int]], by_rank: Sequence[Mapping[str, Any]]
) -> list[StageTimes]:
    """The times of each stage, as slow as its slowest rank. Ranks of one host count as equal, by
    their median, because their differences are noise."""
    hosts: dict[int, list[RankTimes]] = {}
    for facts in by_rank:
        if facts["times"] is not None:
            hosts.setdefault(facts["host"], []).append(RankTimes(**facts["times"]))
    times = []
    for ranks in stages:
        host_ranks = [hosts[by_rank[rank]["host"]] for rank in ranks]
        layer_s = max(median(rank.layer_s for rank in host) for host in host_ranks)
        own = [by_rank[rank]["times"]["own_fixed_s"] for rank in ranks]
        with_ends = [fixed_s for fixed_s in own if fixed_s is not None]
        without = (median(rank.fixed_s for rank in host) for host in host_ranks)
        times.append(StageTimes(max(with_ends or without), layer_s))
    return times


def explain(counts: Sequence[int], times: Sequence[StageTimes], source: str) -> str:
    stages = [time.seconds(count) for count, time in zip(counts, times, strict=True)]
    layers = sorted({1e3 * time.layer_s for time in times})
    beside = ", ".join(f"{1e3 * time.fixed_s:.3g}" for time in times)
    predicted = ", ".join(f"{1e3 * stage_s:.3g}" for stage_s in stages)
    range_of_layers = " to ".join(dict.fromkeys(f"{ms:.3g}" for ms in (layers[0], layers[-1])))
    return (
        f"the stages are predicted to take {predicted} ms, from {range_of_layers} ms "
        f"a layer and {beside} ms beside layers ({source})"
    )


@dataclass(frozen=True)
class DecodeStep:
    """A step to time: `rows` rows that hold `context` tokens each, with `gamma` drafts a
    row."""

    rows: int
    context: int
    gamma: int = 0

    @property
    def num_tokens(self) -> int:
        return 1 + self.gamma


@dataclass(frozen=True)
class Timing(ABC):
    """The measurement of `step` on this rank. `stages` are the ranks of each stage; a row grows by
    at most `growth` messages."""

    growth: ClassVar[int]

    run: Prepared
    stages: Sequence[tuple[int, ...]]
    step: DecodeStep

    @abstractmethod
    def end_of(self, stage: int) -> StagePart | None:
        """A layer with the stage's end of the model; None if the stage has no end."""

    @abstractmethod
    def timer(self, runner: ModelRunner, has_ends: bool, groups: ParallelGroups) -> Timer:
        """The timer of a step with the layers of `runner`, which are those of `end_of` if
        `has_ends`."""

    @property
    def config(self) -> ResolvedConfig:
        new_tokens = self.growth * self.step.num_tokens
        context = self.step.context
        room = Capacity(self.step.rows, context, context + new_tokens, new_tokens)
        return replace(self.run.config, capacity=room)

    @property
    def device(self) -> torch.device:
        return device_of(self.run.config.parallel.device, self.run.launch.local_rank)

    def stage_of(self, rank: int) -> int | None:
        return next((stage for stage, ranks in enumerate(self.stages) if rank in ranks), None)

    def find_times(self) -> RankTimes | None:
        """This rank's times, None without a stage. All ranks must call it."""
        if self.stage_of(self.run.launch.rank) is None:
            return None
        most = self.run.source.config.max_length - self.growth * self.step.num_tokens
        context = min(self.step.context, most)
        times = replace(self, step=replace(self.step, context=context)).measure()
        release_memory(self.device)
        return times  # the memory is free before anyone reads how much there is for the run

    def measure(self) -> RankTimes:
        """The times with the threads of the run. All ranks with a stage must call it; those of one
        stage measure together."""
        launch = self.run.launch
        parallel = self.config.parallel
        with use_threads(parallel.threads):
            if len(self.stages[0]) == 1:
                group = Group((launch.rank,), 0)
                return self.time_layers(ParallelGroups(launch.rank, launch.world_size, group))
            grid = StageGrid(len(self.stages), len(self.stages[0]))
            collectives = parallel.collectives
            with stage_groups_before_run(launch, grid, self.device, collectives) as groups:
                return self.time_layers(groups)

    def time_layers(self, groups: ParallelGroups) -> RankTimes:
        """The times from several rounds of all timers in turn: the fastest, because noise only
        adds."""
        num_layers = min(MOST_LAYERS, self.run.source.config.num_layers)
        one, several = (
            self.load(StagePart(range(count), False), groups) for count in (1, num_layers)
        )
        stage = self.stage_of(self.run.launch.rank)
        assert stage is not None, "this rank has a stage"
        end = self.end_of(stage)
        with_end = None if end is None else self.load(end, groups, has_ends=True)
        rounds = [
            (one(), several(), 0.0 if with_end is None else with_end()) for _ in range(ROUNDS)
        ]
        one_s, several_s, with_end_s = map(min, zip(*rounds, strict=True))
        layer_s = (several_s - one_s) / (num_layers - 1)
        if layer_s <= 0:  # only noise makes it so; a stage's time is then that of its layers
            layer_s = several_s / num_layers
        fixed_s = max(0.0, one_s - layer_s)
        own_s = None if with_end is None else max(fixed_s, with_end_s - layer_s)
        return RankTimes(layer_s, fixed_s, own_s)

    def load(self, part: StagePart, groups: ParallelGroups, has_ends: bool = False) -> Timer:
        """A timer of a part of the target, whose cache is filled in place of fresh zeros."""
        models = LoadedModels(self.device, make_progress(False))
        source = self.run.source
        ranks = groups.target.ranks
        rank = self.run.launch.rank
        plan = ModelPlan(
            self.config, source.config, ranks, rank, part, row_tokens=self.config.capacity.max_len
        )
        runner = make_runner(plan, source, groups.target, models)
        runner.caches.fill(0.1)
        return self.timer(runner, has_ends, groups)


def time_messages(part: MessageHandler, messages: Sequence[Message]) -> float:
    """The median seconds from answer to answer if the next message always waits."""
    inbound = Loopback()
    spans = Spans()
    for message in (*messages, Message(Kind.END)):
        inbound.send(message)
    StageLoop(part, Ends(inbound, Loopback()), spans).serve()
    return median(b.end_s - a.end_s for a, b in pairwise(spans))
