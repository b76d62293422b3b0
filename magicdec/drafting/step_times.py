"""StepTimes: how long a step takes, by its numbers of rows and draft tokens.

Owns the correction of times that were measured or predicted before decoding by those of the steps.
Must not know what is chosen by them. Imports no torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median


class StepTimes:
    """Seconds of a step by its numbers of rows and draft tokens. Times from before decoding are
    corrected by those of the steps since. Steps with and without drafts are corrected by different
    factors, because a growing context slows them down differently."""

    def __init__(self, rows: int, of_all: Sequence[float], of_one: Sequence[float]) -> None:
        self.rows, self.of_all, self.of_one = rows, of_all, of_one
        self._recent: dict[bool, deque[float]] = {False: deque(maxlen=8), True: deque(maxlen=8)}
        self._drift = {False: 1.0, True: 1.0}

    def measured(self, rows: int, num_drafted: int) -> float:
        """The time before correction. Linear between one row and all rows."""
        all_rows, one = self.of_all[num_drafted], self.of_one[num_drafted]
        return one + (all_rows - one) * (rows - 1) / max(1, self.rows - 1)

    def correct(self, rows: int, num_drafted: int, seconds: float) -> None:
        self._recent[num_drafted > 0].append(seconds / self.measured(rows, num_drafted))

    def settle(self) -> None:
        """Let the recent steps correct the times."""
        self._drift = {kind: median(recent or [1.0]) for kind, recent in self._recent.items()}

    def __call__(self, rows: int, num_drafted: int) -> float:
        return self.measured(rows, num_drafted) * self._drift[num_drafted > 0]
