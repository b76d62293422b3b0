"""MemorySampler: the memory of this rank over time.

Owns the thread that reads it. Must not know what the rank does meanwhile. Imports torch only for
CUDA.
"""

from __future__ import annotations

import os
import resource
import time
from array import array
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._sample()
        self._statm.close()

    def _run(self) -> None:
        while not self._ended.wait(self.interval_s):
            self._sample()

    def _sample(self) -> None:
        self.samples.extend((time.perf_counter(), float(self._read())))

    def _read(self) -> int:
        if self.device.type == "cuda":
            import torch

            return torch.cuda.memory_allocated(self.device)
        pages = os.pread(self._statm.fileno(), MOST_CHARACTERS, 0).split()[1]
        return int(pages) * PAGE_BYTES
