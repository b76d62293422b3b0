"""Moments: when the device had done what it was given up to some place, without waiting for it
there."""

from __future__ import annotations

import time

import torch


class Moments:
    """On CUDA events on the stream; elsewhere work is done when a call returns."""

    def __init__(self, device: torch.device) -> None:
        self._seconds: list[float] = []
        self._events: list[torch.cuda.Event] | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._events = []
            self.mark()
        self._started = time.perf_counter()

    def mark(self) -> None:
        if self._events is None:
            self._seconds.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def seconds(self) -> list[float]:
        """Of each mark, on the clock of `time.perf_counter`. Waits for the last."""
        if self._events is None:
            return self._seconds
        first, *marks = self._events
        self._events[-1].synchronize()
        return [self._started + first.elapsed_time(event) / 1e3 for event in marks]
