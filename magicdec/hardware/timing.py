"""Times, peak memory and read bandwidth of a run, and the clocks of arrivals and tokens."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from magicdec.distributed.groups import Group
from magicdec.kernels.gpu_clock import seconds_on_gpu

BANDWIDTH_BYTES = 1 << 28  # of all ranks of a host: 8 times the last-level cache of a large CPU
GPU_BANDWIDTH_BYTES = 1 << 31  # 30 times the last-level cache of a large GPU
GPU_SUMS = 20  # of the buffer in one measurement: a single one takes half a millisecond


class HostPhase:
    """A phase whose time by the host's clock goes to `seconds`."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        self.started = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds.append(time.perf_counter() - self.started)


class PhaseTimer:
    """Seconds by named phase: `with timer("draft"): ...`. On CUDA by events; nothing waits until
    `seconds` is read."""

    def __init__(self, device: torch.device, enabled: bool = True) -> None:
        self.device = device
        self.enabled = enabled
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def __call__(self, name: str) -> AbstractContextManager[object]:
        if not self.enabled:
            return nullcontext()
        if self.device.type == "cuda":
            return self._between_events(name)
        return HostPhase(self._seconds[name])

    @contextmanager
    def _between_events(self, name: str) -> Iterator[None]:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        first.record()
        yield
        last.record()
        self._events.append((name, first, last))

    @property
    def seconds(self) -> dict[str, list[float]]:
        for name, first, last in self._events:
            last.synchronize()
            self._seconds[name].append(first.elapsed_time(last) / 1e3)
        self._events.clear()
        return self._seconds


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], object], device: torch.device, times: int = 1) -> float:
    """Mean device seconds of `times` calls in a row, on CUDA by events."""
    synchronize(device)
    if device.type == "cuda":
        return seconds_on_gpu(call, times)
    started = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - started) / times


def reset_peak_memory(device: torch.device) -> bool:
    """Reset the peak; False if the system does not allow it."""
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
    status = Path("/proc/self/status").read_text()
    return next(int(s.split()[1]) * 1024 for s in status.splitlines() if s.startswith("VmHWM"))


def read_bandwidth(group: Group, device: torch.device, repeats: int = 7) -> float:
    """Bytes per second that all ranks of the group read together: the best of `repeats`."""
    return max(read_bandwidths(group, device, repeats))


def read_bandwidths(group: Group, device: torch.device, repeats: int = 7) -> list[float]:
    """Bytes per second that all ranks read together, in each of `repeats` sums over a buffer larger
    than any cache."""
    share = BANDWIDTH_BYTES // group.size
    sums = 1
    if device.type == "cuda":
        share = GPU_BANDWIDTH_BYTES
        sums = GPU_SUMS
    buffer = torch.ones(share // 4, device=device)
    rates = []
    for _ in range(repeats):
        group.barrier()
        rates.append(share / seconds_of(buffer.sum, device, sums))
    by_rank = group.all_gather_values(rates, list[float])
    return [sum(rank_rates) for rank_rates in zip(*by_rank, strict=True)]


class Clock(Protocol):
    """A clock of arrivals and tokens. Tests have a virtual one, which repeats schedules."""

    def now(self) -> float:
        """Seconds since a fixed point in time."""

    def wait_until(self, at: float) -> None:
        """Return when it is `at` or later."""

    def after_step(self) -> None:
        """Note that a step of the engine has ended."""


class RealClock:
    def now(self) -> float:
        return time.perf_counter()

    def wait_until(self, at: float) -> None:
        time.sleep(max(0.0, at - time.perf_counter()))

    def after_step(self) -> None:
        """Time passes by itself."""


@dataclass(frozen=True)
class GroupClock:
    """The clock of a group, by its first rank. All ranks must call `now` equally often."""

    clock: Clock
    group: Group
    device: torch.device

    def now(self) -> float:
        """The time of the group's first rank, on every rank."""
        now = self.clock.now()
        if self.group.size == 1:
            return now
        sent = torch.tensor([now], dtype=torch.float64, device=self.device)
        return float(self.group.broadcast(sent, 0).item())

    def wait_until(self, at: float) -> None:
        """Let the first rank wait; the others wait for its time or its plan."""
        if self.group.index == 0:
            self.clock.wait_until(at)

    def after_step(self) -> None:
        self.clock.after_step()
