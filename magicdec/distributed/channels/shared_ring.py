"""Tensors between two CPU ranks of one host through a ring buffer in shared memory
(`shared_ring.cpp`).

Owns the shared memory segment of one directed edge. The receiver creates it, and both map it.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from magicdec.distributed.channels.message import PATIENCE_S
from magicdec.distributed.shared_memory import Segment
from magicdec.distributed.watching.processes import PeerLost, Processes
from magicdec.kernels.build import load_library

SOURCE = Path(__file__).with_name("shared_ring.cpp")
WAIT_MS = 50  # before a wait returns to Python, which looks whether all ranks are still alive


class SharedRing:
    """One end, which sends or fills tensors. Both ends must be made together."""

    def __init__(
        self,
        handle: ProcessGroup,
        peer: int,
        capacity: int,
        processes: Processes,
        is_receiver: bool,
    ) -> None:
        self.peer, self.processes, self.num_bytes = peer, processes, 0
        self._library = load_library(SOURCE)
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
        """Receive into `tensor`. Waits for what is sent."""
        self._move(self._library.magicdec_ring_read, tensor)

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


def map_segment(
    num_bytes: int, peer: int, handle: ProcessGroup | None, is_owner: bool
) -> mmap.mmap:
    """A new segment of shared memory that one rank owns and makes, and the others of the group map,
    for which it is the `peer`. All must call it together. No `handle` stands for all ranks."""
    segment = Segment(num_bytes) if is_owner else None
    paths = [None if segment is None else segment.path]
    dist.broadcast_object_list(paths, dist.get_rank() if is_owner else peer, group=handle)
    with Path(str(paths[0])).open("r+b") as file:
        memory = mmap.mmap(file.fileno(), num_bytes)
    dist.barrier(group=handle)
    if segment is not None:
        segment.close()
    return memory
