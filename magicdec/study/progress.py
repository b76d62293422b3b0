"""What the user sees of a study: a line for each cell that has ended, the progress of the current
one, and an estimate of the time that is left.

Owns the estimate. Must not know how a cell is measured.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from magicdec.console import Advance, Progress
from magicdec.records.record import RunRecord
from magicdec.records.table import method_of
from magicdec.study.cells import Cell
from magicdec.study.plan import StudyPlan


class Remaining:
    """Estimates the time that is left from the seconds that cells have taken for their work."""

    def __init__(self, plan: StudyPlan, time_budget_s: float | None) -> None:
        self.started, self.time_budget_s = time.monotonic(), time_budget_s
        self.work_left = sum(plan.order[number].work for number in plan.todo)
        self.work_done = self.seconds_done = 0.0

    def ran(self, cell: Cell, seconds: float) -> None:
        self.work_left -= cell.work
        self.work_done += cell.work
        self.seconds_done += seconds

    @property
    def seconds(self) -> float | None:
        """Until all is done; None before the first cell is."""
        return self._expected(self.work_left)

    def is_over(self, cell: Cell) -> bool:
        """Whether the time budget would end before the cell."""
        if self.time_budget_s is None:
            return False
        elapsed = time.monotonic() - self.started
        return elapsed + (self._expected(cell.work) or 0.0) > self.time_budget_s

    def _expected(self, work: float) -> float | None:
        return work * self.seconds_done / self.work_done if self.work_done else None


class StudyProgress:
    """The progress of the cell that runs, after its number and the time that is left."""

    def __init__(self, inner: Progress, num_runs: int) -> None:
        self.inner, self.num_runs = inner, num_runs
        self.name = self.label = ""

    def begin(self, number: int, cell: Cell, remaining: Remaining) -> None:
        self.name = f"{number + 1}/{self.num_runs} {describe(cell)}"
        self.label = f"{self.name}{shown_left(remaining)}; "

    def end(self, record: RunRecord, remaining: Remaining) -> None:
        say(f"{self.name}: {shown(record)}{shown_left(remaining)}")

    @contextmanager
    def task(self, name: str, total: int) -> Iterator[Advance]:
        with self.inner.task(self.label + name, total) as advance:
            yield advance


def describe(cell: Cell) -> str:
    config = cell.found.config.to_dict()
    w = config["workload"]
    return (
        f"{config['model']['model']}, {method_of(config)}, B {w['batch_size']}, "
        f"prefix {w['prefix_len']}"
    )


def shown(record: RunRecord) -> str:
    """What a cell came to, in a few words."""
    if record.metrics is None:
        return record.status if record.error is None else f"{record.status}: {record.error}"
    metrics, parts = record.metrics, [record.status]
    if metrics.decode_tokens_per_s is not None:
        parts.append(f"{metrics.decode_tokens_per_s:.1f} tokens/s")
    if metrics.speedup is not None:
        parts.append(f"{metrics.speedup:.2f}x")
    return ", ".join(parts)


def shown_left(remaining: Remaining) -> str:
    seconds = remaining.seconds
    if seconds is None or remaining.work_left <= 0:
        return ""
    return (
        f", about {seconds / 60:.0f} min left" if seconds >= 60 else f", about {seconds:.0f} s left"
    )


def print_order(plan: StudyPlan) -> None:
    """Every run in its order, with what keeps it from running."""
    todo = set(plan.todo)
    for number, cell in enumerate(plan.order):
        state = "" if number in todo else " (done)"
        refusal = f" (cannot run: {cell.refusal})" if cell.refusal else ""
        print(f"{number + 1}/{len(plan.order)} {describe(cell)}{state}{refusal}")


def say(line: str) -> None:
    """Tell the user of the study's progress."""
    print(line, file=sys.stderr, flush=True)
