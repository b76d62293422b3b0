"""DrawingClock: a clock that stands still while something is drawn, so that drawing is in no
measured time: neither in a step nor between an arrival and a token.

Owns when it is drawn: between two steps, and before a wait for the next arrival. Must not know
what is drawn.
"""

from __future__ import annotations

from collections.abc import Callable

from magicdec.hardware.clock import Clock

EVERY_S = 0.25


class DrawingClock:
    """The time of `clock` without the time that `draw` took. `draw` gets this time."""

    def __init__(
        self, clock: Clock, draw: Callable[[float], None], every_s: float = EVERY_S
    ) -> None:
        self.clock, self.draw, self.every_s = clock, draw, every_s
        self.drawn_s = 0.0  # the time that drawing took so far
        self._last_s = -every_s

    def now(self) -> float:
        return self.clock.now() - self.drawn_s

    def wait_until(self, at: float) -> None:
        self._draw_if_due()
        self.clock.wait_until(at + self.drawn_s)

    def after_step(self) -> None:
        self.clock.after_step()
        self._draw_if_due()

    def _draw_if_due(self) -> None:
        begun_s = self.clock.now()
        now = begun_s - self.drawn_s
        if now - self._last_s >= self.every_s:
            self.draw(now)
            self._last_s = now
            self.drawn_s += self.clock.now() - begun_s
