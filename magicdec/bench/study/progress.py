"""The progress of a study, or of runs that are measured together, with an estimate of the time
left.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import Any

from magicdec.bench.study.cells import StudyCell
from magicdec.bench.study.plan import StudyPlan
from magicdec.bench.study.timed_runner import OutOfTime
from magicdec.distributed.groups import Launch
from magicdec.output.console import LINE_EVERY_S, Advance, Progress
from magicdec.records.describe import method_of
from magicdec.records.pass_record import PassRecord


class Estimate:
    """The time left, if the remaining parts take the mean of the earlier ones, but for the first,
    which also takes what all share: kernels, models, the prefill of texts."""

    def __init__(self, num_left: int) -> None:
        self.num_left = num_left
        self.seconds = list[float]()
        self.started = time.monotonic()

    def begin(self) -> None:
        self.started = time.monotonic()

    def end(self) -> None:
        self.num_left -= 1
        self.seconds.append(time.monotonic() - self.started)

    def __str__(self) -> str:
        if len(self.seconds) < 2 or self.num_left <= 0:
            return ""
        seconds = self.num_left * fmean(self.seconds[1:])
        unit, length = ("min", 60) if seconds >= 60 else ("s", 1)
        return f", about {seconds / length:.0f} {unit} left"


class Labelled:
    """A progress with a label before it, and text after it that a narrow terminal cuts."""

    def __init__(self, inner: Progress) -> None:
        self.inner = inner
        self.label = ""
        self.rest = ""

    @contextmanager
    def task(self, name: str, total: int) -> Iterator[Advance]:
        with self.inner.task(self.label + name + self.rest, total) as advance:
            yield advance


class StudyProgress(Labelled):
    def __init__(self, inner: Progress, plan: StudyPlan) -> None:
        super().__init__(inner)
        self.num_runs = len(plan.order)
        self.left = Estimate(len(plan.todo))
        self.name = ""

    def begin(self, number: int, cell: StudyCell) -> None:
        self.left.begin()
        count = f"{number + 1}/{self.num_runs}"
        what = describe(cell.resolved.config.to_dict())
        self.name = f"{count} {what}"
        self.label = f"{count}{self.left}; "
        self.rest = f"; {what}"

    def end(self, record: PassRecord) -> None:
        self.left.end()
        say(f"{self.name}: {shown(record)}{self.left}")


class PassProgress(Labelled):
    """The progress of a pass, with its number, the time left, and the time until which passes may
    begin, if any: the pace of a `TimedRunner`. Without a terminal, it prints a line now and
    then. A rank that is alone ends the pass when the time is over."""

    def __init__(
        self,
        inner: Progress,
        launch: Launch,
        deadline_s: float | None = None,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(inner)
        self.is_talking = launch.rank == 0
        self.is_alone = launch.world_size == 1
        self.is_interrupted = is_interrupted
        self.deadline_s = self.until_s = deadline_s
        self.num_passes = 0
        self.num_groups = 1
        self.left = Estimate(0)
        self.said_s = time.monotonic()

    def expect(self, num_passes: int, num_groups: int) -> None:
        self.num_passes = num_passes
        self.num_groups = num_groups
        self.left = Estimate(num_passes)

    def next_group(self) -> None:
        """Begins a group, with an equal share of the time left."""
        if self.deadline_s is not None:
            now = time.monotonic()
            self.until_s = now + (self.deadline_s - now) / self.num_groups
        self.num_groups -= 1

    def begin(self, name: str) -> None:
        self.left.begin()
        number = min(self.num_passes - self.left.num_left + 1, self.num_passes)
        self.label = f"{number}/{self.num_passes}{self.left}: {name}; "

    def end(self) -> None:
        self.left.end()
        now = time.monotonic()
        if self.is_talking and now - self.said_s >= LINE_EVERY_S:
            self.said_s = now
            say(f"{self.num_passes - self.left.num_left}/{self.num_passes} passes{self.left}")

    def leave_out(self, num_passes: int) -> None:
        self.num_passes -= num_passes
        self.left.num_left -= num_passes

    @contextmanager
    def task(self, name: str, total: int) -> Iterator[Advance]:
        with super().task(name, total) as advance:

            def in_time(amount: int = 1) -> None:
                advance(amount)
                if self.is_alone and not self.has_time(0.0):
                    raise OutOfTime

            yield in_time

    def has_time(self, seconds: float) -> bool:
        return self.until_s is None or time.monotonic() + seconds <= self.until_s


def describe(config: dict[str, Any]) -> str:
    w = config["workload"]
    return (
        f"{config['model']['model']}, {method_of(config)}, B {w['batch_size']}, "
        f"prefix {w['prefix_len']}"
    )


def shown(record: PassRecord) -> str:
    if record.metrics is None:
        return record.status if record.error is None else f"{record.status}: {record.error}"
    metrics = record.metrics
    parts = [record.status]
    if metrics.decode_tokens_per_s is not None:
        parts.append(f"{metrics.decode_tokens_per_s:.1f} tokens/s")
    if metrics.speedup is not None:
        parts.append(f"speedup {metrics.speedup:.2f}x")
    return ", ".join(parts)


def print_order(plan: StudyPlan) -> None:
    todo = set(plan.todo)
    for number, cell in enumerate(plan.order):
        state = "" if number in todo else " (done)"
        refusal = f" (cannot run: {cell.refusal})" if cell.refusal else ""
        what = describe(cell.resolved.config.to_dict())
        print(f"{number + 1}/{len(plan.order)} {what}{state}{refusal}")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
