"""GroupClock: the clock of the first rank of a group, for decisions that all ranks take alike.

Owns how its time is sent. Must not know what is decided.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from magicdec.distributed.groups import Group
from magicdec.hardware.clock import Clock


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
