"""Connects ranks by channels: those of one host through shared memory (`shared_ring.py`), others
through gloo (`gloo.py`). Payloads on GPUs have a way of their own (`device.py`).

Owns the process groups of the edges. Must not know what a message is for.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch

from magicdec.distributed.channels.device import (
    DevicePayloads,
    HostCopyReceiver,
    HostCopySender,
    SplitReceiver,
    SplitSender,
)
from magicdec.distributed.channels.gloo import GlooReceiver, GlooSender
from magicdec.distributed.channels.message import Kind, Message, MessageForm, Receiver, Sender
from magicdec.distributed.channels.shared_ring import RingReceiver, RingSender
from magicdec.distributed.channels.tensors import connect_tensors
from magicdec.distributed.groups import Launch
from magicdec.distributed.stages import StageGrid
from magicdec.distributed.watching.processes import Processes, processes_of


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
        ends = connect_edge(edge, rank, form, depth, capacity, headers, processes)
        if payloads is not None:
            ends = split(ends, edge, rank, form, depth, payloads, processes)
        outbound, inbound = outbound or ends[0], inbound or ends[1]
    assert inbound is not None and outbound is not None, "every rank has both ends"
    return RingEnds(inbound, outbound)


def connect_edge(
    edge: tuple[int, int],
    rank: int,
    form: MessageForm,
    depth: int,
    capacity: int,
    headers: str | None,
    processes: Processes,
) -> tuple[Sender | None, Receiver | None]:
    """This rank's end of an edge (sender, receiver) between the memories of hosts, which gets a
    process group of its own. All ranks must call it together; `depth`, `capacity` and `headers` as
    in `connect_ring`."""
    import torch.distributed as dist

    sender, receiver = edge
    handle = dist.new_group([min(edge), max(edge)], backend="gloo")
    if rank not in edge:
        return None, None
    peer = receiver if rank == sender else sender
    if headers == "shared_memory":
        place = handle, peer, form, capacity, processes
        return (RingSender(*place), None) if rank == sender else (None, RingReceiver(*place))
    if rank == sender:
        return GlooSender(handle, peer, form, depth, processes), None
    return None, GlooReceiver(handle, peer, form, processes)


def split(
    ends: tuple[Sender | None, Receiver | None],
    edge: tuple[int, int],
    rank: int,
    form: MessageForm,
    depth: int,
    payloads: DevicePayloads,
    processes: Processes,
) -> tuple[Sender | None, Receiver | None]:
    """The same ends for payloads that go apart. All ranks must call it together."""
    device, backend = payloads.device, payloads.backend
    tensors = connect_tensors(edge, rank, form.dtype, device, backend, depth, processes)
    (sender, receiver), (sends, receives) = ends, tensors
    return (
        None if sender is None or sends is None else SplitSender(sender, sends),
        None if receiver is None or receives is None
        else SplitReceiver(receiver, receives, form.width),
    )  # fmt: skip


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
        started = time.perf_counter()
        ends.outbound.send(Message(Kind.PROBE, payload=payload))
        ends.inbound.receive()
        seconds.append(time.perf_counter() - started)
    return seconds
