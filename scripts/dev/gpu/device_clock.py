"""Measures times on a device, with CUDA events on a GPU, and the bandwidth of a copy."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from magicdec.hardware.timing import seconds_of


def median_seconds(
    device: torch.device, call: Callable[[], Any], repeats: int = 20, calls: int = 1
) -> float:
    """Median seconds of one call. A sample is `calls` calls in a row; three samples warm up. On
    CUDA the times come from events on the stream and include waiting for the host."""
    samples = []
    for repeat in range(repeats + 3):
        seconds = seconds_of(call, device, calls)
        if repeat >= 3:
            samples.append(seconds)
    return statistics.median(samples)


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes per second of a copy within the device's memory, counting bytes read and written."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / median_seconds(device, lambda: target.copy_(source))
