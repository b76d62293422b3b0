"""A rank's ends of the ring, which count what passes through them, and note when if asked.

Owns when a message counts as taken and as sent. Must not know what a stage does between the two.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from magicdec.distributed.channels.connect import RingEnds
from magicdec.distributed.channels.message import Kind, Message, Receiver, Sender
from magicdec.pipeline.recurrent import Flight
from magicdec.pipeline.tracing.trace import StageTrace

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
