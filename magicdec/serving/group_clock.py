"""Clocks of serving: that of the first rank of a group, for decisions that all ranks take alike
(`GroupClock`), and one that stands still while something is drawn, so that drawing is in no
measured time (`DrawingClock`).

Owns how the time is sent, and when is drawn: between two steps, and before a wait for the next
arrival. Must not know what is decided or drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from magicdec.distributed.groups import Group
from magicdec.hardware.timing import Clock


@dataclass(frozen=True)
class GroupClock:
    """`clock` is that of this rank. All ranks of the group must call `now` equally often."""

    clock: Clock
    group: Group
    device: torch.device

    def now(self) -> float:
        return of_first_rank(self.clock.now(), self.group, self.device)

    def wait_until(self, at: float) -> None:
        """Only the first rank waits. The others wait for it when they need its time or its plan."""
        if self.group.index == 0:
            self.clock.wait_until(at)

    def after_step(self) -> None:
        self.clock.after_step()


def of_first_rank(value: float, group: Group, device: torch.device) -> float:
    """The `value` of the group's first rank, on every rank. All must call it."""
    if group.size == 1:
        return value
    sent = torch.tensor([value], dtype=torch.float64, device=device)
    return float(group.broadcast(sent, 0).item())


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
