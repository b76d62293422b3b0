"""The machine that is simulated: stages, links and a drafter, with their times in seconds; a
cluster of equal nodes, divided into stages; and when the stages compute what.

The nodes of a stage share its work by tensor parallelism: its time is divided by their number, and
every layer adds two all-reduces. Each stage takes the runs in the order of launches, and looks for
cancellations before a run and between layers. The times of a run follow from those of the run
before it, so nothing is simulated step by step. A cancellation changes only what comes after it;
the runs in flight from the first cancelled one on are then computed again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from magicdec.pipelined_speculation.messages import Launch

VOID_BYTES = 64  # a header alone
RESULT_BYTES = 16  # of a row that comes home: its arg-max and the margin


@dataclass(frozen=True)
class Machine:
    """A run of n rows keeps stage i busy for `stage_s[i]`, and for a share `row_cost` of it more
    with each row after the first. A message occupies its link for its bytes over `bytes_per_s`, and
    arrives `link_s` later."""

    stage_s: tuple[float, ...]
    layers: int = 8  # of a stage: between them it looks for cancellations
    prefill_s: float | None = None  # of a stage, for a prompt; None: as one row
    row_cost: float = 0.0
    link_s: float = 0.0
    bytes_per_s: float | None = None  # None: without limit
    row_bytes: int = 8192  # hidden states of one row
    cancel_s: float = 0.0  # until a cancellation is at a stage
    draft_s: float = 0.0  # one step of the drafter

    @property
    def num_stages(self) -> int:
        return len(self.stage_s)

    def busy_s(self, stage: int, num_rows: int, is_prompt: bool) -> float:
        if is_prompt and self.prefill_s is not None:
            return self.prefill_s
        return self.stage_s[stage] * (1 + self.row_cost * (num_rows - 1))

    def transfer_s(self, num_bytes: int) -> float:
        return 0.0 if self.bytes_per_s is None else num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Cluster:
    """A model on nodes. `model_s` is what one node needs for one token through the whole model."""

    model_s: float
    num_layers: int
    all_reduce_s: float
    base: Machine  # links, drafter and costs of rows; its stages are not used

    def machine(self, nodes: int, stages: int) -> Machine:
        """The stages get equal numbers of layers, the first ones one more if they do not divide."""
        each, rest = divmod(self.num_layers, stages)
        width = nodes // stages
        layer_s = self.model_s / self.num_layers / width
        layer_s += 2 * self.all_reduce_s if width > 1 else 0.0
        times = tuple(layer_s * (each + (stage < rest)) for stage in range(stages))
        prefill_s = None if self.base.prefill_s is None else self.base.prefill_s / nodes
        return replace(self.base, stage_s=times, layers=each, prefill_s=prefill_s)


def divisions(
    nodes: Sequence[int], stages: Sequence[int] | None, num_layers: int
) -> Iterator[tuple[int, int]]:
    """Every number of nodes with every number of stages that divides it into layers and nodes:
    those of `stages`, or all that there are."""
    for count in nodes:
        for stage_count in stages or range(1, count + 1):
            if count % stage_count == 0 and stage_count <= num_layers:
                yield count, stage_count


@dataclass(eq=False)
class Flight:
    """A run under way. The lists have one value for each stage."""

    launch: Launch
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
    def __init__(self, machine: Machine, returns_hidden_states: bool = False) -> None:
        """`returns_hidden_states`: the first stage owns the head, as in a recurrent ring."""
        self.machine = machine
        self.output_bytes = machine.row_bytes if returns_hidden_states else RESULT_BYTES
        self.in_flight: deque[Flight] = deque()
        self._last_home: Flight | None = None
        self._busy_s = cache(machine.busy_s)  # runs of as many rows repeat

    @property
    def next_s(self) -> float:
        """When the oldest run comes home; infinity if none is in flight."""
        return self.in_flight[0].home_s if self.in_flight else math.inf

    def launch(self, now_s: float, launch: Launch, is_prompt: bool) -> None:
        flight = Flight(launch, now_s, is_prompt)
        self._compute(flight, self.in_flight[-1] if self.in_flight else self._last_home)
        self.in_flight.append(flight)

    def cancel(self, runs: Sequence[int], known_s: Sequence[float]) -> None:
        """`known_s`: when each stage has received the cancellation."""
        cancelled = set(runs)
        before, is_changed = self._last_home, False
        for flight in self.in_flight:
            if flight.launch.run in cancelled:
                flight.cancelled_s, is_changed = known_s, True
            if is_changed:
                self._compute(flight, before)
            before = flight

    def collect(self) -> Flight:
        """The oldest run, which has come home."""
        self._last_home = self.in_flight.popleft()
        return self._last_home

    def _compute(self, flight: Flight, before: Flight | None) -> None:
        """The times of a run at every stage, given those of the run before it."""
        machine, launch, cancelled_s = self.machine, flight.launch, flight.cancelled_s
        rows, is_void, at = launch.num_rows, False, flight.launched_s
        last = machine.num_stages - 1
        flight.start_s, flight.end_s, flight.sent_s, flight.layers = [], [], [], []
        for stage in range(machine.num_stages):
            start = at if before is None else max(at, before.end_s[stage])
            layers = machine.layers
            if is_void or (cancelled_s is not None and cancelled_s[stage] <= start):
                end, layers, is_void = start, 0, True
            else:
                busy = self._busy_s(stage, rows, flight.is_prompt)
                end = start + busy
                if cancelled_s is not None and cancelled_s[stage] < end:
                    each = busy / layers
                    done = math.ceil((cancelled_s[stage] - start) / each)
                    if done < layers:
                        end, layers, is_void = start + done * each, done, True
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
        flight.home_s, flight.is_void = at, is_void
