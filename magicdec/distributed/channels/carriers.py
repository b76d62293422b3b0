"""Carriers of tensors between two ranks: a ring buffer in shared memory (`shared_ring.cpp`), or a
process group of gloo or NCCL. Also the collectives of ranks with gloo edges."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from magicdec.distributed.channels.message import PATIENCE_S
from magicdec.distributed.shared_memory import HEADERS, WAIT_MS, map_segment
from magicdec.distributed.watching.processes import PeerLost, Processes
from magicdec.kernels.build import load_library

SOURCE = Path(__file__).with_name("shared_ring.cpp")
CHECK_S = 0.05  # between two such looks while a device waits
# of a gloo edge, and how many its receiver is ready for
PACKET_BYTES = 1 << 16
MOST_PACKETS = 32
DIRECT_BYTES = 1 << 16  # of a sum for which each of three or more ranks sends its part to all


class GroupCarrier:
    """One end of an edge to `peer` through a process group, with at most `depth` tensors under way.
    `is_on_device`: the group's `wait` is the device stream's."""

    def __init__(
        self,
        handle: ProcessGroup,
        peer: int,
        depth: int,
        processes: Processes,
        is_on_device: bool = False,
    ) -> None:
        self.handle = handle
        self.peer = peer
        self.depth = depth
        self.processes = processes
        self.wait_for = wait_for_device if is_on_device else wait_for
        self.num_bytes = 0
        self._under_way: deque[tuple[list[Any], Tensor]] = deque()  # sends, with what they read

    def send(self, tensor: Tensor) -> None:
        while len(self._under_way) >= self.depth:
            self._wait()
        sends = [self._start(dist.isend, part) for part in self.parts(tensor)]
        self._under_way.append((sends, tensor))
        self.num_bytes += tensor.nbytes

    def parts(self, tensor: Tensor) -> Sequence[Tensor]:
        return [tensor]

    def fill(self, tensor: Tensor) -> None:
        self.wait_for(self._start(dist.irecv, tensor), self.peer, self.processes)

    def has_arrived(self, seconds: float) -> bool:
        """A process group cannot tell what has come unasked."""
        return True

    def close(self) -> None:
        while self._under_way:
            self._wait()

    def _start(self, exchange: Callable[..., Any], tensor: Tensor) -> Any:
        try:
            return exchange(tensor, self.peer, group=self.handle)
        except RuntimeError as error:
            raise self.processes.lost(self.peer, error) from None

    def _wait(self) -> None:
        sends, _ = self._under_way.popleft()
        for work in sends:
            self.wait_for(work, self.peer, self.processes)


class PacketCarrier(GroupCarrier):
    """One end of an edge through gloo, with tensors in packets.

    The receiver is ready before packets are sent; otherwise gloo asks first, and a tensor takes the
    link's delay three times. No send waits for its receiver, or two ranks would wait for each
    other.
    """

    def __init__(
        self,
        handle: ProcessGroup,
        peer: int,
        depth: int,
        processes: Processes,
        is_receiver: bool,
    ) -> None:
        super().__init__(handle, peer, depth, processes)
        self._expected: deque[tuple[Any, Tensor]] = deque()
        for _ in range(MOST_PACKETS if is_receiver else 0):
            self._expect(torch.empty(PACKET_BYTES, dtype=torch.uint8))

    def parts(self, tensor: Tensor) -> Sequence[Tensor]:
        return tensor.view(-1).view(torch.uint8).split(PACKET_BYTES)

    def fill(self, tensor: Tensor) -> None:
        for packet in self.parts(tensor):
            work, buffer = self._expected.popleft()
            self.wait_for(work, self.peer, self.processes)
            packet.copy_(buffer[: packet.numel()])
            self._expect(buffer)

    def _expect(self, buffer: Tensor) -> None:
        self._expected.append((self._start(dist.irecv, buffer), buffer))


class DirectExchange:
    """Collectives of CPU ranks, which must create it together. Each sends to all others, and so
    takes a link's delay once; gloo's own take it several times."""

    def __init__(
        self, handle: ProcessGroup, ranks: Sequence[int], index: int, processes: Processes
    ) -> None:
        self.handle = handle
        self.index = index
        self.size = len(ranks)
        self._edges = [
            [
                PacketCarrier(handle, rank, 1, processes, is_receiver)
                for rank in ranks
                if rank != ranks[index]
            ]
            for is_receiver in (False, True)
        ]

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over the ranks, in place: equal to the bit on each rank."""
        if self.size > 2 and x.nbytes > DIRECT_BYTES:  # a ring of ranks sends fewer bytes
            dist.all_reduce(x, group=self.handle)
            return x
        return x.copy_(self.all_gather(x).sum(dim=0))

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x, in the order of the group: [size, ...]."""
        out = x.new_empty(self.size, *x.shape)
        out[self.index] = x
        senders, receivers = self._edges
        for sender in senders:
            sender.send(out[self.index])
        others = (out[rank] for rank in range(self.size) if rank != self.index)
        for receiver, part in zip(receivers, others, strict=True):
            receiver.fill(part)
        for sender in senders:  # the caller may change the result
            sender.close()
        return out


def wait_for(work: Any, peer: int, processes: Processes) -> None:
    """Wait for the work. Raises PeerLost if the peer has ended, or after PATIENCE_S."""
    try:
        work.wait(timedelta(seconds=PATIENCE_S))
    except RuntimeError as error:
        raise processes.lost(peer, error) from None


def wait_for_device(work: Any, peer: int, processes: Processes) -> None:
    """As `wait_for`, for backends such as NCCL, whose `wait` is the device stream's: the host
    polls."""
    now = time.monotonic()
    end = now + PATIENCE_S
    look_at = now + CHECK_S
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


class SharedRing:
    """One end of an edge in shared memory. Both ends must be made together."""

    def __init__(
        self,
        handle: ProcessGroup,
        peer: int,
        capacity: int,
        processes: Processes,
        is_receiver: bool,
    ) -> None:
        self.peer = peer
        self.processes = processes
        self.num_bytes = 0
        self._library = load_library(SOURCE, (), HEADERS)
        for name in ("magicdec_ring_bytes", "magicdec_ring_write", "magicdec_ring_read"):
            getattr(self._library, name).restype = ctypes.c_int64
        self._capacity = ctypes.c_int64(capacity)
        num_bytes = self._library.magicdec_ring_bytes(self._capacity)
        self._memory = map_segment(num_bytes, peer, handle, is_receiver)
        self._ring = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self._memory)))

    def send(self, tensor: Tensor) -> None:
        """Put the tensor into the ring. It may be overwritten afterwards."""
        self._move(self._library.magicdec_ring_write, tensor)
        self.num_bytes += tensor.nbytes

    def fill(self, tensor: Tensor) -> None:
        self._move(self._library.magicdec_ring_read, tensor)

    def has_arrived(self, seconds: float) -> bool:
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            wait_ms = ctypes.c_int64(min(WAIT_MS, int(1e3 * left_s)))
            if self._library.magicdec_ring_has_bytes(self._ring, wait_ms):
                return True
            self.processes.check()
        return False

    def close(self) -> None:
        """The receiver gets what is in the ring without this rank."""

    def _move(self, function: Callable[..., int], tensor: Tensor) -> None:
        count = tensor.nbytes
        done = 0
        deadline: float | None = None
        while True:
            c = ctypes.c_int64
            moved = function(
                self._ring,
                self._capacity,
                ctypes.c_void_p(tensor.data_ptr()),
                c(done),
                c(count),
                c(WAIT_MS),
            )
            if moved == count:
                return
            if moved > done or deadline is None:
                done = moved
                deadline = time.monotonic() + PATIENCE_S
            self.processes.check()
            if time.monotonic() > deadline:
                raise PeerLost(f"rank {self.peer} has not been heard of for {PATIENCE_S:g} s")
