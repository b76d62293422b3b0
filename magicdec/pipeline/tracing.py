"""What every rank did when: spans, from which busy times, queues, skipped layers, Gantt charts and
Chrome traces are computed; and how they reach the first rank, by the first rank's clock.

A run has the same number on every stage. Only the head knows, and notes, whose tokens it has.

Clocks of other hosts are compared first: a rank answers the first rank with its time. The answer
lies between the sending and the arrival, so that the middle of the fastest round trip is wrong by
half of it at most (Cristian 1989, "Probabilistic clock synchronization"). Ranks of one host share
its monotonic clock.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist

from magicdec.distributed.channels.message import Traffic
from magicdec.distributed.groups import Launch
from magicdec.distributed.stages import StageGrid
from magicdec.pipeline.metrics import StageUse

Interval = tuple[float, float]  # begin and end in seconds
NUM_FIELDS = 5  # of a span


class What(IntEnum):
    STAGE = 1  # a stage computed a run or skipped it; `value` is the number of layers it computed
    DRAFT = 2  # a step of the drafter
    LAUNCH = 3  # the head launched a run; `value` is its number of rows, begin equals end
    PROMPT = 4  # the same for a run of a prompt
    RESULT = 5  # the head took the result of a run; `value` is 1 for a void one
    # The first stage of a ring between two waits, from the arrival of a run (-1: of requests) on;
    # its layers are a part of it. `value` is 1 if rows decoded in the run, and no prompt followed.
    HEAD = 6


@dataclass(frozen=True)
class Span:
    """Seconds of `time.perf_counter`, which is the same clock in all processes of a host. Those of
    other hosts are converted to the first rank's clock when they are gathered."""

    what: What
    run: int  # or the number of the draft or of the message
    begin_s: float
    end_s: float
    value: int = 0

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


class Spans(Sequence[Span]):
    """Those of one rank, in the order in which they ended. Several threads may add to it."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._numbers = array("d")
        for span in spans:
            self._append(span)

    def __len__(self) -> int:
        return len(self._numbers) // NUM_FIELDS

    @overload
    def __getitem__(self, place: int) -> Span: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Span]: ...
    def __getitem__(self, place: int | slice) -> Span | Sequence[Span]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        first = range(0, len(self._numbers), NUM_FIELDS)[place]
        what, run, begin_s, end_s, value = self._numbers[first : first + NUM_FIELDS]
        return Span(What(int(what)), int(run), begin_s, end_s, int(value))

    def add(self, what: What, run: int, begin_s: float, value: int = 0) -> None:
        """A span that ends now."""
        self._append(Span(what, run, begin_s, time.perf_counter(), value))

    def moment(self, what: What, run: int, value: int = 0) -> None:
        now = time.perf_counter()
        self._append(Span(what, run, now, now, value))

    def _append(self, span: Span) -> None:
        numbers = (span.what, span.run, span.begin_s, span.end_s, span.value)
        self._numbers.extend(array("d", numbers))  # at once, whatever other threads add

    @contextmanager
    def during(self, what: What, run: int) -> Iterator[None]:
        begin_s = time.perf_counter()
        yield
        self.add(what, run, begin_s)

    def of(self, what: What) -> list[Span]:
        return [span for span in self if span.what is what]


def trace_events(
    traces: Mapping[str, Sequence[Sequence[Span]]], names: Sequence[str]
) -> list[dict[str, object]]:
    """The spans of each rank as events of the Chrome trace format; `names` are those of the ranks.
    Passes follow each other, so each rank is one process."""
    begins = [s.begin_s for by_rank in traces.values() for spans in by_rank for s in spans]
    origin_s = min(begins, default=0.0)
    processes: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}}
        for rank, name in enumerate(names)
    ]
    return processes + [
        {
            "name": f"{span.what.name.lower()} {span.run}",
            "cat": mode,
            "ph": "X",
            "pid": rank,
            "tid": int(span.what),
            "ts": 1e6 * (span.begin_s - origin_s),
            "dur": 1e6 * (span.end_s - span.begin_s),
            "args": {"value": span.value},
        }
        for mode, by_rank in traces.items()
        for rank, spans in enumerate(by_rank)
        for span in spans
    ]


ROUNDS = 20


@dataclass(frozen=True)
class Ahead:
    """How far a clock is ahead of the first rank's, and the largest possible error of that."""

    ahead_s: float = 0.0
    error_s: float = 0.0


def clocks_of(launch: Launch) -> list[Ahead]:
    """The clock of each rank; right on rank 0 alone. All ranks must call it together."""
    ranks = range(launch.world_size)
    if launch.local_world_size == launch.world_size:
        return [Ahead() for _ in ranks]
    clocks = compare_clocks(launch.rank, ranks[1:])
    return [clocks.get(rank, Ahead()) for rank in ranks]


def compare_clocks(rank: int, others: Sequence[int]) -> dict[int, Ahead]:
    """On rank 0, the clocks of `others`; empty elsewhere. Rank 0 and all others must call it
    together."""
    if rank == 0:
        return {other: _ask(other) for other in others}
    if rank in others:
        answer = torch.empty(1, dtype=torch.float64)
        for _ in range(ROUNDS):
            dist.recv(answer, 0)
            answer[0] = time.perf_counter()
            dist.send(answer, 0)
    return {}


def _ask(other: int) -> Ahead:
    answer, comparisons = torch.empty(1, dtype=torch.float64), list[Ahead]()
    for _ in range(ROUNDS):
        begin_s = time.perf_counter()
        dist.send(answer, other)
        dist.recv(answer, other)
        error_s = (time.perf_counter() - begin_s) / 2
        comparisons.append(Ahead(answer.item() - begin_s - error_s, error_s))
    return min(comparisons, key=lambda each: each.error_s)


T = TypeVar("T")


def all_gather(value: T, world_size: int) -> list[T]:
    """The value of every rank on every rank. It is pickled. All ranks must call it."""
    if world_size == 1:
        return [value]
    values: list[Any] = [None] * world_size
    dist.all_gather_object(values, value)
    return values


def gather_spans(spans: Spans, clocks: Sequence[Ahead]) -> list[Spans]:
    """The spans of every rank. All ranks must call it; the times are right on rank 0 alone."""
    return [
        Spans(
            replace(span, begin_s=span.begin_s - clock.ahead_s, end_s=span.end_s - clock.ahead_s)
            for span in of_rank
        )
        for of_rank, clock in zip(all_gather(spans, len(clocks)), clocks, strict=True)
    ]


@dataclass(frozen=True)
class RingTrace:
    """The spans of all stages by the clock of the first, in the order of runs. `samples` and
    `are_prompts` are those of each run. `clock_error_s` is the largest possible error of the other
    stages' times; 0 if all ranks share the clock of one host."""

    stages: list[list[Interval]]
    head: list[Interval]
    samples: list[Sequence[int]]
    are_prompts: list[bool]
    clock_error_s: float


def gather_ring(
    launch: Launch,
    grid: StageGrid,
    spans: Spans,
    sent: Traffic,
    samples: Sequence[Sequence[int]] = (),
    are_prompts: Sequence[bool] = (),
) -> tuple[list[StageUse], RingTrace]:
    """What the first rank of each stage did in a pass: `spans` are those of this rank, and `sent`
    is what it sent. The first stage says whose the runs are, by their numbers. All ranks must call
    it; it is right on rank 0 alone."""
    leaders = [grid.ranks_of(stage)[0] for stage in range(grid.num_stages)]
    clocks = clocks_of(launch)
    by_rank, sent_by_rank = gather_spans(spans, clocks), all_gather(sent, launch.world_size)
    stages = [by_rank[leader] for leader in leaders]
    decodes = {run for run, is_prompt in enumerate(are_prompts) if not is_prompt}
    uses = uses_of(stages, [sent_by_rank[leader] for leader in leaders], decodes)
    heads, computed = stages[0].of(What.HEAD), [each.of(What.STAGE) for each in stages]
    if launch.rank == 0:
        assert {len(each) for each in computed} == {len(samples)}, "a span for each run"
    intervals = [[(span.begin_s, span.end_s) for span in each] for each in computed]
    error_s = max(clocks[leader].error_s for leader in leaders)
    alone = without(heads, computed[0])
    return uses, RingTrace(intervals, alone, list(samples), list(are_prompts), error_s)


def uses_of(
    stages: Sequence[Spans], sent: Sequence[Traffic], decodes: Collection[int]
) -> list[StageUse]:
    """How each stage spent its time, from its first run on until the last is home. What a stage
    takes, the stage before it has sent. `decodes` are the runs of rows that decode."""
    heads = stages[0].of(What.HEAD)
    computed = [spans.of(What.STAGE) for spans in stages]
    uses = []
    for stage, runs in enumerate(computed):
        turns = runs if stage else heads
        taken = runs if stage else [span for span in heads if span.run >= 0]
        decoded = [span.seconds for span in turns if (span.run in decodes if stage else span.value)]
        total_s = heads[-1].end_s - turns[0].begin_s if turns else 0.0
        uses.append(
            StageUse(
                total_s=total_s,
                waiting_s=total_s - sum(span.seconds for span in turns),
                decode_s=statistics.median(decoded) if decoded else 0.0,
                num_bytes=sent[stage].num_bytes,
                num_sent=sent[stage].num_messages,
                queued_s=sum(
                    after.begin_s - before.end_s
                    for before, after in zip(computed[stage - 1], taken, strict=True)
                ),
            )
        )
    return uses


def without(outer: Iterable[Span], inner: Iterable[Span]) -> list[Interval]:
    """What of the outer spans is in none of the inner ones, each of which is in one of them. Both
    are in order."""
    intervals, parts = list[Interval](), deque(inner)
    for span in outer:
        begin_s = span.begin_s
        while parts and parts[0].begin_s < span.end_s:
            part = parts.popleft()
            intervals.append((begin_s, part.begin_s))
            begin_s = part.end_s
        intervals.append((begin_s, span.end_s))
    return intervals
