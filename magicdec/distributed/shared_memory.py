"""Collectives between the CPU ranks of one host through shared memory (`shared_memory.cpp`). The
segment never has a name that could be left behind. Large messages are sent in parts."""

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

from magicdec.distributed.values import all_gather_values
from magicdec.distributed.watching.processes import is_alive
from magicdec.kernels.build import load_library

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SOURCE = Path(__file__).with_name("shared_memory.cpp")
HEADERS = (SOURCE.with_suffix(".h"),)
DIRECTORY = Path("/dev/shm")
PREFIX = "magicdec-"
NO_SEGMENT = -1  # in place of the process that has made one
SLOT_BYTES = 1 << 18
# How long a wait sleeps before it returns to Python, which handles signals and looks whether the
# missing rank is still alive.
WAIT_MS = 50
SUMS = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}


class SharedMemoryExchange:
    """The collectives of rank number `index` of `ranks`, which must create it together."""

    def __init__(self, handle: ProcessGroup, ranks: Sequence[int], index: int) -> None:
        self.index = index
        self.size = len(ranks)
        self.turn = 0
        self._library = load_library(SOURCE, (), HEADERS)
        self._library.magicdec_wait.restype = ctypes.c_int64
        ours = index, os.getpid()
        self.pids = [
            pid for _, pid in sorted(all_gather_values(ours, tuple[int, int], self.size, handle))
        ]
        num_bytes = self.size * (64 + 2 * SLOT_BYTES)
        self._memory = map_segment(num_bytes, ranks[0], handle, index == 0)
        self.segment = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self._memory)))

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over the ranks, in place: equal to the bit on each rank."""
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
        c = ctypes.c_int64
        turn = ctypes.c_uint64(self.turn)
        self._library.magicdec_post(
            self.segment,
            c(self.index),
            c(self.size),
            c(SLOT_BYTES),
            turn,
            ctypes.c_void_p(x.data_ptr()),
            c(x.numel() * x.element_size()),
        )
        wait = self._library.magicdec_wait
        while (missing := wait(self.segment, c(self.size), turn, c(WAIT_MS))) >= 0:
            self.check_alive(missing)

    def check_alive(self, rank: int) -> None:
        """Raises RuntimeError if the process of a rank of the group has ended."""
        if not is_alive(self.pids[rank]):
            raise RuntimeError(f"rank {rank} of the group has ended (process {self.pids[rank]})")


class Segment:
    """A new nameless file in shared memory, which ends with the processes that hold it. Others of
    this user open it by `place` (process, file descriptor) until it is closed. Raises OSError
    without room."""

    def __init__(self, num_bytes: int) -> None:
        self._file, path = tempfile.mkstemp(prefix=PREFIX, dir=DIRECTORY)
        Path(path).unlink()
        self.place = os.getpid(), self._file
        try:
            os.posix_fallocate(self._file, 0, num_bytes)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Close the file, once all have mapped it."""
        os.close(self._file)


def make_segment(num_bytes: int) -> tuple[Segment | None, tuple[int, int]]:
    """A new segment and its place, or None and the number of the error."""
    try:
        segment = Segment(num_bytes)
    except OSError as error:
        return None, (NO_SEGMENT, error.errno or 0)
    return segment, segment.place


def open_segment(process: int, file: int, num_bytes: int) -> mmap.mmap:
    """Map another process's segment. Opens nothing else, whatever the rank has sent."""
    path = Path(f"/proc/{process}/fd/{file}")
    target = str(path.readlink())
    assert target.startswith(f"{DIRECTORY}/{PREFIX}"), f"{path} is {target}, no segment of a rank"
    with path.open("r+b") as opened:
        return mmap.mmap(opened.fileno(), num_bytes)


def map_segment(
    num_bytes: int, peer: int, handle: ProcessGroup | None, is_owner: bool
) -> mmap.mmap:
    """A new segment that one rank makes and the others, for which it is `peer`, map. All of the
    group (`handle` None: all ranks) must call it together. Raises ValueError on all without room.
    """
    segment, place = make_segment(num_bytes) if is_owner else (None, (0, 0))
    told = torch.tensor(place)
    dist.broadcast(told, dist.get_rank() if is_owner else peer, group=handle)
    process, file = told.tolist()
    if process == NO_SEGMENT:
        raise ValueError(
            f"--collectives shared_memory: {DIRECTORY} has no room for {num_bytes / 1e6:.1f} MB: "
            f"{os.strerror(file)}; make it larger, or choose --collectives gloo"
        )
    memory = open_segment(process, file, num_bytes)
    dist.barrier(group=handle)
    if segment is not None:
        segment.close()
    return memory
