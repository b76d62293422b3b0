"""Tensors through process groups, which have one edge each: those of messages through gloo, and
hidden states that go from GPU to GPU by NCCL, without a header.

Owns how many tensors are under way, and how the end of a peer is noticed while the device waits for
it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from magicdec.distributed.channels.message import PATIENCE_S
from magicdec.distributed.watching.processes import PeerLost, Processes

CHECK_S = 0.05  # between two looks at whether all ranks are still alive
Wait = Callable[[Any, int, Processes], None]
Ends = tuple["TensorSender | None", "TensorReceiver | None"]


class TensorSender:
    """At most `depth` tensors are under way."""

    def __init__(
        self, handle: ProcessGroup, peer: int, depth: int, processes: Processes, wait: Wait
    ) -> None:
        self.handle, self.peer, self.depth = handle, peer, depth
        self.processes, self.wait, self.num_bytes = processes, wait, 0
        self._under_way: deque[tuple[Any, Tensor]] = deque()  # sends, with what they read

    def send(self, tensor: Tensor) -> None:
        """Returns before the receiver has it, unless too many are under way."""
        while len(self._under_way) >= self.depth:
            self._wait()
        try:
            work = dist.isend(tensor, self.peer, group=self.handle)
        except RuntimeError as error:
            raise self.processes.lost(self.peer, error) from None
        self._under_way.append((work, tensor))
        self.num_bytes += tensor.nbytes

    def close(self) -> None:
        """Wait until everything is sent."""
        while self._under_way:
            self._wait()

    def _wait(self) -> None:
        work, _ = self._under_way.popleft()
        self.wait(work, self.peer, self.processes)


@dataclass(frozen=True)
class TensorReceiver:
    handle: ProcessGroup
    peer: int
    processes: Processes
    wait: Wait

    def fill(self, tensor: Tensor) -> None:
        """Receive into `tensor`. Waits until it is in the memory of this rank."""
        try:
            work = dist.irecv(tensor, self.peer, group=self.handle)
        except RuntimeError as error:
            raise self.processes.lost(self.peer, error) from None
        self.wait(work, self.peer, self.processes)


def wait_for(work: Any, peer: int, processes: Processes) -> None:
    """Raises PeerLost if the peer has ended, or for a wait that is too long."""
    try:
        work.wait(timedelta(seconds=PATIENCE_S))
    except RuntimeError as error:
        raise processes.lost(peer, error) from None


def wait_for_device(work: Any, peer: int, processes: Processes) -> None:
    """As `wait_for`, for backends such as NCCL, whose `wait` returns at once and lets the device's
    stream wait. The host looks until the device is done."""
    now = time.monotonic()
    end, look_at = now + PATIENCE_S, now + CHECK_S
    try:
        while not work.is_completed():
            time.sleep(0)  # lets other threads of this rank run
            if (now := time.monotonic()) < look_at:
                continue
            processes.check()
            look_at = now + CHECK_S
            if now > end:
                raise PeerLost(f"rank {peer} has not been heard of for {PATIENCE_S:g} s")
        work.wait()
    except PeerLost:
        raise
    except RuntimeError as error:
        raise processes.lost(peer, error) from None


def connect_tensors(
    edge: tuple[int, int],
    rank: int,
    device: torch.device,
    backend: str,
    depth: int,
    processes: Processes,
) -> Ends:
    """This rank's end of an edge (sender, receiver) whose process group has that backend. All ranks
    must call it together. One number is exchanged, with which NCCL connects both ends, so that no
    later message waits for that."""
    sender, receiver = edge
    patience = timedelta(seconds=PATIENCE_S)
    handle = dist.new_group([min(edge), max(edge)], timeout=patience, backend=backend)
    if rank not in edge:
        return None, None
    wait = wait_for if backend == "gloo" else wait_for_device
    if rank == sender:
        outbound = TensorSender(handle, receiver, depth, processes, wait)
        outbound.send(torch.zeros(1, device=device))
        outbound.close()
        outbound.num_bytes = 0
        return outbound, None
    inbound = TensorReceiver(handle, sender, processes, wait)
    inbound.fill(torch.zeros(1, device=device))
    return None, inbound
