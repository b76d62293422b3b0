"""Runs a scheduler on a simulated machine, in virtual time. Imports no torch.

The nodes of a stage share its work by tensor parallelism: its time is divided by their number, and
every layer adds two all-reduces. Stages take runs in the order of launches, and look for
cancellations before a run and between layers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from magicdec.systems.pipeinfer.drawn_drafts import DRAFT_PROBABILITY
from magicdec.systems.pipeinfer.messages import (
    Action,
    Cancel,
    Candidate,
    Commit,
    DraftAction,
    RunLaunch,
)
from magicdec.systems.pipeinfer.scheduler import PipelinedScheduler

VOID_BYTES = 64  # a header alone
RESULT_BYTES = 16  # of a row that comes home: its arg-max and the margin
SPACING = 2  # between the tokens of two positions: a wrong candidate is a token of its own


@dataclass(frozen=True)
class SimulatedMachine:
    """A pipeline. A run of n rows occupies stage i for `stage_s[i]`, plus a share `row_cost` of it
    for each row after the first. A message occupies its link for bytes / `bytes_per_s`, and arrives
    `link_s` later."""

    stage_s: tuple[float, ...]
    layers: int = 8  # of a stage: between them it looks for cancellations
    row_cost: float = 0.0
    link_s: float = 0.0
    bytes_per_s: float | None = None  # None: without limit
    row_bytes: int = 8192  # hidden states of one row
    cancel_s: float = 0.0  # until a cancellation is at a stage
    draft_s: float = 0.0  # one step of the drafter

    @property
    def num_stages(self) -> int:
        return len(self.stage_s)

    def busy_s(self, stage: int, num_rows: int) -> float:
        return self.stage_s[stage] * (1 + self.row_cost * (num_rows - 1))

    def transfer_s(self, num_bytes: int) -> float:
        return 0.0 if self.bytes_per_s is None else num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Cluster:
    """A model on nodes. `model_s` is one node's time for a token."""

    model_s: float
    num_layers: int
    all_reduce_s: float
    base: SimulatedMachine  # links, drafter and costs of rows; its stages are not used

    def machine(self, nodes: int, stages: int) -> SimulatedMachine:
        """The first stages have one more layer if they do not divide."""
        num_layers, rest = divmod(self.num_layers, stages)
        width = nodes // stages
        layer_s = self.model_s / self.num_layers / width
        layer_s += 2 * self.all_reduce_s if width > 1 else 0.0
        times = tuple(layer_s * (num_layers + (stage < rest)) for stage in range(stages))
        return replace(self.base, stage_s=times, layers=num_layers)


def divisions(
    nodes: Sequence[int], stages: Sequence[int] | None, num_layers: int
) -> Iterator[tuple[int, int]]:
    """(nodes, stages) that divide evenly, of `stages` or all up to `num_layers`."""
    for count in nodes:
        for stage_count in stages or range(1, count + 1):
            if count % stage_count == 0 and stage_count <= num_layers:
                yield count, stage_count


@dataclass(eq=False)
class SimulatedRun:
    """A run under way, with lists by stage."""

    launch: RunLaunch
    launched_s: float
    is_prompt: bool
    start_s: list[float] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)
    sent_s: list[float] = field(default_factory=list)  # the link behind the stage is free again
    layers: list[int] = field(default_factory=list)  # computed; all of them, or it was skipped
    cancelled_s: Sequence[float] | None = None  # when the stage knows that the run is cancelled
    home_s: float = 0.0
    is_void: bool = False


class Pipeline:
    def __init__(self, machine: SimulatedMachine, returns_hidden_states: bool = False) -> None:
        """`returns_hidden_states`: the first stage owns the head, as in a ring."""
        self.machine = machine
        self.output_bytes = machine.row_bytes if returns_hidden_states else RESULT_BYTES
        self.in_flight: deque[SimulatedRun] = deque()
        self._last_home: SimulatedRun | None = None
        self._busy_s = cache(machine.busy_s)  # runs of as many rows repeat

    @property
    def next_s(self) -> float:
        """The time at which the oldest run comes home, or infinity."""
        return self.in_flight[0].home_s if self.in_flight else math.inf

    def launch(self, now_s: float, launch: RunLaunch, is_prompt: bool) -> None:
        flight = SimulatedRun(launch, now_s, is_prompt)
        self._compute(flight, self.in_flight[-1] if self.in_flight else self._last_home)
        self.in_flight.append(flight)

    def cancel(self, runs: Sequence[int], known_s: Sequence[float]) -> None:
        """`known_s`: the times at which the stages receive the cancellation."""
        cancelled = set(runs)
        before = self._last_home
        is_changed = False
        for flight in self.in_flight:
            if flight.launch.run in cancelled:
                flight.cancelled_s = known_s
                is_changed = True
            if is_changed:
                self._compute(flight, before)
            before = flight

    def collect(self) -> SimulatedRun:
        self._last_home = self.in_flight.popleft()
        return self._last_home

    def _compute(self, flight: SimulatedRun, before: SimulatedRun | None) -> None:
        machine = self.machine
        launch = flight.launch
        cancelled_s = flight.cancelled_s
        rows = launch.num_rows
        is_void = False
        at = flight.launched_s
        last = machine.num_stages - 1
        flight.start_s = []
        flight.end_s = []
        flight.sent_s = []
        flight.layers = []
        for stage in range(machine.num_stages):
            start = at if before is None else max(at, before.end_s[stage])
            layers = machine.layers
            if is_void or (cancelled_s is not None and cancelled_s[stage] <= start):
                end = start
                layers = 0
                is_void = True
            else:
                busy = self._busy_s(stage, rows)
                end = start + busy
                if cancelled_s is not None and cancelled_s[stage] < end:
                    layer_s = busy / layers
                    done = math.ceil((cancelled_s[stage] - start) / layer_s)
                    if done < layers:
                        end = start + done * layer_s
                        layers = done
                        is_void = True
            sent = end if before is None else max(end, before.sent_s[stage])
            if machine.bytes_per_s is not None and last > 0:
                size = launch.num_outputs * self.output_bytes if stage == last else 0
                size = size if stage == last else rows * machine.row_bytes
                sent += machine.transfer_s(VOID_BYTES + (0 if is_void else size))
            at = sent + (machine.link_s if last > 0 else 0.0)  # one stage is the head itself
            flight.start_s.append(start)
            flight.end_s.append(end)
            flight.sent_s.append(sent)
            flight.layers.append(layers)
        flight.home_s = at
        flight.is_void = is_void


@dataclass(frozen=True)
class TextModels:
    """A target and a draft, whose candidate for output token i is right if `is_right[request][i]`.
    A prompt has one token, at position 0."""

    is_right: Sequence[Sequence[bool]]

    def home(self, flight: SimulatedRun) -> Sequence[int] | None:
        """A run's predictions, as if all rows stood on the target's text: other rows are never
        committed. None if a stage skipped the run."""
        launch = flight.launch
        outputs = launch.positions[launch.num_rows - launch.num_outputs :]
        return None if flight.is_void else [(at + 1) * SPACING for at in outputs]

    def propose(self, draft: DraftAction, output: Sequence[int]) -> Candidate | None:
        is_right = self.is_right[draft.request]
        place = len(output) + len(draft.path)
        expected = range((len(output) + 1) * SPACING, (place + 1) * SPACING, SPACING)
        follows = draft.path == tuple(expected) and place < len(is_right) and is_right[place]
        return (place + 1) * SPACING + (not follows), DRAFT_PROBABILITY


@dataclass
class SimulationTrace:
    flights: list[SimulatedRun] = field(default_factory=list)
    commits: list[tuple[float, Commit]] = field(default_factory=list)
    drafts: list[tuple[float, float]] = field(default_factory=list)  # begin and end of the steps
    cancelled: set[int] = field(default_factory=set)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    end_s: float = 0.0


class Simulation:
    def __init__(
        self,
        machine: SimulatedMachine,
        scheduler: PipelinedScheduler,
        models: TextModels,
        is_ring: bool = False,
    ) -> None:
        self.machine = machine
        self.scheduler = scheduler
        self.models = models
        self.pipeline = Pipeline(machine, is_ring)
        self.trace = SimulationTrace()
        self._now_s = 0.0
        self._draft: DraftAction | None = None
        self._draft_s = math.inf

    def run(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, eos: int = -1
    ) -> SimulationTrace:
        """Serves prompts that all arrive at time 0, until every run has come home."""
        for prompt in prompts:
            _, actions = self.scheduler.submit(prompt, max_new_tokens, (eos,))
            self._do(actions)
        while not self.scheduler.is_over:
            self._step()
        self.trace.end_s = self._now_s
        return self.trace

    def cancel_delays(self) -> Sequence[float]:
        return [self.machine.cancel_s] * self.machine.num_stages

    def _step(self) -> None:
        """Handles one event. Results go before drafts, and drafting begins only when no result
        waits."""
        if self.pipeline.next_s <= self._now_s:
            flight = self.pipeline.collect()
            self.trace.flights.append(flight)
            self._do(self.scheduler.result(flight.launch.run, self.models.home(flight)))
        elif self._draft is not None and self._draft_s <= self._now_s:
            draft = self._draft
            self._draft = None
            self._draft_s = math.inf
            self._do(self.scheduler.drafted(draft.draft, self._proposed))
        elif self._draft is None and (actions := self.scheduler.idle()):
            self._do(actions)
        else:
            self._now_s = min(self.pipeline.next_s, self._draft_s)
            assert self._now_s < math.inf, "something is always under way"

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, RunLaunch):
                is_prompt = action.request not in self.trace.outputs
                self.pipeline.launch(self._now_s, action, is_prompt)
            elif isinstance(action, Cancel):
                delays = self.cancel_delays()
                self.trace.cancelled.update(action.runs)
                self.pipeline.cancel(action.runs, [self._now_s + delay for delay in delays])
            elif isinstance(action, Commit):
                self.trace.commits.append((self._now_s, action))
                self.trace.outputs.setdefault(action.request, []).extend(action.tokens)
            elif isinstance(action, DraftAction):
                self._begin(action)

    def _begin(self, draft: DraftAction) -> None:
        self._draft = draft
        self._draft_s = self._now_s + self.machine.draft_s
        self._proposed = self.models.propose(draft, self.trace.outputs[draft.request])
        self.trace.drafts.append((self._now_s, self._draft_s))
