"""Times on a device: CUDA events where there are some, and what the memory copies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def median_seconds(
    device: torch.device, call: Callable[[], Any], repeats: int = 20, calls: int = 1
) -> float:
    """Of one call, from samples of `calls` in a row; three samples before the first do not
    count. On CUDA from events on the stream, which include what the device waits for the host."""
    samples = []
    for repeat in range(repeats + 3):
        seconds = _sample(device, call, calls) / calls
        if repeat >= 3:
            samples.append(seconds)
    return statistics.median(samples)


def _sample(device: torch.device, call: Callable[[], Any], calls: int) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(calls):
            call()
        return time.perf_counter() - started
    first, last = (torch.cuda.Event(enable_timing=True) for _ in "ab")
    first.record()
    for _ in range(calls):
        call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes a second that a copy within the device's memory moves, read and written counted."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / median_seconds(device, lambda: target.copy_(source))
