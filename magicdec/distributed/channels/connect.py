"""Connects ranks by channels: those of one host through shared memory (`shared_ring.py`), others
through gloo (`process_group.py`). Payloads on a GPU are copied through pinned memory of the host,
or sent apart from their headers, from GPU to GPU. On a CPU there is nothing to copy, and the same
code sends the same messages.

Owns the process groups of the edges.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from magicdec.distributed.channels.message import (
    ChannelReceiver,
    ChannelSender,
    Ends,
    Kind,
    Loopback,
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

MOST_TENSORS = 3  # of a message


def connect_ring(
    grid: StageGrid,
    launch: Launch,
    form: MessageForm,
    depth: int,
    capacity: int,
    headers: str | None,
    device: torch.device,
    apart: str | None = None,
) -> Ends:
    """Connect the ranks of `grid` along its edges. All ranks must call it together, also those that
    are in no stage, whose ends lead nowhere. The rest as in `connect_edge`; `headers` is None for
    one stage."""
    if grid.num_stages == 1:
        loop = Loopback()
        return Ends(loop, loop)
    processes = processes_of(launch)
    inbound: Receiver | None = None
    outbound: Sender | None = None
    for edge in grid.edges():
        sender, receiver = connect_edge(
            edge, launch.rank, form, depth, capacity, headers, processes, device, apart
        )
        outbound, inbound = outbound or sender, inbound or receiver
    if inbound is None or outbound is None:
        assert launch.rank >= grid.world_size, "every rank of a stage has both ends"
        return Ends(Loopback(), Loopback())
    return Ends(inbound, outbound)


def connect_edge(
    edge: tuple[int, int],
    rank: int,
    form: MessageForm,
    depth: int,
    capacity: int,
    headers: str | None,
    processes: Processes,
    device: torch.device,
    apart: str | None = None,
) -> tuple[Sender | None, Receiver | None]:
    """This rank's end of an edge (sender, receiver), which gets a process group of its own. All
    ranks must call it together. At most `depth` messages are under way; in shared memory, as many
    as fit into `capacity` bytes. Messages go through `headers`, gloo or shared_memory. Payloads are
    for `device`; with `apart` they go by process groups of that backend."""
    handle = dist.new_group([min(edge), max(edge)], backend="gloo")
    sends, receives = None, None
    if apart is not None:
        sends, receives = connect_tensors(edge, rank, device, apart, depth, processes)
    if rank not in edge:
        return None, None
    peer = edge[1] if rank == edge[0] else edge[0]
    is_shared = headers == "shared_memory"
    ring = SharedRing(handle, peer, capacity, processes, rank == edge[1]) if is_shared else None
    if rank == edge[0]:
        writer = ring or TensorSender(handle, peer, MOST_TENSORS * depth, processes, wait_for)
        return ChannelSender(form, writer, sends), None
    filler = ring or TensorReceiver(handle, peer, processes, wait_for)
    payloads = None if receives is None else receives.fill
    return None, ChannelReceiver(form, filler.fill, device, payloads)


def time_round(
    ends: Ends,
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
