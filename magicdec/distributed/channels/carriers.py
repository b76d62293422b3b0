"""What carries tensors along one edge between two ranks: a ring buffer in shared memory
(`shared_ring.cpp`), or a process group of its own, by gloo or from GPU to GPU by NCCL.

Owns the shared memory segments of edges, how many tensors are under way, and how the end of a peer
is noticed while a rank or its device waits for it.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from magicdec.distributed.channels.message import PATIENCE_S
from magicdec.distributed.shared_memory import HEADERS, WAIT_MS, map_segment
from magicdec.distributed.watching.processes import PeerLost, Processes
from magicdec.kernels.build import load_library

SOURCE = Path(__file__).with_name("shared_ring.cpp")
CHECK_S = 0.05  # between two such looks while a device waits


class GroupCarrier:
    """One end of an edge through a process group, to `peer`. At most `depth` tensors are under way.
    `is_on_device`: the group's `wait` returns at once and lets the stream of the device wait."""

    def __init__(
        self,
        handle: ProcessGroup,
        peer: int,
        depth: int,
        processes: Processes,
        is_on_device: bool = False,
    ) -> None:
        self.handle, self.peer, self.depth, self.processes = handle, peer, depth, processes
        self.wait_for, self.num_bytes = wait_for_device if is_on_device else wait_for, 0
        self._under_way: deque[tuple[Any, Tensor]] = deque()  # sends, with what they read

    def send(self, tensor: Tensor) -> None:
        while len(self._under_way) >= self.depth:
            self._wait()
        self._under_way.append((self._start(dist.isend, tensor), tensor))
        self.num_bytes += tensor.nbytes

    def fill(self, tensor: Tensor) -> None:
        self.wait_for(self._start(dist.irecv, tensor), self.peer, self.processes)

    def is_there(self, seconds: float) -> bool:
        """A process group says nothing of what it has not been asked to receive."""
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
        work, _ = self._under_way.popleft()
        self.wait_for(work, self.peer, self.processes)


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


class SharedRing:
    """One end of an edge in shared memory, which the receiver creates. Both ends must be made
    together."""

    def __init__(
        self,
        handle: ProcessGroup,
        peer: int,
        capacity: int,
        processes: Processes,
        is_receiver: bool,
    ) -> None:
        self.peer, self.processes, self.num_bytes = peer, processes, 0
        self._library = load_library(SOURCE, (), HEADERS)
        for name in ("magicdec_ring_bytes", "magicdec_ring_write", "magicdec_ring_read"):
            getattr(self._library, name).restype = ctypes.c_int64
        self._capacity = ctypes.c_int64(capacity)
        num_bytes = self._library.magicdec_ring_bytes(self._capacity)
        self._memory = map_segment(num_bytes, peer, handle, is_receiver)
        self._ring = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self._memory)))

    def send(self, tensor: Tensor) -> None:
        """Returns when the tensor is in the ring, which it may leave at once."""
        self._move(self._library.magicdec_ring_write, tensor)
        self.num_bytes += tensor.nbytes

    def fill(self, tensor: Tensor) -> None:
        self._move(self._library.magicdec_ring_read, tensor)

    def is_there(self, seconds: float) -> bool:
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            wait_ms = ctypes.c_int64(min(WAIT_MS, int(1e3 * left_s)))
            if self._library.magicdec_ring_has_bytes(self._ring, wait_ms):
                return True
            self.processes.check()
        return False

    def close(self) -> None:
        """What is in the ring reaches the receiver without this rank."""

    def _move(self, function: Callable[..., int], tensor: Tensor) -> None:
        """Write or read the whole tensor."""
        count, done = tensor.nbytes, 0
        deadline: float | None = None
        while True:
            c = ctypes.c_int64
            moved = function(
                self._ring, self._capacity, ctypes.c_void_p(tensor.data_ptr()), c(done), c(count),
                c(WAIT_MS),
            )  # fmt: skip
            if moved == count:
                return
            if moved > done or deadline is None:
                done, deadline = moved, time.monotonic() + PATIENCE_S
            self.processes.check()
            if time.monotonic() > deadline:
                raise PeerLost(f"rank {self.peer} has not been heard of for {PATIENCE_S:g} s")
