"""Connects ranks by channels. Headers on one host go through shared memory, others through gloo;
GPU payloads through pinned host memory, or from GPU to GPU apart from their headers."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from magicdec.distributed.channels.carriers import GroupCarrier, PacketCarrier, SharedRing
from magicdec.distributed.channels.message import (
    PATIENCE_S,
    Carrier,
    ChannelReceiver,
    ChannelSender,
    Ends,
    Loopback,
    MessageForm,
    Receiver,
    Sender,
)
from magicdec.distributed.groups import Launch
from magicdec.distributed.layout import StageGrid
from magicdec.distributed.watching.processes import processes_of

MOST_TENSORS = 3  # of a message
# messages under way on an edge, and its bytes in shared memory
DEPTH = 64
CAPACITY = 1 << 22


class Connector:
    """A maker of channels. All ranks must make the same ones in the same order."""

    def __init__(
        self,
        launch: Launch,
        headers: str | None,
        form: MessageForm,
        device: torch.device,
        apart: str | None = None,
        depth: int = DEPTH,
        capacity: int = CAPACITY,
    ) -> None:
        """`headers` is gloo or shared_memory, None if no rank sends to another. `form` is of hidden
        states for `device`, `apart` a process group backend for them. An edge holds at most
        `depth` messages, in shared memory `capacity` bytes."""
        self.rank = launch.rank
        self.headers = headers
        self.form = form
        self.device = device
        self.apart = apart
        self.depth = depth
        self.capacity = capacity
        self.processes = processes_of(launch)

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks can read one array in place of messages."""
        return self.headers == "shared_memory"

    def edge(
        self, sender: int, receiver: int, form: MessageForm, apart: str | None = None
    ) -> tuple[Sender | None, Receiver | None]:
        if sender == receiver:
            channel = Loopback()
            return (channel, channel) if self.rank == sender else (None, None)
        handle = dist.new_group(sorted((sender, receiver)), backend="gloo")
        payloads = None if apart is None else self._payloads(sender, receiver, apart)
        if self.rank not in (sender, receiver):
            return None, None
        is_receiver = self.rank == receiver
        peer = sender if is_receiver else receiver
        processes = self.processes
        carrier: Carrier = (
            SharedRing(handle, peer, self.capacity, processes, is_receiver)
            if self.headers == "shared_memory"
            else PacketCarrier(handle, peer, MOST_TENSORS * self.depth, processes, is_receiver)
        )
        if is_receiver:
            return None, ChannelReceiver(form, carrier, self.device, payloads)
        return ChannelSender(form, carrier, payloads), None

    def _payloads(self, sender: int, receiver: int, backend: str) -> Carrier | None:
        """A carrier, used once so that no later message waits for NCCL's setup."""
        ranks = sorted((sender, receiver))
        patience = timedelta(seconds=PATIENCE_S)
        handle = dist.new_group(ranks, timeout=patience, backend=backend)
        if self.rank not in ranks:
            return None
        peer = sender if self.rank == receiver else receiver
        carrier = GroupCarrier(handle, peer, self.depth, self.processes, backend != "gloo")
        number = torch.zeros(1, device=self.device)
        if self.rank == receiver:
            carrier.fill(number)
        else:
            carrier.send(number)
            carrier.close()
            carrier.num_bytes = 0
        return carrier

    def ring(self, grid: StageGrid) -> Ends:
        """This rank's ends of a ring along the edges of `grid`; outside they lead nowhere."""
        inbound: Receiver | None = None
        outbound: Sender | None = None
        for edge in grid.edges():
            sender, receiver = self.edge(*edge, self.form, self.apart)
            outbound = outbound or sender
            inbound = inbound or receiver
        if inbound is None or outbound is None:
            loop = Loopback()
            return Ends(loop, loop)
        return Ends(inbound, outbound)
