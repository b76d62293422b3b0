"""What every rank did when: spans, from which busy times, skipped layers, Gantt charts and Chrome
traces are computed; the ends of a ring's links, which count what passes; and how all of it reaches
the first rank, by the first rank's clock.

In a ring, the k-th span of every stage is that of the k-th message that the first stage sent,
because messages keep their order. So only the first stage knows, and notes, whose tokens a message
has.

Clocks of other hosts are compared first: a rank answers the first rank with its time. The answer
lies between the sending and the arrival, so that the middle of the fastest round trip is wrong by
half of it at most (Cristian 1989, "Probabilistic clock synchronization"). Ranks of one host share
its monotonic clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from magicdec.distributed.channels.connect import RingEnds
from magicdec.distributed.channels.message import Kind, Message
from magicdec.distributed.groups import Launch
from magicdec.distributed.stages import StageGrid
from magicdec.pipeline.metrics import StageUse
from magicdec.pipeline.recurrent import Flight
from magicdec.pipeline.stage import Occupancy

Interval = tuple[float, float]  # begin and end in seconds


class What(IntEnum):
    STAGE = 1  # a stage computed a run or skipped it; `value` is the number of layers it computed
    DRAFT = 2  # a step of the drafter
    LAUNCH = 3  # the head launched a run; `value` is its number of rows, begin equals end
    PROMPT = 4  # the same for a run of a prompt
    RESULT = 5  # the head took the result of a run; `value` is 1 for a void one
    HEAD = 6  # logits, sampling and scheduling of a message that came home in a ring


@dataclass(frozen=True)
class Span:
    """Seconds of `time.perf_counter`, which is the same clock in all processes of a host. Those of
    other hosts are converted to the first rank's clock when they are gathered."""

    what: What
    run: int  # or the number of the draft or of the message
    begin_s: float
    end_s: float
    value: int = 0

    def counts_from(self, first_run: int, first_draft: int) -> bool:
        """Whether it belongs to one of these runs or drafts, or to a later one."""
        return self.run >= (first_draft if self.what is What.DRAFT else first_run)


class Spans(list[Span]):
    """Those of one rank, in order."""

    def add(self, what: What, run: int, begin_s: float, value: int = 0) -> None:
        """A span that ends now."""
        self.append(Span(what, run, begin_s, time.perf_counter(), value))

    def moment(self, what: What, run: int, value: int = 0) -> None:
        now = time.perf_counter()
        self.append(Span(what, run, now, now, value))

    @contextmanager
    def during(self, what: What, run: int) -> Iterator[None]:
        begin_s = time.perf_counter()
        yield
        self.add(what, run, begin_s)

    def intervals(self, what: What) -> list[Interval]:
        """Begin and end of the spans of that kind."""
        return [(span.begin_s, span.end_s) for span in self if span.what is what]


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


def gather_spans(spans: Sequence[Span], clocks: Sequence[Ahead]) -> list[Spans]:
    """The spans of every rank. All ranks must call it; the times are right on rank 0 alone."""
    return [
        Spans(
            replace(span, begin_s=span.begin_s - clock.ahead_s, end_s=span.end_s - clock.ahead_s)
            for span in of_rank
        )
        for of_rank, clock in zip(all_gather(spans, len(clocks)), clocks, strict=True)
    ]


COMPUTED = (Kind.HIDDEN, Kind.VOID)  # a stage has a span for each of these


@dataclass
class Traffic:
    """What has passed. Times are only summed: the time that messages spent between two stages is
    the difference of the sums on both sides. `spans` are None if none are noted; `samples` and
    `are_prompts` are those of each message that the first stage sent."""

    num_sent: int = 0
    sent_s: float = 0.0
    num_taken: int = 0
    taken_s: float = 0.0
    bytes_before: int = 0  # that were sent before the counting began
    spans: Spans | None = None
    begins_s: dict[What, float] = field(default_factory=dict)  # of spans that have not ended
    samples: list[Sequence[int]] = field(default_factory=list)
    are_prompts: list[bool] = field(default_factory=list)


class CountingEnds:
    """Both ends of a rank. `is_first`: it is of the first stage, where a message that is taken has
    come home, and computing begins without one."""

    def __init__(self, ends: RingEnds, is_first: bool) -> None:
        self.inbound, self.outbound, self.is_first = ends.inbound, ends.outbound, is_first
        self.traffic, self.ends = Traffic(), RingEnds(self, self)

    def restart(self, has_spans: bool) -> None:
        """Count from zero. No message may be under way to or from this rank."""
        self.traffic = Traffic(bytes_before=self.num_bytes, spans=Spans() if has_spans else None)

    @property
    def num_bytes(self) -> int:
        return self.outbound.num_bytes

    def begin(self, flight: Flight) -> None:
        """The first stage computes its layers for a message from now on."""
        if self.traffic.spans is not None:
            now_s = time.perf_counter()
            self._end(What.HEAD, now_s)
            self.traffic.begins_s[What.STAGE] = now_s
            self.traffic.samples.append([request.request_id for request in flight.requests])
            self.traffic.are_prompts.append(not flight.is_decode)

    def send(self, message: Message) -> None:
        # The time before sending: the receiver may have the message before this rank goes on.
        traffic, now_s = self.traffic, time.perf_counter()
        traffic.num_sent += 1
        traffic.sent_s += now_s
        if message.kind in COMPUTED:
            self._end(What.STAGE, now_s)
        self.outbound.send(message)

    def receive(self) -> Message:
        self._end(What.HEAD, time.perf_counter())
        message = self.inbound.receive()
        traffic, now_s = self.traffic, time.perf_counter()
        traffic.num_taken += 1
        traffic.taken_s += now_s
        if traffic.spans is not None and message.kind in COMPUTED:
            traffic.begins_s[What.HEAD if self.is_first else What.STAGE] = now_s
        return message

    def close(self) -> None:
        self.outbound.close()

    def _end(self, what: What, now_s: float) -> None:
        """The span of that kind ends, if one has begun."""
        traffic = self.traffic
        if what in traffic.begins_s and (spans := traffic.spans) is not None:
            begin_s = traffic.begins_s.pop(what)
            spans.append(Span(what, len(spans), begin_s, now_s))


@dataclass(frozen=True)
class RingTrace:
    """The spans of all stages by the clock of the first. `samples` and `are_prompts` are those of
    each message. `clock_error_s` is the largest possible error of the other stages' times; 0 if
    all ranks share the clock of one host."""

    stages: list[list[Interval]]
    head: list[Interval]
    samples: list[Sequence[int]]
    are_prompts: list[bool]
    clock_error_s: float


def gather(
    launch: Launch, grid: StageGrid, occupancy: Occupancy, counting: CountingEnds
) -> tuple[list[StageUse], RingTrace | None]:
    """What the first rank of each stage counted, and the spans if they were asked for. All ranks
    must call it; it is right on rank 0 alone."""
    traffic, leaders = counting.traffic, [grid.ranks_of(n)[0] for n in range(grid.num_stages)]
    ours = [occupancy.total_s, occupancy.waiting_s, occupancy.decode_s]
    ours += [counting.num_bytes - traffic.bytes_before, traffic.num_sent, traffic.sent_s]
    ours += [traffic.num_taken, traffic.taken_s]
    numbers = all_gather(ours, grid.world_size)
    clocks = clocks_of(launch)
    ahead = [clocks[leader] for leader in leaders]
    uses = uses_of([numbers[leader] for leader in leaders], ahead)
    if traffic.spans is None:
        return uses, None
    spans = gather_spans(traffic.spans, clocks)
    stages = [spans[leader].intervals(What.STAGE) for leader in leaders]
    if launch.rank == 0:
        assert {len(each) for each in stages} == {len(traffic.samples)}, "a span for each message"
    error_s = max(each.error_s for each in ahead)
    head = spans[0].intervals(What.HEAD)
    return uses, RingTrace(stages, head, traffic.samples, traffic.are_prompts, error_s)


def uses_of(numbers: Sequence[Sequence[float]], ahead: Sequence[Ahead]) -> list[StageUse]:
    """`numbers` and the clocks are those of each stage. What a stage takes, the stage before it has
    sent; every message that was sent has been taken."""
    uses = []
    for stage, of_stage in enumerate(numbers):
        total_s, waiting_s, decode_s, num_bytes, num_sent, _, taken, taken_s = of_stage
        sent_s, between_s = numbers[stage - 1][5], ahead[stage].ahead_s - ahead[stage - 1].ahead_s
        queued_s = max(0.0, taken_s - sent_s - taken * between_s)
        uses.append(StageUse(total_s, waiting_s, decode_s, int(num_bytes), int(num_sent), queued_s))
    return uses
