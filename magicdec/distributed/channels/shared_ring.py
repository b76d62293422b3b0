"""Messages between two CPU ranks of one host through a ring buffer in shared memory
(`shared_ring.cpp`).

Owns the shared memory segment of one directed edge. The receiver creates it, and both map it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from magicdec.distributed.channels.message import PATIENCE_S, Message, MessageForm
from magicdec.distributed.shared_memory import Segment
from magicdec.distributed.watching.processes import PeerLost, Processes
from magicdec.kernels.build import load_library

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SOURCE = Path(__file__).with_name("shared_ring.cpp")
PATH_BYTES = 256
WAIT_MS = 50  # before a wait returns to Python, which looks whether all ranks are still alive


class SharedRing:
    """One end. Both ends must be made together."""

    is_receiver: ClassVar[bool]

    def __init__(
        self,
        handle: ProcessGroup,
        peer: int,
        form: MessageForm,
        capacity: int,
        processes: Processes,
    ) -> None:
        self.peer, self.form, self.processes, self.num_bytes = peer, form, processes, 0
        self._library = load_library(SOURCE)
        for name in ("magicdec_ring_bytes", "magicdec_ring_write", "magicdec_ring_read"):
            getattr(self._library, name).restype = ctypes.c_int64
        self._capacity = ctypes.c_int64(capacity)
        num_bytes = self._library.magicdec_ring_bytes(self._capacity)
        segment = Segment(num_bytes) if self.is_receiver else None
        path = agree_on_path(handle, peer, segment)
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), num_bytes)
        import torch.distributed as dist

        dist.barrier(group=handle)
        if segment is not None:
            segment.close()
        self._ring = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self._memory)))

    def _move(self, function: Callable[..., int], tensor: Tensor) -> None:
        """Write or read the whole tensor."""
        count, done = tensor.numel() * tensor.element_size(), 0
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


class RingSender(SharedRing):
    is_receiver = False

    def send(self, message: Message) -> None:
        """Returns when the message is in the ring, which it may leave at once."""
        write, header = self._library.magicdec_ring_write, self.form.header(message)
        self._move(write, header)
        self.num_bytes += header.numel() * header.element_size()
        if message.payload is not None:
            payload = message.payload.contiguous()
            self._move(write, payload)
            self.num_bytes += payload.numel() * payload.element_size()

    def close(self) -> None:
        """What is in the ring reaches the receiver without this rank."""


class RingReceiver(SharedRing):
    is_receiver = True

    def receive(self) -> Message:
        read, header = self._library.magicdec_ring_read, self.form.empty_header()
        self._move(read, header)
        numbers = header.tolist()
        payload = self.form.empty_payload(numbers)
        if payload is not None:
            self._move(read, payload)
        return self.form.message(numbers, payload)


def agree_on_path(handle: ProcessGroup, peer: int, segment: Segment | None) -> Path:
    """Where the segment that the receiver has created is opened, on both ends."""
    import torch.distributed as dist

    words = torch.zeros(PATH_BYTES, dtype=torch.uint8)
    if segment is not None:
        name = os.fsencode(segment.path)
        words[: len(name)] = torch.tensor([*name], dtype=torch.uint8)
        dist.send(words, peer, group=handle)
    else:
        dist.recv(words, peer, group=handle)
    return Path(os.fsdecode(bytes(words.tolist()).rstrip(b"\0")))
