"""Times on a GPU, by events on its stream."""

from __future__ import annotations

from collections.abc import Callable

import torch


def seconds_on_gpu(call: Callable[[], object], times: int = 1) -> float:
    """Mean seconds of `times` calls in a row, waiting for the host included."""
    first = torch.cuda.Event(enable_timing=True)
    last = torch.cuda.Event(enable_timing=True)
    first.record()
    for _ in range(times):
        call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3 / times
