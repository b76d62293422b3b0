"""What a study tells the user at its beginning and at its end, and its exit code."""

from __future__ import annotations

import sys
from pathlib import Path

from magicdec.console import make_progress
from magicdec.distributed.groups import Launch
from magicdec.distributed.watching.watch import stop_watching
from magicdec.study.cells import records_of
from magicdec.study.drift import measure_drift
from magicdec.study.plan import StudyPlan
from magicdec.study.progress import StudyProgress, describe
from magicdec.study.study import Settings
from magicdec.study.sweep import Sweep


def conclude(plan: StudyPlan, settings: Settings, launch: Launch) -> int:
    """Run what is left, report it, and return the exit code: 0 if nothing failed, 1 if something
    did, 130 on Ctrl-C."""
    is_leader, path = launch.rank == 0, Path(settings.out)
    progress = StudyProgress(make_progress(is_leader), len(plan.order))
    sweep = Sweep(plan, launch, path, progress)
    if is_leader:
        say(f"{len(plan.order)} runs, {len(plan.order) - len(plan.todo)} of them done before")
    budget, is_interrupted = settings.time_budget, False
    try:
        sweep.run(None if budget is None else 60 * budget)
    except KeyboardInterrupt:
        stop_watching()
        is_interrupted = True
    except OSError as error:
        if is_leader:
            say(f"--out {path}: {error.strerror}; the record of the last run is lost")
        return 1
    if is_leader:
        say_end(plan, sweep, path)
    if is_interrupted:
        return 130
    return 0 if all(record.passed for record in sweep.records) else 1


def say_end(plan: StudyPlan, sweep: Sweep, path: Path) -> None:
    """How much is done, and how steady the machine was."""
    num_left = len(plan.todo) - len(sweep.records)
    bad = [record for record in sweep.records if not record.passed]
    end = f"; {num_left} left, which the same command runs" if num_left else ""
    failed = f", {len(bad)} of the last {len(sweep.records)} without success" if bad else ""
    say(f"{len(plan.order) - num_left} of {len(plan.order)} runs done{failed}{end}: {path}")
    drift = measure_drift(records_of(path, plan.cells))
    if drift is not None:
        say(drift.describe())


def print_order(plan: StudyPlan) -> None:
    """Every run in its order, with what keeps it from running."""
    todo = set(plan.todo)
    for number, cell in enumerate(plan.order):
        state = "" if number in todo else " (done)"
        refusal = f" (cannot run: {cell.refusal})" if cell.refusal else ""
        print(f"{number + 1}/{len(plan.order)} {describe(cell)}{state}{refusal}")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
