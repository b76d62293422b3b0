"""TimedRunner: passes that differ in their drafts alone, of one baseline, within a given time:
every batch is prefilled once, decoded without drafts, then with each draft. After the first batch
only those go on that may be the fastest. One that ends early keeps its finished batches. All ranks
execute the same steps together.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Protocol

from magicdec.bench.check.check import differences
from magicdec.bench.check.output import PassOutput
from magicdec.bench.groups import PromptBatches
from magicdec.bench.measure import check_run, passes_of
from magicdec.bench.recording import parts_of
from magicdec.bench.records_of import records_of_run
from magicdec.bench.runner import MeasuredGroup, MeasuredPass, PlannedPass, Runner
from magicdec.names import BASELINE
from magicdec.output.console import Progress
from magicdec.records.computing import steady_ms
from magicdec.records.pass_record import PassRecord
from magicdec.setup.memory_sampler import NOT_MEASURED, MemoryWatch
from magicdec.setup.prepare import Prepared
from magicdec.setup.session import RankSession, Sessions
from magicdec.systems.prefilled_batching import PrefilledBatching
from magicdec.systems.shared_prefill import CacheDemand, SharedPrefill
from magicdec.systems.system import System

SLOWEST = 1.5  # a pass with drafts is expected to take so many times as long as one without
# A draft that took more than so many times as long as the fastest one for the first batch ends
# there, if batches with an interval follow.
FAR_BEHIND = 1.4
FEWEST_BATCHES = 3


class Pace(Progress, Protocol):
    """An observer of the passes that shows their progress and may end them."""

    def begin(self, name: str) -> None:
        """A pass of a run, or of `BASELINE`, begins."""

    def end(self) -> None:
        """The pass has ended."""

    def leave_out(self, num_passes: int) -> None:
        """So many of the expected passes will not begin."""

    def has_time(self, seconds: float) -> bool:
        """Whether an action of `seconds` may begin. The first rank's answer counts."""

    def is_interrupted(self) -> bool:
        """Whether this rank was asked to stop after the current pass."""


class Interrupted(Exception):
    """A stop of all ranks that one was asked for."""


class OutOfTime(Exception):
    """The end of the time within a pass; its progress may raise it on a rank that is alone."""


class TimedRunner(Runner):
    """The passes of several runs, `prepared` by name, whose prompts are the same. They share the
    baseline of the first."""

    def __init__(
        self,
        prepared: dict[str, Prepared],
        sessions: Sessions,
        shared: SharedPrefill,
        pace: Pace,
    ) -> None:
        self.pace = pace
        self.is_interrupted = False
        self.error: Exception | None = None  # that has ended a pass
        self.is_broken = False  # a pass has not come to its end
        room = CacheDemand.of([prepared_run.config for prepared_run in prepared.values()])
        self.sessions: dict[System, RankSession] = {}
        memory: dict[System, MemoryWatch] = {}
        passes = list[PlannedPass]()
        self.names: dict[PlannedPass, str] = {}
        for name, run in prepared.items():
            session = sessions.begin(run)
            watch = MemoryWatch(session.device)
            system = PrefilledBatching(run, session.groups, session.device, shared, room)
            self.sessions[system] = session
            memory[system] = watch
            baseline, drafting = passes_of(system)
            if not passes:
                passes.append(baseline)
                self.names[baseline] = BASELINE
            passes.append(drafting)
            self.names[drafting] = name
        lead = passes[0].system
        session = self.sessions[lead]
        groups = PromptBatches(lead.run)
        is_timed = session.device.type == "cpu" or lead.run.config.output.benchmark
        super().__init__(passes, groups, session, pace, memory=memory, is_timed=is_timed)
        self.group = session.groups.target
        self.baseline = passes[0]
        self.seconds: dict[PlannedPass, list[float]] = {
            planned: [] for planned in passes
        }  # by batch
        self.prefill_s = 0.0
        self.left_out: list[str] = []  # the names of the runs for which there was no time
        self.ended: dict[str, list[PassRecord]] = {}  # the passes of those that did not go on

    @property
    def drafting(self) -> list[PlannedPass]:
        return self.passes[1:]

    @property
    def num_batches(self) -> int:
        """The batches that are done for at least one draft."""
        return max((self.num_done(planned) for planned in self.drafting), default=0)

    def num_done(self, planned: PlannedPass) -> int:
        pair = self.measured[self.baseline], self.measured[planned]
        return min(len(measured.groups) for measured in pair)

    def measure(self) -> None:
        self.measure_bandwidth()
        self.load.begin()
        try:
            self.measure_groups()
        except (KeyboardInterrupt, Interrupted):
            self.is_interrupted = self.is_broken = True
        except OutOfTime:
            self.is_broken = True
        except Exception as error:
            # With several ranks, whose states may differ now, nothing more can be made of it.
            if self.group.size > 1 or not self.num_batches:
                raise
            self.error = error
            self.is_broken = True
        self.load.end()
        if not self.is_broken:
            self.measure_bandwidth()

    @property
    def expected_s(self) -> float:
        return self.prefill_s + sum(self.seconds[planned][-1] for planned in self.passes)

    @property
    def most_s(self) -> float:
        """The expected most seconds of the first pass with a draft and its warm-up."""
        rounds = 1 + self.baseline.system.run.config.workload.warmup_batches
        return rounds * SLOWEST * self.seconds[self.baseline][-1]

    def begins_group(self, number: int) -> bool:
        if number == 1 and self.groups.count >= FEWEST_BATCHES:
            self.end_slow_drafts()
        if number and not self.may_begin(self.expected_s):
            return False
        self.pace.begin(BASELINE)
        self.groups.prefill(self.baseline, number)
        kept = self.baseline.system.kept
        assert kept is not None, "its prompts are kept"
        self.prefill_s = kept.seconds
        return True

    def end_slow_drafts(self) -> None:
        """Ends drafts that are far behind after the first batch, as the first rank's clock says."""
        ours = [batch_ms(self.measured[planned]) for planned in self.drafting]
        times = self.group.all_gather_values(ours, list[float])[0]
        most_ms = FAR_BEHIND * min(times, default=0.0)
        slow = [draft for draft, ms in zip(self.drafting, times, strict=True) if ms > most_ms]
        self.load.end()
        for planned in slow:
            self.ended[self.names[planned]] = self.passes_of(planned)
            self.passes.remove(planned)
        self.pace.leave_out(len(slow) * (self.groups.count - 1))

    def begins_pass(self, planned: PlannedPass, number: int) -> bool:
        """In the first batch, drafts without time left are omitted, judged by the baseline, which
        begins."""
        if planned is not self.baseline and number == 0 and not self.may_begin(self.most_s):
            self.left_out.append(self.names[planned])
            self.passes.remove(planned)
            return False
        if any(self.group.all_gather_values(self.pace.is_interrupted(), bool)):
            raise Interrupted
        self.pace.begin(self.names[planned])
        return True

    def measure_pass(self, planned: PlannedPass, number: int) -> None:
        super().measure_pass(planned, number)
        self.pace.end()

    def serve_measured(self, planned: PlannedPass, number: int) -> tuple[MeasuredGroup, PassOutput]:
        started = time.perf_counter()
        measured = super().serve_measured(planned, number)
        self.seconds[planned].append(time.perf_counter() - started)
        return measured

    def may_begin(self, seconds: float) -> bool:
        """Whether the first rank has time for an action of `seconds`."""
        return self.group.all_gather_values(self.pace.has_time(seconds), bool)[0]

    def records(self) -> dict[str, list[PassRecord]]:
        """The passes of each draft, that without a draft first."""
        found = {self.names[planned]: self.passes_of(planned) for planned in self.drafting}
        found |= self.ended
        return {name: found[name] for name in self.names.values() if found.get(name)}

    def passes_of(self, planned: PlannedPass) -> list[PassRecord]:
        """None without a batch, and if tokens differ and an unfinished pass prevents judging
        that."""
        num_batches = self.num_done(planned)
        if not num_batches:
            return []
        passes = [first_groups(self.measured[one], num_batches) for one in (self.baseline, planned)]
        taken = NOT_MEASURED
        if not self.is_broken:
            taken = replace(passes[-1].memory, process=None)
        if self.is_broken and differences(passes[0].requests, passes[-1].requests):
            return []
        return records_of_run(
            planned.system.run.first_batches(num_batches),
            passes,
            check_run(passes, self.pace, is_whole=not self.is_broken),
            self.describe_environment(self.load.found, self.sessions[planned.system]),
            taken,
        )


def batch_ms(measured: MeasuredPass) -> float:
    """The time of the first batch: of what begins a draft and of its steps, without calibration,
    which is of all batches, and without what stalls took."""
    parts = parts_of(first_groups(measured, 1))
    return steady_ms(parts)[0] + (parts.groups[0].begin_ms or 0.0)


def first_groups(measured: MeasuredPass, count: int) -> MeasuredPass:
    return replace(measured, groups=measured.groups[:count])
