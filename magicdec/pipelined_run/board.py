"""CancelBoard: the runs that the head has cancelled, where a stage can look without a system call.

Stages of the head's host map one board in shared memory, into which the head writes. A stage that
shares no memory with the head has a board of its own, and a thread that writes into it what comes
through a channel. Must not know why a run is cancelled.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Protocol

import torch

from magicdec.distributed.channels.message import Kind, Receiver, Sender
from magicdec.distributed.shared_memory import Segment
from magicdec.pipelined_run.parcel import numbers_of, pack

SLOTS = 1 << 12  # more runs than are ever in flight; a slot that is taken twice only costs work
BOARD_BYTES = SLOTS * 2 * 8
PATH_BYTES = 256


@dataclass(frozen=True)
class RunCancellation:
    """Whether one run is cancelled; `Cancellation` explains the address."""

    board: CancelBoard
    run: int

    @property
    def address(self) -> int:
        return self.board.address + self.run % SLOTS * 16

    @property
    def value(self) -> int:
        return self.run + 1

    def is_set(self) -> bool:
        return self.board.is_cancelled(self.run)


class CancelBoard:
    """Run r has slot r modulo SLOTS: its number plus 1, and from when on it counts as cancelled, in
    ns of `time.perf_counter_ns`, which is the same clock in all processes of a host."""

    def __init__(self, memory: mmap.mmap | bytearray | None = None) -> None:
        self._memory = memory or bytearray(BOARD_BYTES)
        self._numbers = memoryview(self._memory).cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def cancel(self, run: int, delay_s: float = 0.0) -> None:
        slot = run % SLOTS * 2
        self._numbers[slot + 1] = time.perf_counter_ns() + int(1e9 * delay_s)
        self._numbers[slot] = run + 1

    def is_cancelled(self, run: int) -> bool:
        slot = run % SLOTS * 2
        if self._numbers[slot] != run + 1:
            return False
        return time.perf_counter_ns() >= self._numbers[slot + 1]


def shared_board(rank: int) -> CancelBoard:
    """One board of all ranks, which are on one host. All ranks must call it together."""
    import torch.distributed as dist

    words = torch.zeros(PATH_BYTES, dtype=torch.uint8)
    segment = Segment(BOARD_BYTES) if rank == 0 else None
    if segment is not None:
        name = os.fsencode(segment.path)
        words[: len(name)] = torch.tensor([*name], dtype=torch.uint8)
    dist.broadcast(words, 0)
    path = Path(os.fsdecode(bytes(words.tolist()).rstrip(b"\0")))
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), BOARD_BYTES)
    dist.barrier()
    if segment is not None:
        segment.close()
    return CancelBoard(memory)


class Canceller(Protocol):
    def cancel(self, runs: Sequence[int]) -> None:
        """Tell all stages. Returns before they know it."""
        ...

    def close(self) -> None:
        """No run is cancelled any more."""
        ...


class BoardCanceller:
    """All stages look at `board`, for which a cancellation takes `delay_s`."""

    def __init__(self, board: CancelBoard, delay_s: float = 0.0) -> None:
        self.board, self.delay_s = board, delay_s

    def cancel(self, runs: Sequence[int]) -> None:
        for run in runs:
            self.board.cancel(run, self.delay_s)

    def close(self) -> None:
        """There is nothing to wait for."""


class ChannelCanceller:
    """A channel leads to each stage of another rank; `board` is that of the head's own stage."""

    def __init__(self, board: CancelBoard, channels: Sequence[Sender]) -> None:
        self.board, self.channels = board, channels

    def cancel(self, runs: Sequence[int]) -> None:
        for channel in self.channels:
            channel.send(pack(Kind.NUMBERS, 0, runs))
        for run in runs:
            self.board.cancel(run)

    def close(self) -> None:
        for channel in self.channels:
            channel.send(pack(Kind.END, 0, ()))
            channel.close()


def listen(channel: Receiver, board: CancelBoard) -> Thread:
    """A thread that writes into `board` what comes through `channel`, until its end. If the channel
    breaks it ends: the stage notices that itself, and a run that is not skipped does no harm."""

    def copy() -> None:
        try:
            while (message := channel.receive()).kind is not Kind.END:
                for run in numbers_of(message):
                    board.cancel(run)
        except RuntimeError:
            return

    thread = Thread(target=copy, name="cancellations", daemon=True)
    thread.start()
    return thread
