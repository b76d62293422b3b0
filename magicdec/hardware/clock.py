"""Clocks: when requests arrive and tokens are emitted. A real one, and a virtual one on which a
schedule is the same in every run.

Owns the time and waiting for it. Must not know what happens at a time.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since a fixed point in time."""
        ...

    def wait_until(self, at: float) -> None:
        """Return when it is `at` or later."""
        ...

    def after_step(self) -> None:
        """A step of the engine has ended."""
        ...


class RealClock:
    """The clock of `time.perf_counter`."""

    def now(self) -> float:
        return time.perf_counter()

    def wait_until(self, at: float) -> None:
        time.sleep(max(0.0, at - time.perf_counter()))

    def after_step(self) -> None:
        """The time has passed by itself."""


class VirtualClock:
    """Begins at 0. Each step takes `step_s` seconds, and waiting takes no time."""

    def __init__(self, step_s: float = 1.0) -> None:
        self.step_s, self._now = step_s, 0.0

    def now(self) -> float:
        return self._now

    def wait_until(self, at: float) -> None:
        self._now = max(self._now, at)

    def after_step(self) -> None:
        self._now += self.step_s
