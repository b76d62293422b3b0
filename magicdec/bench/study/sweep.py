"""Runs the cells of a study, one record each, and reports the study's end. Every rank executes this
together.
"""

from __future__ import annotations

import datetime

from magicdec.bench.measure import execute_in
from magicdec.bench.records_of import unfinished_record
from magicdec.bench.study.cells import StudyCell
from magicdec.bench.study.plan import StudyPlan
from magicdec.bench.study.progress import StudyProgress, say
from magicdec.distributed.groups import Launch
from magicdec.distributed.ranks import INTERRUPTED
from magicdec.distributed.start import close_groups
from magicdec.distributed.watching.watch import stop_watching
from magicdec.hardware.other_load import warn_of_load
from magicdec.output.console import make_progress
from magicdec.records.pass_record import PassRecord
from magicdec.records.record import append_together
from magicdec.setup.session import RankSession, Sessions
from magicdec.systems.shared_prefill import SharedPrefill


class Sweep:
    def __init__(self, plan: StudyPlan, launch: Launch, progress: StudyProgress) -> None:
        self.plan = plan
        self.launch = launch
        self.progress = progress
        self.is_leader = launch.rank == 0
        self.sessions = Sessions()
        self.shared: SharedPrefill | None = None
        self.records: list[PassRecord] = []  # those that the study asks for

    def run(self) -> None:
        """Runs what is left. Raises KeyboardInterrupt on Ctrl-C, OSError if a record cannot be
        written."""
        for number in self.plan.todo:
            cell = self.plan.order[number]
            self.progress.begin(number, cell)
            if cell.prepared is None:
                records = [self.failed(cell, cell.refusal)]
            else:
                records = self.run_cell(cell, self.sessions.begin(cell.prepared))
            if self.is_leader:
                append_together(self.plan.results, records)
                self.progress.end(records[-1])
            self.records.append(records[-1])
        close_groups()

    def run_cell(self, cell: StudyCell, session: RankSession) -> list[PassRecord]:
        """The records of the passes of a cell, the last of which is asked for. With one rank, a
        failure is a record; with several, whose states may differ after it, the exception ends the
        study."""
        assert cell.prepared is not None
        shared = self.shared = self.shared or SharedPrefill(session.device, self.progress)
        shared.models.drop_others(cell.resolved.source, cell.resolved.draft_source)
        try:
            return execute_in(
                session, cell.prepared, self.progress, shared, self.plan.rooms[cell.key]
            ).records
        except Exception as error:
            self.shared = None
            record = self.failed(cell, f"{type(error).__name__}: {error}")
            if self.launch.world_size > 1:
                if self.is_leader:
                    append_together(self.plan.results, [record])
                raise
            return [record]

    def failed(self, cell: StudyCell, error: str) -> PassRecord:
        now = datetime.datetime.now(datetime.UTC)
        return unfinished_record(cell.resolved.config, cell.prepared, self.launch, now, error)


def conclude(plan: StudyPlan, launch: Launch) -> int:
    """Runs what is left, reports it, and returns the exit code: 0, 1 if something failed, 130 on
    Ctrl-C."""
    is_leader = launch.rank == 0
    sweep = Sweep(plan, launch, StudyProgress(make_progress(is_leader), plan))
    if is_leader:
        say(f"{len(plan.order)} runs, {len(plan.order) - len(plan.todo)} of them done before")
    is_interrupted = False
    try:
        sweep.run()
    except KeyboardInterrupt:
        stop_watching()
        is_interrupted = True
    except OSError as error:
        if is_leader:
            say(f"--out {plan.results}: {error.strerror}; the record of the last run is lost")
        return 1
    bad = [record for record in sweep.records if not record.passed]
    if is_leader:
        warn_of_load([record.environment for record in sweep.records], "runs")
        num_left = len(plan.todo) - len(sweep.records)
        end = f"; {num_left} left, which the same command runs" if num_left else ""
        failed = f", {len(bad)} of the last {len(sweep.records)} without success" if bad else ""
        done = f"{len(plan.order) - num_left} of {len(plan.order)} runs done"
        say(f"{done}{failed}{end}: {plan.results}")
    return INTERRUPTED if is_interrupted else int(bool(bad))
