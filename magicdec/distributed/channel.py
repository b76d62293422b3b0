"""Channel: typed messages from one rank to another, in order. Between ranks of one host they pass
through shared memory (`shared_ring.py`), otherwise through gloo.

Owns the form of a message: a header of int64 numbers, then the hidden states in their own dtype.
Nothing is pickled. Must not know what a message is for: `pipeline` gives the kinds their meaning.

A rank that waits for a peer which has ended raises `PeerLost`, and so does one that waits for
longer than PATIENCE_S.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from magicdec.distributed.processes import PeerLost, Processes
from magicdec.distributed.stages import StageGrid

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PATIENCE_S = 600.0  # the longest wait for a message, or for room to send one
FIELDS = 5  # of a header, before its words


class Kind(IntEnum):
    HIDDEN = 1  # hidden states, which the receiver computes further
    VOID = 2  # in place of hidden states that nobody needs
    FREE = 3  # rows whose memory is free again
    PROBE = 4  # hidden states that are only passed on, to time the links
    END = 5  # no message follows
    NUMBERS = 6  # a payload of int64 numbers


@dataclass(frozen=True)
class Message:
    """`run` is the id of the run or lane that it belongs to. `words` are numbers whose meaning the
    kind gives. `payload` [rows, tokens, hidden] is None if there are no tokens."""

    kind: Kind
    run: int = 0
    status: int = 0
    words: tuple[int, ...] = ()
    payload: Tensor | None = None


@dataclass(frozen=True)
class MessageForm:
    """What both ends of a channel must agree on: the hidden size, the dtype, and the most words of
    a message."""

    width: int
    dtype: torch.dtype
    max_words: int

    def header(self, message: Message) -> Tensor:
        """int64 [FIELDS + 1 + max_words]: kind, run, rows, tokens, status, the number of words, and
        the words."""
        assert len(message.words) <= self.max_words, "a message has room for its words"
        rows, tokens = (0, 0) if message.payload is None else message.payload.shape[:2]
        numbers = [message.kind, message.run, rows, tokens, message.status, len(message.words)]
        numbers += [*message.words, *[0] * (self.max_words - len(message.words))]
        return torch.tensor(numbers, dtype=torch.int64)

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes of a message with the hidden states of so many tokens, of all rows together."""
        return 8 * (FIELDS + 1 + self.max_words) + num_tokens * self.width * self.dtype.itemsize

    def empty_header(self) -> Tensor:
        return torch.empty(FIELDS + 1 + self.max_words, dtype=torch.int64)

    def empty_payload(self, header: Sequence[int]) -> Tensor | None:
        shape = header[2], header[3], self.width
        return torch.empty(shape, dtype=self.dtype) if prod(shape) else None

    def message(self, header: Sequence[int], payload: Tensor | None) -> Message:
        kind, run, _, _, status, num_words, *words = header
        return Message(Kind(kind), run, status, tuple(words[:num_words]), payload)


class Sender(Protocol):
    @property
    def num_bytes(self) -> int:
        """Bytes that were sent so far, headers included."""
        ...

    def send(self, message: Message) -> None:
        """Returns before the receiver has the message, unless too many are under way."""
        ...

    def close(self) -> None:
        """Wait until everything is sent."""
        ...


class Receiver(Protocol):
    def receive(self) -> Message:
        """The next message. Waits for it."""
        ...


class GlooSender:
    """At most `depth` messages are under way."""

    def __init__(
        self, handle: ProcessGroup, peer: int, form: MessageForm, depth: int, processes: Processes
    ) -> None:
        self.handle, self.peer, self.form = handle, peer, form
        self.depth, self.processes, self.num_bytes = depth, processes, 0
        self._under_way: deque[list[tuple[Any, Tensor]]] = deque()  # sends, with what they read

    def send(self, message: Message) -> None:
        import torch.distributed as dist

        while len(self._under_way) >= self.depth:
            self._wait()
        tensors = [self.form.header(message)]
        if message.payload is not None:
            tensors.append(message.payload.contiguous())
        try:
            works = [(dist.isend(t, self.peer, group=self.handle), t) for t in tensors]
        except RuntimeError as error:
            raise self.processes.lost(self.peer, error) from None
        self._under_way.append(works)
        self.num_bytes += sum(t.numel() * t.element_size() for t in tensors)

    def close(self) -> None:
        while self._under_way:
            self._wait()

    def _wait(self) -> None:
        for work, _ in self._under_way.popleft():
            wait_for(work, self.peer, self.processes)


class GlooReceiver:
    def __init__(
        self, handle: ProcessGroup, peer: int, form: MessageForm, processes: Processes
    ) -> None:
        self.handle, self.peer, self.form, self.processes = handle, peer, form, processes

    def receive(self) -> Message:
        header = self.form.empty_header()
        self._fill(header)
        numbers = header.tolist()
        payload = self.form.empty_payload(numbers)
        if payload is not None:
            self._fill(payload)
        return self.form.message(numbers, payload)

    def _fill(self, tensor: Tensor) -> None:
        import torch.distributed as dist

        try:
            work = dist.irecv(tensor, self.peer, group=self.handle)
        except RuntimeError as error:
            raise self.processes.lost(self.peer, error) from None
        wait_for(work, self.peer, self.processes)


def wait_for(work: Any, peer: int, processes: Processes) -> None:
    """Raises PeerLost if the peer has ended, or for a wait that is too long."""
    try:
        work.wait(timedelta(seconds=PATIENCE_S))
    except RuntimeError as error:
        raise processes.lost(peer, error) from None


class Loopback:
    """Both ends of a ring of one stage."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self.num_bytes = 0

    def send(self, message: Message) -> None:
        self._messages.append(message)

    def receive(self) -> Message:
        return self._messages.popleft()

    def close(self) -> None:
        """There is nothing to wait for."""


@dataclass(frozen=True)
class RingEnds:
    """This rank's ends of the ring of stages."""

    inbound: Receiver
    outbound: Sender


def connect_ring(
    grid: StageGrid,
    rank: int,
    form: MessageForm,
    depth: int,
    capacity: int,
    collectives: str | None,
) -> RingEnds:
    """Connect the ranks of `grid` along its edges, each by a process group of its own. All ranks
    must call it together. At most `depth` messages are under way on an edge; in shared memory, as
    many as fit into `capacity` bytes. `collectives` is a resolved name of `names.COLLECTIVES`."""
    if grid.num_stages == 1:
        loop = Loopback()
        return RingEnds(loop, loop)
    processes = Processes.of_ranks()
    inbound: Receiver | None = None
    outbound: Sender | None = None
    for edge in grid.edges():
        ends = connect_edge(edge, rank, form, depth, capacity, collectives, processes)
        outbound, inbound = outbound or ends[0], inbound or ends[1]
    assert inbound is not None and outbound is not None, "every rank has both ends"
    return RingEnds(inbound, outbound)


def connect_edge(
    edge: tuple[int, int],
    rank: int,
    form: MessageForm,
    depth: int,
    capacity: int,
    collectives: str | None,
    processes: Processes,
) -> tuple[Sender | None, Receiver | None]:
    """This rank's end of an edge (sender, receiver), which gets a process group of its own. All
    ranks must call it together; `depth`, `capacity` and `collectives` as in `connect_ring`."""
    import torch.distributed as dist

    sender, receiver = edge
    handle = dist.new_group([min(edge), max(edge)], backend="gloo")
    if rank not in edge:
        return None, None
    peer = receiver if rank == sender else sender
    if collectives == "shared_memory":
        from magicdec.distributed.shared_ring import RingReceiver, RingSender

        place = handle, peer, form, capacity, processes
        return (RingSender(*place), None) if rank == sender else (None, RingReceiver(*place))
    if rank == sender:
        return GlooSender(handle, peer, form, depth, processes), None
    return None, GlooReceiver(handle, peer, form, processes)


def time_round(ends: RingEnds, form: MessageForm, num_tokens: int, rounds: int) -> list[float]:
    """Seconds that messages with so many tokens, of all rows together, take around the ring, one at
    a time, if every stage only passes them on. Only a rank of the first stage calls it."""
    payload, seconds = torch.zeros(num_tokens, 1, form.width, dtype=form.dtype), []
    for _ in range(rounds):
        started = time.perf_counter()
        ends.outbound.send(Message(Kind.PROBE, payload=payload))
        ends.inbound.receive()
        seconds.append(time.perf_counter() - started)
    return seconds


__all__ = ["Kind", "Message", "MessageForm", "PeerLost", "RingEnds", "connect_ring", "time_round"]
