"""Collectives between the CPU ranks of one host through shared memory (`shared_memory.cpp`).

Owns the shared memory segment. One rank creates it, and all ranks map it. It never has a name that
could be left behind, however the ranks end. A message larger than a slot is sent in parts.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from magicdec.distributed.watching.processes import is_alive
from magicdec.kernels.build import load_library

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SOURCE = Path(__file__).with_name("shared_memory.cpp")
HEADERS = (SOURCE.with_suffix(".h"),)
DIRECTORY = Path("/dev/shm")
SLOT_BYTES = 1 << 18
# How long a wait sleeps before it returns to Python, which handles signals and looks whether the
# missing rank is still alive.
WAIT_MS = 50
SUMS = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}


class SharedMemoryExchange:
    """One rank's collectives, which is number `index` of `ranks`. All these ranks, which share
    `handle`, must create it together, on one host."""

    def __init__(self, handle: ProcessGroup, ranks: Sequence[int], index: int) -> None:
        self.index, self.size, self.turn = index, len(ranks), 0
        self._library = load_library(SOURCE, (), HEADERS)
        self._library.magicdec_wait.restype = ctypes.c_int64
        pids: list[Any] = [None] * self.size
        dist.all_gather_object(pids, (index, os.getpid()), group=handle)
        self.pids = [pid for _, pid in sorted(pids)]
        num_bytes = self.size * (64 + 2 * SLOT_BYTES)
        self._memory = map_segment(num_bytes, ranks[0], handle, index == 0)
        self.segment = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self._memory)))

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over the ranks, in place. The result is the same to the bit on each rank."""
        flat = x.view(-1)
        assert x.is_contiguous() and x.dtype in SUMS
        add = getattr(self._library, f"magicdec_sum_{SUMS[x.dtype]}")
        for part in flat.split(SLOT_BYTES // x.element_size()):
            self._exchange(part)
            add(*self._place(), ctypes.c_void_p(part.data_ptr()), ctypes.c_int64(part.numel()))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x, in rank order: [size, ...]."""
        x = x.contiguous()
        parts = []
        for part in x.view(-1).split(SLOT_BYTES // x.element_size()):
            self._exchange(part)
            out = torch.empty(self.size, part.numel(), dtype=x.dtype)
            num_bytes = ctypes.c_int64(part.numel() * x.element_size())
            self._library.magicdec_collect(
                *self._place(), ctypes.c_void_p(out.data_ptr()), num_bytes
            )
            parts.append(out)
        return torch.cat(parts, dim=1).view(self.size, *x.shape)

    def _place(self) -> tuple[Any, ...]:
        c = ctypes.c_int64
        return self.segment, c(self.size), c(SLOT_BYTES), ctypes.c_uint64(self.turn)

    def _exchange(self, x: Tensor) -> None:
        self.turn += 1
        c, turn = ctypes.c_int64, ctypes.c_uint64(self.turn)
        self._library.magicdec_post(
            self.segment, c(self.index), c(self.size), c(SLOT_BYTES), turn,
            ctypes.c_void_p(x.data_ptr()), c(x.numel() * x.element_size()),
        )  # fmt: skip
        wait = self._library.magicdec_wait
        while (missing := wait(self.segment, c(self.size), turn, c(WAIT_MS))) >= 0:
            self.check_alive(missing)

    def check_alive(self, rank: int) -> None:
        """Raise RuntimeError if the process of a rank of the group has ended."""
        if not is_alive(self.pids[rank]):
            raise RuntimeError(f"rank {rank} of the group has ended (process {self.pids[rank]})")


class Segment:
    """A new file of `num_bytes` in shared memory, which has no name any more: it is gone with the
    processes that hold it, however they end. Other processes of this user open it at `path`, until
    it is closed. Raises OSError if there is no room for it."""

    def __init__(self, num_bytes: int) -> None:
        self._file, path = tempfile.mkstemp(prefix="magicdec-", dir=DIRECTORY)
        Path(path).unlink()
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        try:
            os.posix_fallocate(self._file, 0, num_bytes)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """All have mapped it."""
        os.close(self._file)


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
