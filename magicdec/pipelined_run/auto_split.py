"""`--layer_split auto` for pipelined speculation: times a stage's loop with a few layers on each
rank, and lets all ranks choose one split by these times.

A stage is timed alone: without the head's scheduler and without a drafter, with which it may share
its rank's cores in the run. Links have no part in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from magicdec.config.resolved import ResolvedConfig
from magicdec.distributed.channels.message import Kind, Message
from magicdec.distributed.groups import Group, Launch
from magicdec.distributed.layer_split import AUTO, FLAG
from magicdec.hardware.environment import device_of, release_memory
from magicdec.hardware.threads import use_threads
from magicdec.memory.check import check_together
from magicdec.memory.free_memory import Room, find_room
from magicdec.memory.plan import MemoryPlan, plan_stage
from magicdec.model.checkpoint.source import ModelSource
from magicdec.pipeline.auto_split.choose import ChosenSplit, RankTimes, choose_split
from magicdec.pipeline.auto_split.find import (
    ROOM_TOPIC,
    check_room,
    check_source,
    describe_origin,
    predict_stages,
)
from magicdec.pipeline.auto_split.measure import STEPS, DecodeStep
from magicdec.pipeline.auto_split.timing import (
    Timers,
    layers_to_time,
    load_layers,
    time_rounds,
)
from magicdec.pipelined_run.board import CancelBoard
from magicdec.pipelined_run.layout import Layout, read_split
from magicdec.pipelined_run.options import SpeculationOptions
from magicdec.pipelined_run.parcel import LocalChannel, pack
from magicdec.pipelined_run.spans import Spans
from magicdec.pipelined_run.stage import ModelPart, StageLoop
from magicdec.pipelined_speculation import messages
from magicdec.pipelined_speculation.cells import to_ranges
from magicdec.sampling.coupled import CoupledSampling
from magicdec.setup.loading import StagePart
from magicdec.setup.prepare import Prepared


@dataclass(frozen=True)
class TimedRuns:
    """Runs of `step.num_tokens` rows that follow `step.context` tokens of one request. `run.config`
    is that of one rank, without drafts."""

    run: Prepared
    layout: Layout
    step: DecodeStep

    @property
    def config(self) -> ResolvedConfig:
        """With one row of the cache, which has room for one such run."""
        config, step = self.run.config, self.step
        workload = replace(
            config.workload, batch_size=1, prefix_len=step.context, gen_len=step.num_tokens
        )
        return replace(config, workload=workload)

    @property
    def num_layers(self) -> int:
        return layers_to_time(self.run.source)

    def device(self, launch: Launch) -> torch.device:
        return device_of(self.run.config.parallel.device, launch.local_rank)

    def end_of(self, rank: int) -> StagePart | None:
        """A layer with the end of the model that this rank's stage has; None if it has none."""
        stage, last = self.layout.stages.index(rank), self.run.source.config.num_layers - 1
        if stage == 0:
            return StagePart(range(1), None)
        is_last = stage == len(self.layout.stages) - 1
        return StagePart(range(last, last + 1), None) if is_last else None


def check_auto(options: SpeculationOptions, layout: Layout, source: ModelSource) -> None:
    """Raises ValueError for `--layer_split auto` if the model's files have a split already, and for
    `--machine` if no times are asked for."""
    if options.is_measured:
        check_source(str(options.layer_split), source)
    if options.machine is not None and not (options.is_measured and len(layout.stages) > 1):
        raise ValueError(
            f"--machine {options.machine} does nothing here: it is for {FLAG} {AUTO} with several "
            "stages; leave it out"
        )


def with_counts(options: SpeculationOptions, chosen: ChosenSplit) -> SpeculationOptions:
    """`options` with layer counts in place of `auto`."""
    if not options.is_measured:
        return options
    split = replace(read_split(options.layer_split), stages=chosen.asked)
    return replace(options, layer_split=str(split))


def find_split(
    run: Prepared, options: SpeculationOptions, layout: Layout, launch: Launch
) -> ChosenSplit:
    """The split that all ranks come to, before any process group starts. All ranks must call it,
    with any split. `run` as in TimedRuns. Raises ValueError, naming the flag, on every rank."""
    most = max(shape.output_len for shape in options.shapes) - 1
    num_drafts = min(options.speculation.gamma, most) if options.needs_drafts else 0
    longest = run.source.config.max_length - 1 - num_drafts
    step = DecodeStep(1, min(options.mean_context, longest), num_drafts)
    rows = "1 row" if num_drafts == 0 else f"{step.num_tokens} rows"
    return choose_split(
        read_split(options.layer_split).stages, [(rank,) for rank in layout.stages],
        run.source.config.num_layers, launch,
        f"{describe_origin(options.machine)} for runs of {rows} after {step.context} tokens",
        lambda: find_times(TimedRuns(run, layout, step), launch, options.machine),
    )  # fmt: skip


def find_times(timed: TimedRuns, launch: Launch, machine: Path | None) -> RankTimes | None:
    """Of this rank's stage; None if it has none. All ranks must call it."""
    if machine is not None:
        return predict_times(timed, launch, machine)
    room = find_room(timed.run.config, launch, torch.cuda.device_count())
    check_together(launch, lambda: check_room([*room_plans(timed, room)], room), ROOM_TOPIC)
    if launch.rank not in timed.layout.stages:
        return None
    times = measure_times(timed, launch)
    release_memory(timed.device(launch))  # before anyone reads how much is free for the run
    return times


def predict_times(timed: TimedRuns, launch: Launch, machine: Path) -> RankTimes | None:
    """From the rates in a machine file of this machine."""
    with_head, other = predict_stages(timed.run, 1, launch, machine, timed.step)
    if launch.rank not in timed.layout.stages:
        return None
    is_last = launch.rank == timed.layout.stages[-1]
    return RankTimes(other.layer_s, other.fixed_s, with_head.fixed_s if is_last else None)


def room_plans(timed: TimedRuns, room: Room) -> Iterator[MemoryPlan]:
    """What the ranks of this room need to time their stages."""
    for rank in room.ranks:
        if rank in timed.layout.stages:
            has_end = timed.end_of(rank) is not None
            num_layers = 1 + timed.num_layers + has_end
            yield plan_stage(timed.config, timed.run.source.config, num_layers, has_end, 0)


def measure_times(timed: TimedRuns, launch: Launch) -> RankTimes:
    """With the threads of the run."""
    group, device = Group((0,), 0), timed.device(launch)
    sampling, end = CoupledSampling(timed.config.sampling), timed.end_of(launch.rank)
    sizes = 1, timed.step.context + timed.step.num_tokens

    def load(part: StagePart) -> ModelPart:
        place = timed.config, timed.run.source, group, device, part
        return ModelPart(load_layers(*place, *sizes), sampling)

    with use_threads(timed.config.parallel.threads_of(launch.rank)):
        one, several = (load(StagePart(range(n), False)) for n in (1, timed.num_layers))
        with_end = None if end is None else partial(time_part, load(end), timed.step)
        passing = partial(time_part, one, timed.step), partial(time_part, several, timed.step)
        return time_rounds(Timers(*passing, timed.num_layers, with_end), group, device)


def time_part(part: ModelPart, step: DecodeStep) -> float:
    """Seconds from run to run where the next run always waits already: the median, which a run that
    was held up does not move. Every run takes the place of the one before it."""
    run, spans, inbound = run_of(step), Spans(), LocalChannel()
    message = pack(Kind.HIDDEN, run.run, run.to_words(), hidden_states(part, step))
    for _ in range(STEPS + 1):
        inbound.send(message)
    inbound.send(Message(Kind.END))
    StageLoop(part, inbound, LocalChannel(), CancelBoard(), spans).serve()
    return statistics.median(b.end_s - a.end_s for a, b in pairwise(spans.found))


def run_of(step: DecodeStep) -> messages.Launch:
    """A run whose rows continue the text, and all of whose predictions come home."""
    num_rows, places = step.num_tokens, tuple(range(step.context, step.context + step.num_tokens))
    return messages.Launch(
        run=0, request=0, lane=0, parent=-1, is_speculative=num_rows > 1, num_outputs=num_rows,
        tokens=(1,) * num_rows, positions=places, cells=places,
        parents=tuple(range(-1, num_rows - 1)), context=to_ranges(step.context, ()), moves=(),
    )  # fmt: skip


def hidden_states(part: ModelPart, step: DecodeStep) -> Tensor | None:
    """What comes with a run to this part."""
    model = part.runner.model
    if model.has_embedding:
        return None
    shape = 1, step.num_tokens, model.config.hidden_size
    return torch.full(shape, 0.1, dtype=next(model.parameters()).dtype)
