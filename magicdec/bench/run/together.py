"""Several runs that differ in their drafts alone: every batch is prefilled once, decoded without
drafts, then with each draft, so that all drafts have one baseline of the same minute. A run that
ends early keeps its finished batches. All ranks execute the same steps together.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Protocol

from magicdec.bench.run.outcome import make_records
from magicdec.bench.run.resident import CacheDemand, Prefilled, Resident
from magicdec.bench.run.run import Run
from magicdec.bench.verdict.check import differences
from magicdec.hardware.other_load import LoadWatch
from magicdec.hardware.timing import read_bandwidth
from magicdec.names import BASELINE
from magicdec.output.console import Progress
from magicdec.records.pass_record import PassRecord
from magicdec.runner.request import naming
from magicdec.setup.memory_sampler import NOT_MEASURED
from magicdec.setup.prepare import Prepared
from magicdec.setup.session import RankSession, Sessions

SLOWEST = 1.5  # a pass with drafts is expected to take so many times as long as one without


class Pace(Progress, Protocol):
    """An observer of the passes that shows their progress and may end them."""

    def begin(self, name: str) -> None:
        """A pass of a run, or of `BASELINE`, begins."""

    def end(self) -> None:
        """The pass has ended."""

    def has_time(self, seconds: float) -> bool:
        """Whether an action of `seconds` may begin. The first rank's answer counts."""

    def is_interrupted(self) -> bool:
        """Whether this rank was asked to stop after the current pass."""


class Interrupted(Exception):
    """A stop of all ranks that one was asked for."""


class OutOfTime(Exception):
    """The end of the time within a pass; its progress may raise it on a rank that is alone."""


@dataclass
class Drafted:
    name: str
    run: Run
    session: RankSession
    pass_s: list[float] = field(default_factory=list)  # by batch

    @property
    def strategy(self) -> str:
        return self.run.passes[-1]


class Together:
    """The runs of `prepared`, by name, whose prompts are the same."""

    def __init__(
        self,
        prepared: dict[str, Prepared],
        sessions: Sessions,
        resident: Resident,
        pace: Pace,
    ) -> None:
        self.pace = pace
        self.is_interrupted = False
        self.error: Exception | None = None  # that has ended a pass
        self.is_broken = False  # a pass has not come to its end
        room = CacheDemand.of([each.config for each in prepared.values()])
        self.drafted: list[Drafted] = []
        for name, each in prepared.items():
            session = sessions.begin(each)
            run = Run(each, session, pace, resident, room)
            self.drafted.append(Drafted(name, run, session))
        self.lead, session = self.drafted[0].run, self.drafted[0].session
        self.group = session.groups.target
        self.device = session.device
        self.load = LoadWatch(session.launch.rank == 0)
        self.bandwidth = 0.0
        self.baseline_s = list[float]()
        self.prefill_s = 0.0
        self.left_out: list[str] = []  # the names of the runs for which there was no time

    @property
    def num_batches(self) -> int:
        """The batches that are done for at least one draft."""
        return max((self.num_done(each) for each in self.drafted), default=0)

    def num_done(self, each: Drafted) -> int:
        return min(len(self.lead.measured[BASELINE]), len(each.run.measured[each.strategy]))

    def measure(self) -> None:
        self.bandwidth = read_bandwidth(self.group, self.device)
        self.load.begin()
        try:
            for batch in range(self.lead.config.workload.num_batches):
                if batch and not self.may_begin(self.expected_s):
                    break
                self.measure_batch(batch)
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
            self.bandwidth = max(self.bandwidth, read_bandwidth(self.group, self.device))

    @property
    def expected_s(self) -> float:
        drafts_s = sum(each.pass_s[-1] for each in self.drafted)
        return self.prefill_s + self.baseline_s[-1] + drafts_s

    def measure_batch(self, batch: int) -> None:
        """Measures all passes over a batch. In the first one, drafts without time left are omitted,
        judged by the baseline, which begins."""
        self.pace.begin(BASELINE)
        prefilled = self.lead.prompts.batch(batch, self.lead.prepared)
        self.prefill_s = prefilled.seconds
        order: list[Drafted | None] = [None, *self.drafted]
        # The passes take turns at going first, as in a run.
        for each in order if batch % 2 == 0 else reversed(order):
            if each is None:
                self.baseline_s.append(self.measure_pass(None, prefilled, batch))
            elif batch or self.may_begin(self.most_s):
                each.pass_s.append(self.measure_pass(each, prefilled, batch))
            else:
                self.left_out.append(each.name)
        self.drafted = [each for each in self.drafted if each.name not in self.left_out]

    @property
    def most_s(self) -> float:
        """The expected most seconds of the first pass with a draft and its warm-up."""
        return (1 + self.lead.config.workload.warmup_batches) * SLOWEST * self.baseline_s[-1]

    def measure_pass(self, each: Drafted | None, prefilled: Prefilled, batch: int) -> float:
        """Measures a pass, in the first batch after a warm-up. Returns the seconds of the pass."""
        if any(self.group.all_gather_values(self.pace.is_interrupted(), bool)):
            raise Interrupted
        run, name = (self.lead, BASELINE) if each is None else (each.run, each.strategy)
        self.pace.begin(BASELINE if each is None else each.name)
        run.use(prefilled)
        if batch == 0:
            with naming("batch 0"):
                run.warm_up(prefilled.snapshots, [name])
        started = time.perf_counter()
        with naming(f"batch {batch}"), naming(name):
            run.measure_pass(name, prefilled.snapshots)
        seconds = time.perf_counter() - started
        if each is not None:
            run.prefilled.append(prefilled)
        self.pace.end()
        return seconds

    def may_begin(self, seconds: float) -> bool:
        """Whether the first rank has time for an action of `seconds`."""
        return self.group.all_gather_values(self.pace.has_time(seconds), bool)[0]

    def records(self) -> dict[str, list[PassRecord]]:
        """The passes of each draft, that without a draft first."""
        found = {each.name: self.passes(each) for each in self.drafted if self.num_done(each)}
        return {name: passes for name, passes in found.items() if passes}

    def passes(self, each: Drafted) -> list[PassRecord]:
        """None if tokens differ and an unfinished pass prevents judging that."""
        run = each.run
        num_batches = self.num_done(each)
        run.measured[BASELINE] = self.lead.measured[BASELINE]
        run.kept[BASELINE] = self.lead.kept[BASELINE]
        taken = NOT_MEASURED
        if not self.is_broken:
            taken = replace(run.memory.measured(self.group), process=None)
        measured = run.merged(taken, num_batches)
        if self.is_broken and differences(measured.finished[BASELINE], measured.requests):
            return []
        environment = run.gpu.add_to(each.session.describe_environment(self.bandwidth))
        return make_records(
            run.prepared.first_batches(num_batches),
            measured,
            run.check(measured, is_whole=not self.is_broken),
            self.load.add_to(environment),
        )
