"""The settings of pipelined speculation, the formulas that belong to them (Butler et al. 2024,
PipeInfer, and its code), and the counts of what a scheduler has done so far. Must not know trees or
runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MODES = ("iterative", "sync", "async")
RECOVERIES = ("acceptance", "attempt")
NUM_CANDIDATES = 8  # of which a draft step can choose at one place


@dataclass(frozen=True)
class Options:
    """How to speculate. The names are those of the original's flags, but `gamma` is its `draft`."""

    mode: str = "async"
    pa: float = 0.5  # a branch stops when its best candidate is less probable
    ps: float = 0.1  # another candidate opens a branch when it is more probable
    pr: float = 0.0  # both rise by this for each microbatch since the last commit
    pd: float = 0.0  # both fall by this for each attempt that drafted nothing
    gamma: int = 4  # most draft tokens in the depth of a microbatch, and about its most rows
    np: int = 1  # most branches of a microbatch
    recovery: str = "acceptance"  # when `pr` starts anew: README of the original; its code: attempt
    relaunch: bool = False  # start anew from the newest token after each commit, as the original
    max_in_flight: int | None = None  # runs of a request; None: no limit
    lanes: int = 1  # requests at the same time

    def __post_init__(self) -> None:
        for name, choices in (("mode", MODES), ("recovery", RECOVERIES)):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"--{name} {getattr(self, name)} is not known; choose from {', '.join(choices)}"
                )
        for name in ("pa", "ps", "pr", "pd"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"--{name} {getattr(self, name):g} is not between 0 and 1")
        for name in ("gamma", "np", "max_in_flight", "lanes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} {value} is too small; it must be at least 1")
        if self.np > NUM_CANDIDATES:
            raise ValueError(f"--np {self.np} is too large; it must be at most {NUM_CANDIDATES}")

    @property
    def spare_cells(self) -> int:
        """Cells of a lane beside those of its positions: for branches, of which at most `np` - 1
        have another cell than that of their position, and for tokens that were launched twice."""
        return 4 * self.gamma * (self.np - 1 + 2 * self.relaunch)


@dataclass
class Adjustment:
    """What `--pr` and `--pd` add to both thresholds: `it * pr - max(rejects * pd, 0)`."""

    options: Options
    num_launched: int = 0  # microbatches since the burst began: `it`
    rejects: int = 0  # attempts that drafted nothing since the last commit

    @property
    def value(self) -> float:
        return self.num_launched * self.options.pr - max(self.rejects * self.options.pd, 0.0)

    @property
    def may_draft(self) -> bool:
        return self.options.pa + self.value < 1.0

    def committed(self) -> None:
        self.num_launched = self.rejects = 0

    def failed(self) -> None:
        """An attempt drafted nothing."""
        self.rejects += 1
        if self.options.recovery == "attempt":
            self.num_launched = 0

    def exhausted(self) -> None:
        """The acceptance threshold reached 1. The original's code then begins a burst anew."""
        if self.options.recovery == "attempt":
            self.num_launched = 0


@dataclass
class Counts:
    """What was scheduled so far."""

    runs: int = 0
    speculative_runs: int = 0
    invalid_runs: int = 0  # cancelled: no row of them could be right any more
    superfluous_runs: int = 0  # cancelled: all that they tell was known
    drafted: int = 0  # tokens of speculative runs
    accepted: int = 0  # committed tokens that had been launched before as drafts
    failed_attempts: int = 0  # to draft; the first candidate was less probable than the threshold
    # By how much the largest logit exceeded the second, at the committed token with the least.
    least_margin: float = math.inf
