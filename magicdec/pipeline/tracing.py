"""What every stage of a ring did when: a span for each message that a stage computed, counted at
the ends of its links and brought to the first rank.

The k-th span of every stage is that of the k-th message that the first stage sent, because
messages keep their order. So only the first stage knows, and notes, whose tokens a message has.

Clocks of other hosts are compared first: a rank answers the first rank with its time. The answer
lies between the sending and the arrival, so that the middle of the fastest round trip is wrong by
half of it at most (Cristian 1989, "Probabilistic clock synchronization"). Ranks of one host share
its monotonic clock.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from magicdec.distributed.channels.connect import RingEnds
from magicdec.distributed.channels.message import Kind, Message, Receiver, Sender
from magicdec.distributed.groups import Launch
from magicdec.distributed.stages import StageGrid
from magicdec.hardware.threads import RankThreads, ThreadCount, check_threads
from magicdec.pipeline.metrics import StageUse
from magicdec.pipeline.recurrent import Flight
from magicdec.pipeline.stage import Occupancy

Span = tuple[float, float]  # begin and end in seconds
FORM = "d"  # double precision


@dataclass
class StageTrace:
    """The spans of one stage while requests are served, by its own clock. On the first stage a
    message that comes home also has a span of the head: logits, sampling and scheduling."""

    spans: array[float] = field(default_factory=lambda: array(FORM))  # begin, end, begin, ...
    head_spans: array[float] = field(default_factory=lambda: array(FORM))
    samples: list[Sequence[int]] = field(default_factory=list)  # of each message sent
    are_prompts: list[bool] = field(default_factory=list)
    _head_begin_s: float | None = None
    _begin_s: float = 0.0

    def begin(self, now_s: float) -> None:
        """The layers of a message are computed from now on."""
        self.end_head(now_s)
        self._begin_s = now_s

    def end(self, now_s: float) -> None:
        """The message that has begun is computed, and is sent next."""
        self.spans.extend((self._begin_s, now_s))

    def note(self, samples: Sequence[int], is_prompt: bool) -> None:
        """Whose tokens the message has that begins now. Only the first stage calls it."""
        self.samples.append(samples)
        self.are_prompts.append(is_prompt)

    def begin_head(self, now_s: float) -> None:
        self._head_begin_s = now_s

    def end_head(self, now_s: float) -> None:
        if self._head_begin_s is not None:
            self.head_spans.extend((self._head_begin_s, now_s))
            self._head_begin_s = None


@dataclass(frozen=True)
class RingTrace:
    """The spans of all stages by the clock of the first. `samples` and `are_prompts` are those of
    each message. `clock_error_s` is the largest possible error of the other stages' times; 0 if
    all ranks share the clock of one host."""

    stages: list[list[Span]]
    head: list[Span]
    samples: list[Sequence[int]]
    are_prompts: list[bool]
    clock_error_s: float


def spans_of(times_s: Sequence[float], ahead_s: float = 0.0) -> list[Span]:
    """The spans of a clock that is ahead of the first stage's by so much."""
    shifted = [at_s - ahead_s for at_s in times_s]
    return list(zip(shifted[::2], shifted[1::2], strict=True))


def gather_rows(rows: Tensor, world_size: int) -> list[Tensor]:
    """The `rows` [N, K] of every rank on every rank; N may differ. All ranks must call it."""
    if world_size == 1:
        return [rows]
    import torch.distributed as dist

    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(sizes, torch.tensor([len(rows)]))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, rows.shape[1], dtype=rows.dtype)
    padded[: len(rows)] = rows
    found = [torch.empty_like(padded) for _ in range(world_size)]
    if longest:
        dist.all_gather(found, padded)
    return [each[: int(size)] for each, size in zip(found, sizes, strict=True)]


def gather_threads(name: str, count: ThreadCount, expected: int, launch: Launch) -> list[int]:
    """The measured threads of every rank in the pass of that name; `expected` and `count` are those
    of this rank. Raises AssertionError, on every rank, if a rank had others. All ranks must call
    it."""
    ours = torch.tensor([count.of_rank(launch.rank, expected)])
    rows = gather_rows(ours, launch.world_size)
    return check_threads(name, [RankThreads(*row[0].tolist()) for row in rows])


ROUNDS = 20


@dataclass(frozen=True)
class Ahead:
    """Of the clock of the first rank, and the largest possible error of that."""

    ahead_s: float = 0.0
    error_s: float = 0.0


def clocks_of(launch: Launch, ranks: Sequence[int]) -> list[Ahead]:
    """On rank 0, the clock of each of `ranks`. Rank 0 and these ranks must call it together."""
    if launch.local_world_size == launch.world_size:
        return [Ahead() for _ in ranks]
    found = compare_clocks(launch.rank, [rank for rank in ranks if rank != 0])
    return [found.get(rank, Ahead()) for rank in ranks]


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
    answer, found = torch.empty(1, dtype=torch.float64), list[Ahead]()
    for _ in range(ROUNDS):
        asked_s = time.perf_counter()
        dist.send(answer, other)
        dist.recv(answer, other)
        error_s = (time.perf_counter() - asked_s) / 2
        found.append(Ahead(answer.item() - asked_s - error_s, error_s))
    return min(found, key=lambda each: each.error_s)


COMPUTED = (Kind.HIDDEN, Kind.VOID)  # a stage has a span for each of these


@dataclass
class Traffic:
    """What has passed. Times are only summed: the time that messages spent between two stages is
    the difference of the sums on both sides."""

    num_sent: int = 0
    sent_s: float = 0.0
    num_taken: int = 0
    taken_s: float = 0.0
    bytes_before: int = 0  # that were sent before the counting began
    trace: StageTrace | None = None


class CountingEnds:
    """Both ends of a rank. `is_first`: it is of the first stage, where a message that is taken has
    come home, and computing begins without one."""

    def __init__(self, ends: RingEnds, is_first: bool) -> None:
        self.traffic = Traffic()
        receiver = CountingReceiver(ends.inbound, self, is_first)
        self.ends = RingEnds(receiver, CountingSender(ends.outbound, self))

    def restart(self, has_spans: bool) -> None:
        """Count from zero. No message may be under way to or from this rank."""
        trace = StageTrace() if has_spans else None
        self.traffic = Traffic(bytes_before=self.ends.outbound.num_bytes, trace=trace)

    @property
    def sent_bytes(self) -> int:
        return self.ends.outbound.num_bytes - self.traffic.bytes_before

    def begin(self, flight: Flight) -> None:
        """The first stage computes its layers for a message from now on."""
        if (trace := self.traffic.trace) is not None:
            trace.begin(time.perf_counter())
            samples = [request.request_id for request in flight.requests]
            trace.note(samples, not flight.is_decode)


@dataclass(frozen=True)
class CountingSender:
    sender: Sender
    counting: CountingEnds

    @property
    def num_bytes(self) -> int:
        return self.sender.num_bytes

    def send(self, message: Message) -> None:
        # The time before sending: the receiver may have the message before this rank goes on.
        traffic, now_s = self.counting.traffic, time.perf_counter()
        traffic.num_sent += 1
        traffic.sent_s += now_s
        if traffic.trace is not None and message.kind in COMPUTED:
            traffic.trace.end(now_s)
        self.sender.send(message)

    def close(self) -> None:
        self.sender.close()


@dataclass(frozen=True)
class CountingReceiver:
    receiver: Receiver
    counting: CountingEnds
    is_first: bool

    def receive(self) -> Message:
        trace = self.counting.traffic.trace
        if trace is not None:
            trace.end_head(time.perf_counter())
        message = self.receiver.receive()
        traffic, now_s = self.counting.traffic, time.perf_counter()
        traffic.num_taken += 1
        traffic.taken_s += now_s
        if trace is not None and message.kind in COMPUTED:
            begin = trace.begin_head if self.is_first else trace.begin
            begin(now_s)
        return message


def gather(
    launch: Launch, grid: StageGrid, spent: Occupancy, counting: CountingEnds
) -> tuple[list[StageUse], RingTrace | None]:
    """What the first rank of each stage counted, and the spans if they were asked for. All ranks
    must call it; the times are right on rank 0 alone."""
    traffic, leaders = counting.traffic, [grid.ranks_of(n)[0] for n in range(grid.num_stages)]
    ours = [spent.total_s, spent.waiting_s, spent.decode_s, counting.sent_bytes]
    ours += [traffic.num_sent, traffic.sent_s, traffic.num_taken, traffic.taken_s]
    found = gather_rows(torch.tensor([ours], dtype=torch.float64), grid.world_size)
    ahead = clocks_of(launch, leaders)
    uses = uses_of([found[leader][0].tolist() for leader in leaders], ahead)
    if traffic.trace is None:
        return uses, None
    return uses, gather_spans(launch, leaders, ahead, traffic.trace)


def uses_of(found: Sequence[Sequence[float]], ahead: Sequence[Ahead]) -> list[StageUse]:
    """`found` and the clocks are those of each stage. What a stage takes, the stage before it has
    sent; every message that was sent has been taken."""
    uses = []
    for stage, numbers in enumerate(found):
        total_s, waiting_s, decode_s, num_bytes, num_sent, _, taken, taken_s = numbers
        sent_s, between_s = found[stage - 1][5], ahead[stage].ahead_s - ahead[stage - 1].ahead_s
        queued_s = max(0.0, taken_s - sent_s - taken * between_s)
        counts = int(num_bytes), int(num_sent)
        uses.append(StageUse(total_s, waiting_s, decode_s, *counts, queued_s))
    return uses


def gather_spans(
    launch: Launch, leaders: Sequence[int], ahead: Sequence[Ahead], trace: StageTrace
) -> RingTrace | None:
    """The spans of all stages, on rank 0."""
    ours = torch.tensor(trace.spans, dtype=torch.float64).view(-1, 2)
    found = gather_rows(ours, launch.world_size)
    if launch.rank != 0:
        return None
    stages = [found[leader].flatten().tolist() for leader in leaders]
    assert all(len(times) == 2 * len(trace.samples) for times in stages), "a span for each message"
    return RingTrace(
        [spans_of(times, each.ahead_s) for times, each in zip(stages, ahead, strict=True)],
        spans_of(trace.head_spans),
        trace.samples,
        trace.are_prompts,
        max(each.error_s for each in ahead),
    )


def gather_memory(launch: Launch, samples: array[float]) -> list[Tensor]:
    """The samples of every rank by the clock of the first, [N, 2]: seconds and bytes. `samples` are
    those of this rank's `MemorySampler`. All ranks must call it; the times are right on rank 0
    alone."""
    ours = torch.tensor(samples, dtype=torch.float64).view(-1, 2)
    found = gather_rows(ours, launch.world_size)
    for of_rank, clock in zip(found, clocks_of(launch, range(launch.world_size)), strict=True):
        of_rank[:, 0] -= clock.ahead_s
    return found
