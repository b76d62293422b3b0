"""Clocks, memory and bandwidth: what is read from the machine while a run goes on. Knows nothing of
models or strategies."""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from magicdec.distributed.groups import Group

BANDWIDTH_BYTES = 1 << 28  # over all ranks of a host: 8 times the last-level cache of a large CPU
GPU_BANDWIDTH_BYTES = 1 << 31  # so that a read takes many times what starting it takes


Mark = Callable[[str], AbstractContextManager[object]]


class PhaseTimer:
    """Seconds spent in each named phase. Called with a name it is a context manager: `with
    timer("draft"): ...`.

    On CUDA a phase lies between two events on the stream; nothing waits for the device until
    `seconds` is asked for. `mark` puts every phase into a range of its own, for profilers.
    """

    def __init__(
        self, device: torch.device, enabled: bool = True, mark: Mark = nullcontext
    ) -> None:
        self.device, self.enabled, self.mark = device, enabled, mark
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        with self.mark(name):
            if not self.enabled:
                yield
            elif self.device.type == "cuda":
                first, last = (torch.cuda.Event(enable_timing=True) for _ in "ab")
                first.record()
                yield
                last.record()
                self._events.append((name, first, last))
            else:
                started = time.perf_counter()
                yield
                self._seconds[name].append(time.perf_counter() - started)

    @property
    def seconds(self) -> dict[str, list[float]]:
        """By phase, in the order they were spent."""
        for name, first, last in self._events:
            last.synchronize()
            self._seconds[name].append(first.elapsed_time(last) / 1e3)
        self._events.clear()
        return self._seconds


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak_memory(device: torch.device) -> bool:
    """Start a new peak; False where the system does not let a process reset its own."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_memory_bytes(device: torch.device) -> int:
    """This rank's peak since the last reset: device memory on CUDA, resident memory on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return next(int(s.split()[1]) * 1024 for s in status.splitlines() if s.startswith("VmHWM"))


def read_bandwidth(group: Group, device: torch.device, repeats: int = 7) -> float:
    """Bytes a second that the group's ranks read together, all at once: the best of `repeats` sums
    over a buffer too large for any cache."""
    share = GPU_BANDWIDTH_BYTES if device.type == "cuda" else BANDWIDTH_BYTES // group.size
    buffer = torch.ones(share // 4, device=device)
    rates = []
    for _ in range(repeats):
        group.barrier()
        synchronize(device)
        started = time.perf_counter()
        buffer.sum()
        synchronize(device)
        rates.append(share / (time.perf_counter() - started))
    return max(sum(rank_rates) for rank_rates in zip(*group.all_gather_object(rates), strict=True))
