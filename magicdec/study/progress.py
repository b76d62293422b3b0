"""What the user sees of a study: a line for each cell that has ended, the progress of the current
one, and an estimate of the time that is left.

Owns the estimate. Must not know how a cell is measured.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import Any

from magicdec.console import Advance, Progress
from magicdec.records.record import RunRecord
from magicdec.records.table import method_of
from magicdec.study.cells import Cell
from magicdec.study.plan import StudyPlan


class StudyProgress:
    """The progress of the cell that runs, after its number and the time that is left if the other
    cells take as long as those before them did in the mean."""

    def __init__(self, inner: Progress, plan: StudyPlan) -> None:
        self.inner, self.num_runs = inner, len(plan.order)
        self.num_left, self.seconds = len(plan.todo), list[float]()
        self.name = self.count = ""

    def begin(self, number: int, cell: Cell) -> None:
        self.started = time.monotonic()
        self.count = f"{number + 1}/{self.num_runs}"
        self.name = describe(cell.resolved.config.to_dict())

    def end(self, record: RunRecord) -> None:
        self.num_left -= 1
        self.seconds.append(time.monotonic() - self.started)
        say(f"{self.count} {self.name}: {shown(record)}{self.left}")

    @property
    def left(self) -> str:
        """The time until all is done; empty before the first cell is."""
        if not self.seconds or not self.num_left:
            return ""
        seconds = self.num_left * fmean(self.seconds)
        unit, length = ("min", 60) if seconds >= 60 else ("s", 1)
        return f", about {seconds / length:.0f} {unit} left"

    @contextmanager
    def task(self, name: str, total: int) -> Iterator[Advance]:
        # A narrow terminal cuts the end, so that what matters most comes first.
        with self.inner.task(f"{self.count}{self.left}; {name}; {self.name}", total) as advance:
            yield advance


def describe(config: dict[str, Any]) -> str:
    """What a resolved config runs, in a few words."""
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
        parts.append(f"speedup {metrics.speedup:.2f}x")
    return ", ".join(parts)


def print_order(plan: StudyPlan) -> None:
    """Every run in its order, with its name for `--only` and with what keeps it from running."""
    todo = set(plan.todo)
    for number, cell in enumerate(plan.order):
        state = "" if number in todo else " (done)"
        refusal = f" (cannot run: {cell.refusal})" if cell.refusal else ""
        what = f"{describe(cell.resolved.config.to_dict())}; {cell.names[0]}"
        print(f"{number + 1}/{len(plan.order)} {what}{state}{refusal}")


def say(line: str) -> None:
    """Tell the user of the study's progress."""
    print(line, file=sys.stderr, flush=True)
