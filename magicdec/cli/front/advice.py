"""The advice of `magicdec advise`: one sentence made from short runs and from the plan.

Owns when speculation is said to pay and how sure that is. Must not measure or predict anything.
"""

from __future__ import annotations

from dataclasses import dataclass

CLOSE = 0.15  # a plan within this share of the measurement is said to agree with it


@dataclass(frozen=True)
class Measured:
    """A short run with a draft: the flags that name it, and its net speedup over decoding without
    one. `interval` is the 95 % interval, None if the run had too few batches. `predicted` is the
    plan's net speedup at the same place, None where it has none."""

    draft: str
    speedup: float
    interval: tuple[float, float] | None = None
    predicted: float | None = None

    @property
    def is_clear(self) -> bool:
        """Whether the interval lies on one side of 1."""
        return self.interval is not None and not self.interval[0] <= 1 <= self.interval[1]

    @property
    def is_as_planned(self) -> bool:
        return self.predicted is not None and abs(self.predicted / self.speedup - 1) <= CLOSE


@dataclass(frozen=True)
class Outlook:
    """What the plan expects of longer contexts: from which one speculation pays (None: from none),
    and the speedup, budget and gamma at the longest one that was predicted."""

    pays_from: int | None
    context: int
    speedup: float
    budget: int | None
    gamma: int


def advise(measured: list[Measured], place: str, outlook: Outlook) -> str:
    """Whether speculation pays, with which draft, from which context on, and how sure that is.
    `place` says where it was measured, such as `B 4 and 2048 tokens of context`."""
    best = max(measured, key=lambda m: m.speedup)
    between = ""
    if best.interval is not None:
        between = f" (95 % interval {best.interval[0]:.2f} to {best.interval[1]:.2f})"
    if best.speedup > 1:
        said = f"Speculation pays here: at {place}, `{best.draft}` was {best.speedup:.2f} times"
        said += f" as fast as decoding without drafts{between}"
    else:
        said = f"Speculation does not pay here: at {place}, the best draft, `{best.draft}`, was"
        said += f" {best.speedup:.2f} times as fast as decoding without drafts{between}"
    return f"{said}; {_expected(outlook)}; {_how_sure(best)}."


def _expected(outlook: Outlook) -> str:
    if outlook.pays_from is None:
        return "the plan expects self-speculation to pay at no context"
    far = "" if outlook.budget is None or outlook.gamma == 0 else (
        f", and {outlook.speedup:.2f} times at {outlook.context} with `--budget {outlook.budget} "
        f"--gamma {outlook.gamma}`"
    )  # fmt: skip
    return f"the plan expects self-speculation to pay from {outlook.pays_from} tokens on{far}"


def _how_sure(best: Measured) -> str:
    if best.interval is None:
        return "unsure, because so few batches have no interval: give --num_batches 3 or more"
    if not best.is_clear:
        return "unsure, because the interval includes 1: give more --num_batches"
    if best.predicted is None:
        return "sure of this place, which says nothing of other contexts for this draft"
    if best.is_as_planned:
        return f"sure, because the plan expected {best.predicted:.2f} times here too"
    return (
        f"sure of this place but not of other contexts, because the plan expected "
        f"{best.predicted:.2f} times here"
    )
