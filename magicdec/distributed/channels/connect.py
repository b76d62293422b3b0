"""Connects ranks by channels: those of one host through shared memory (`shared_ring.py`), others
through gloo (`process_group.py`). Payloads on a GPU are copied through pinned memory of the host,
or sent apart from their header, from GPU to GPU. On a CPU there is nothing to copy, and the same
code sends the same messages.

Owns the process groups of the edges.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from magicdec.distributed.channels.message import (
    Form,
    FormReceiver,
    FormSender,
    Kind,
    Message,
    MessageForm,
    Receiver,
    Sender,
)
from magicdec.distributed.channels.process_group import (
    TensorReceiver,
    TensorSender,
    connect_tensors,
    wait_for,
)
from magicdec.distributed.channels.shared_ring import SharedRing
from magicdec.distributed.groups import Launch
from magicdec.distributed.stages import StageGrid
from magicdec.distributed.watching.processes import Processes, processes_of


class Loopback:
    """Both ends of a channel from a rank to itself: of a ring of one stage, or between two of its
    threads."""

    num_bytes = 0  # nothing is copied

    def __init__(self) -> None:
        self._messages: SimpleQueue[Message] = SimpleQueue()

    def send(self, message: Message) -> None:
        self._messages.put(message)

    def receive(self) -> Message:
        return self._messages.get()

    def close(self) -> None:
        """There is nothing to wait for."""


@dataclass(frozen=True)
class RingEnds:
    """This rank's ends of the ring of stages."""

    inbound: Receiver
    outbound: Sender


def connect_ring(
    grid: StageGrid,
    launch: Launch,
    form: MessageForm,
    depth: int,
    capacity: int,
    headers: str | None,
    payloads: DevicePayloads | None = None,
) -> RingEnds:
    """Connect the ranks of `grid` along its edges, each by process groups of its own. All ranks
    must call it together. At most `depth` messages are under way on an edge; in shared memory, as
    many as fit into `capacity` bytes. Messages go through `headers`, gloo or shared_memory. With
    `payloads` only their headers do; `form` is then its `header_form`."""
    if grid.num_stages == 1:
        loop = Loopback()
        return RingEnds(loop, loop)
    rank, processes = launch.rank, processes_of(launch)
    inbound: Receiver | None = None
    outbound: Sender | None = None
    for edge in grid.edges():
        ends = connect_edge(edge, rank, form, depth, capacity, headers, processes, payloads)
        outbound, inbound = outbound or ends[0], inbound or ends[1]
    assert inbound is not None and outbound is not None, "every rank has both ends"
    return RingEnds(inbound, outbound)


def connect_edge(
    edge: tuple[int, int],
    rank: int,
    form: Form,
    depth: int,
    capacity: int,
    headers: str | None,
    processes: Processes,
    payloads: DevicePayloads | None = None,
) -> tuple[Sender | None, Receiver | None]:
    """This rank's end of an edge (sender, receiver) between the memories of hosts, which gets a
    process group of its own. All ranks must call it together; the rest as in `connect_ring`."""
    handle = dist.new_group([min(edge), max(edge)], backend="gloo")
    sends, receives = None, None
    if payloads is not None:
        sends, receives = connect_tensors(
            edge, rank, payloads.dtype, payloads.device, payloads.backend, depth, processes
        )
    if rank not in edge:
        return None, None
    peer = edge[1] if rank == edge[0] else edge[0]
    is_shared, cpu = headers == "shared_memory", torch.device("cpu")
    ring = SharedRing(handle, peer, capacity, processes, rank == edge[1]) if is_shared else None
    if rank == edge[0]:  # a message is at most two tensors
        tensors = ring or TensorSender(handle, peer, 2 * depth, processes, wait_for)
        sender = FormSender(form, tensors)
        return (sender if sends is None else SplitSender(sender, sends)), None
    filler = ring or TensorReceiver(handle, peer, torch.int64, cpu, processes, wait_for)
    receiver = FormReceiver(form, filler.fill)
    if payloads is None or receives is None:
        return None, receiver
    return None, SplitReceiver(receiver, receives, payloads.width)


def through_host(ends: RingEnds, device: torch.device) -> RingEnds:
    """The same ends for payloads on `device`, which are copied through the memory of the host."""
    return RingEnds(HostCopyReceiver(ends.inbound, device), HostCopySender(ends.outbound))


def time_round(
    ends: RingEnds,
    form: MessageForm,
    num_tokens: int,
    rounds: int,
    device: torch.device | str = "cpu",
) -> list[float]:
    """Seconds that messages with so many tokens on `device`, of all rows together, take around the
    ring, one at a time, if every stage only passes them on. Only a rank of the first stage calls
    it."""
    payload, seconds = torch.zeros(num_tokens, 1, form.width, dtype=form.dtype, device=device), []
    for _ in range(rounds):
        begin_s = time.perf_counter()
        ends.outbound.send(Message(Kind.PROBE, payload=payload))
        ends.inbound.receive()
        seconds.append(time.perf_counter() - begin_s)
    return seconds


SHAPE_WORDS = 2  # of a header whose payload goes apart: its rows and tokens


@dataclass(frozen=True)
class DevicePayloads:
    """Hidden states of that width and dtype that go from device to device, apart from their
    headers, by process groups of that backend. `device` is this rank's."""

    device: torch.device
    backend: str
    width: int
    dtype: torch.dtype

    def header_form(self, form: MessageForm) -> MessageForm:
        """The form of a channel for messages with the words of `form`."""
        return replace(form, max_words=form.max_words + SHAPE_WORDS)


@dataclass(frozen=True)
class HostCopySender:
    sender: Sender

    @property
    def num_bytes(self) -> int:
        return self.sender.num_bytes

    def send(self, message: Message) -> None:
        if message.payload is not None:
            message = replace(message, payload=to_host(message.payload))
        self.sender.send(message)

    def close(self) -> None:
        self.sender.close()


@dataclass(frozen=True)
class HostCopyReceiver:
    receiver: Receiver
    device: torch.device

    def receive(self) -> Message:
        message = self.receiver.receive()
        if message.payload is None:
            return message
        return replace(message, payload=to_device(message.payload, self.device))


@dataclass(frozen=True)
class SplitSender:
    """`sender` sends headers, whose first words are the shape of the payload, and `tensors` the
    payloads. A message without one sends its header alone."""

    sender: Sender
    tensors: TensorSender

    @property
    def num_bytes(self) -> int:
        return self.sender.num_bytes + self.tensors.num_bytes

    def send(self, message: Message) -> None:
        payload = message.payload
        rows, tokens = (0, 0) if payload is None else payload.shape[:2]
        self.sender.send(replace(message, words=(rows, tokens, *message.words), payload=None))
        if payload is not None:
            self.tensors.send(payload)

    def close(self) -> None:
        self.sender.close()
        self.tensors.close()


@dataclass(frozen=True)
class SplitReceiver:
    receiver: Receiver
    tensors: TensorReceiver
    width: int

    def receive(self) -> Message:
        header = self.receiver.receive()
        rows, tokens, *words = header.words
        payload = self.tensors.receive((rows, tokens, self.width)) if rows * tokens else None
        return replace(header, words=tuple(words), payload=payload)


def to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory of the host. Waits for the work on the tensor's stream."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on `device`, which is complete for all later work on its stream; a tensor that is on
    such a device is returned as it is."""
    if tensor.device.type == device.type:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
