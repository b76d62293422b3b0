"""The memory of this rank: over time (`MemorySampler`), and at its peak next to the plan of it
(`MemoryWatch`).

Owns the thread that reads it.
"""

from __future__ import annotations

import os
import resource
import time
from array import array
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import torch

from magicdec.distributed.groups import Group
from magicdec.hardware.timing import peak_memory_bytes, reset_peak_memory
from magicdec.memory.plan import MemoryPlan
from magicdec.records.environment import MemoryRecord

INTERVAL_S = 0.1
STATM = Path("/proc/self/statm")  # the second number is the resident pages
MOST_CHARACTERS = 256
PAGE_BYTES = resource.getpagesize()
FORM = "d"  # double precision, which holds a number of bytes exactly


class MemorySampler:
    """Reads the memory when its `with` block begins and ends, and every `interval_s` in between.
    `samples` has the time of each sample (seconds of `time.perf_counter`), followed by its bytes:
    those of the tensors in the CUDA allocator, or the resident memory of the process on a CPU.
    """

    def __init__(self, device: torch.device, interval_s: float = INTERVAL_S) -> None:
        self.device, self.interval_s = device, interval_s
        self.samples: array[float] = array(FORM)
        self._ended = Event()
        self._thread = Thread(target=self._run, name="memory sampler", daemon=True)

    def __enter__(self) -> MemorySampler:
        """Raises OSError on a system without STATM."""
        self._statm = STATM.open("rb", buffering=0)  # once, because opening costs most of a sample
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self._sample()
        self._statm.close()

    def _run(self) -> None:
        while not self._ended.wait(self.interval_s):
            self._sample()

    def _sample(self) -> None:
        if self.device.type == "cuda":
            num_bytes = torch.cuda.memory_allocated(self.device)
        else:
            pages = os.pread(self._statm.fileno(), MOST_CHARACTERS, 0).split()[1]
            num_bytes = int(pages) * PAGE_BYTES
        self.samples.extend((time.perf_counter(), float(num_bytes)))


@dataclass(frozen=True)
class MemoryTaken:
    """Bytes of all ranks together."""

    process: int | None  # in use before anything was loaded
    peak: int | None  # sum of the largest use of each rank since then


NOT_MEASURED = MemoryTaken(None, None)


class MemoryWatch:
    """Watches the memory of this rank. It must be made before anything is loaded."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        reset_peak_memory(device)
        self.before = self.most = peak_memory_bytes(device)  # bytes of this rank

    def note(self) -> None:
        """Read the peak so far. Called before each reset of the peak, and at the end."""
        self.most = max(self.most, peak_memory_bytes(self.device))

    def measured(self, group: Group) -> MemoryTaken:
        """The readings of all ranks together. Every rank of the group must call this."""
        readings = group.all_gather_object((self.before, self.most))
        return MemoryTaken(sum(f[0] for f in readings), sum(f[1] for f in readings))


def describe_memory(
    plan: MemoryPlan, free: int | None, usage: MemoryTaken = NOT_MEASURED
) -> MemoryRecord:
    """The record's `memory`: the plan of all ranks together by part, and the measured memory."""
    return MemoryRecord(
        weights_bytes=plan.weights,
        kv_bytes=plan.kv,
        draft_weights_bytes=plan.draft_weights,
        draft_kv_bytes=plan.draft_kv,
        working_bytes=plan.working,
        total_bytes=plan.total,
        free_bytes=free,
        process_bytes=usage.process,
        peak_bytes=usage.peak,
    )
