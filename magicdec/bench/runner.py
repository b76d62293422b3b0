"""The spine: every command that decodes makes passes here. It opens the system of a pass, gives it
requests, observes its steps, and checks its tokens; `records_of.py` makes the records.

Passes take turns at going first, so that a drift in the machine's speed favours none. All ranks
execute the same steps together; ranks that have no part in a pass wait until it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch

from magicdec.bench.check.output import PassOutput
from magicdec.bench.check.passes import Checked
from magicdec.bench.roofline import bytes_read
from magicdec.distributed.groups import Group, Launch
from magicdec.distributed.values import all_gather_values
from magicdec.hardware.environment import release_memory, watch_gpu
from magicdec.hardware.other_load import LoadWatch, OtherLoad
from magicdec.hardware.threads import RankThreads, check_threads
from magicdec.hardware.timing import (
    PhaseTimer,
    peak_memory_bytes,
    read_bandwidth,
    reset_peak_memory,
)
from magicdec.output.console import Progress
from magicdec.records.correctness import JudgedAgain
from magicdec.records.environment import Environment
from magicdec.runner.request import Request, naming
from magicdec.setup.memory_plan import MemoryPlan
from magicdec.setup.memory_sampler import NOT_MEASURED, MemoryTaken, MemoryWatch
from magicdec.setup.session import RankSession
from magicdec.systems.modes import Pass
from magicdec.systems.observer import PassObserver
from magicdec.systems.shared_prefill import KeptPrompts
from magicdec.systems.system import System, SystemDetails


@dataclass(frozen=True)
class PlannedPass:
    """A pass by its name in errors and records, and the system that serves it."""

    name: str
    serving_pass: Pass
    system: System


class OneRank(NamedTuple):
    """What a rank has counted and taken in a pass over a group, in tokens and bytes."""

    threads: RankThreads
    peak: int
    is_peak_reset: bool
    memory_before: int  # the system was loaded
    most_memory: int  # since then
    bytes_read: int
    draft_kv_tokens: int
    draft_rows: int

    @classmethod
    def of(
        cls,
        rank: int,
        system: System,
        observer: PassObserver,
        watch: MemoryWatch,
        is_peak_reset: bool,
        device: torch.device,
    ) -> OneRank:
        used = list(zip(system.runners, observer.reads, strict=False))
        return cls(
            observer.threads.rank_threads(rank, system.expected_threads),
            peak_memory_bytes(device),
            is_peak_reset,
            watch.before,
            watch.most,
            sum(bytes_read(runner.model, counts) for runner, counts in used),
            sum(counts.draft_kv_tokens_read for _, counts in used),
            sum(counts.draft_rows for _, counts in used),
        )


@dataclass(frozen=True)
class AllRanks:
    """The same of all ranks, by rank. `threads` are those measured, 0 of a rank that waits; what
    follows is of ranks that compute. Counts of drafts are the same on all that draft."""

    ranks: list[OneRank]
    threads: list[int]

    @classmethod
    def of(cls, name: str, ranks: list[OneRank]) -> AllRanks:
        """Raises AssertionError, naming the pass, if a rank has computed with other threads than
        its config says."""
        return cls(ranks, check_threads(name, [rank.threads for rank in ranks]))

    @property
    def computing(self) -> list[OneRank]:
        return [rank for rank in self.ranks if rank.threads.expected]

    @property
    def peaks(self) -> list[int]:
        return [rank.peak for rank in self.computing]

    @property
    def total_peak(self) -> int | None:
        """None if no rank computes, or the system does not let one reset its own peak."""
        is_known = all(rank.is_peak_reset for rank in self.computing)
        return sum(self.peaks) if self.computing and is_known else None

    @property
    def memory(self) -> MemoryTaken:
        """Since before the system was loaded."""
        return MemoryTaken(
            sum(rank.memory_before for rank in self.computing),
            sum(rank.most_memory for rank in self.computing),
        )

    @property
    def bytes_read(self) -> list[int]:
        return [rank.bytes_read for rank in self.computing]

    @property
    def draft_kv_tokens(self) -> int:
        return max(rank.draft_kv_tokens for rank in self.ranks)

    @property
    def draft_rows(self) -> int:
        return max(rank.draft_rows for rank in self.ranks)


@dataclass(frozen=True)
class MeasuredGroup:
    """What a pass did with one group of requests, which have ended."""

    number: int
    requests: list[Request]  # in the order of arrival
    observer: PassObserver
    details: SystemDetails  # without the recorder
    ranks: AllRanks
    load: LoadWatch
    judged: JudgedAgain | None  # its steps
    prefill: KeptPrompts | None = None  # None if requests were prefilled while they were served
    is_reused: bool = False  # an earlier run has measured it


@dataclass
class MeasuredPass:
    """A pass with what it measured, group by group in their order, and the check of each, or of all
    together. `last` has the recorder of the newest group on this rank."""

    planned: PlannedPass
    groups: list[MeasuredGroup] = field(default_factory=list)
    checks: list[Checked] = field(default_factory=list)
    last: PassOutput | None = None

    @property
    def name(self) -> str:
        return self.planned.name

    @property
    def requests(self) -> list[Request]:
        return [request for group in self.groups for request in group.requests]

    @property
    def judged(self) -> list[JudgedAgain]:
        return [group.judged for group in self.groups if group.judged is not None]

    @property
    def memory(self) -> MemoryTaken:
        """What all ranks have taken until the end of the last group that this run measured."""
        known = [group.ranks.memory for group in self.groups if not group.is_reused]
        return max(known, key=lambda memory: memory.peak or 0, default=NOT_MEASURED)

    @property
    def plan(self) -> MemoryPlan:
        """The planned memory of all ranks."""
        system = self.planned.system
        return system.plan(self.planned.serving_pass, range(system.launch.world_size))


class RequestGroups(Protocol):
    """The requests of a command, in groups that all passes serve. `is_counted`: steps say what was
    drafted and read, and their times do not matter."""

    is_counted: bool

    @property
    def count(self) -> int: ...

    def name(self, number: int) -> str:
        """The group's name in errors; empty if there is one."""

    def num_tokens(self) -> int:
        """The output tokens of a group, unless requests end early."""

    def num_warm_ups(self, measured: MeasuredPass) -> int | None:
        """How often a pass is warmed up before it is measured now; None if it is warm."""

    def prefill(self, planned: PlannedPass, number: int) -> None:
        """Prefills the prompts of a group, if they are kept and no cache has them."""

    def requests(self, planned: PlannedPass, number: int, is_measured: bool) -> list[Request]:
        """The requests of a group for a pass, the first of which arrives now."""

    def known(self, planned: PlannedPass, number: int) -> MeasuredGroup | None:
        """The result of this pass in an earlier run with which it is shared."""

    def keep(self, planned: PlannedPass, measured: MeasuredGroup) -> None:
        """Lets later runs share a result."""


PassCheck = Callable[["Runner", PlannedPass, int], None]
"""Called after each pass over a group, whose system is open; checks what can be checked by then."""


def check_nothing(runner: Runner, planned: PlannedPass, number: int) -> None:
    """What was measured is checked at the end."""


class Runner:
    """One rank's part in the passes of a command. The first pass is the reference of the others.
    `memory` has watches that were begun before systems that are open were loaded."""

    def __init__(
        self,
        passes: Sequence[PlannedPass],
        groups: RequestGroups,
        session: RankSession,
        progress: Progress,
        check: PassCheck = check_nothing,
        memory: dict[System, MemoryWatch] | None = None,
        is_timed: bool = True,
    ) -> None:
        self.passes = list(passes)
        self.groups = groups
        self.session = session
        self.launch = session.launch
        self.device = session.device
        self.progress = progress
        self.check = check
        self.memory = memory or {}
        self.is_timed = is_timed
        self.measured = {planned: MeasuredPass(planned) for planned in passes}
        self.current: PlannedPass | None = None  # which is measured now
        self.system: System | None = None  # that is open, beside those that stay open
        self.gpu = watch_gpu(self.device)
        self.load = LoadWatch(self.launch.rank == 0)
        self.bandwidths: list[float] = []  # before and after; the host's, not this rank's

    def measure(self) -> None:
        self.measure_bandwidth()
        self.load.begin()
        self.measure_groups()
        self.load.end()
        self.measure_bandwidth()

    def measure_groups(self) -> None:
        for number in range(self.groups.count):
            if not self.begins_group(number):
                break
            for planned in self.order(number):
                if self.begins_pass(planned, number):
                    self.measure_pass(planned, number)
                    self.check(self, planned, number)

    def order(self, number: int) -> list[PlannedPass]:
        return self.passes[:] if number % 2 == 0 else self.passes[::-1]

    def begins_group(self, number: int) -> bool:
        """Whether there is time for a group."""
        return True

    def begins_pass(self, planned: PlannedPass, number: int) -> bool:
        """Whether there is time for a pass over a group."""
        return True

    def measure_pass(self, planned: PlannedPass, number: int) -> None:
        """Measures a pass over a group after its warm-up, unless an earlier run did. An interrupted
        one leaves nothing."""
        measured = self.measured[planned]
        known = self.groups.known(planned, number)
        if known is not None:
            measured.groups.append(replace(known, is_reused=True))
            return
        self.current = planned
        self.open(planned)
        place = self.groups.name(number)
        with naming(place) if place else nullcontext():
            self.groups.prefill(planned, number)
            self.warm_up(planned, number)
            with naming(planned.name):
                group, measured.last = self.serve_measured(planned, number)
        self.current = None
        measured.groups.append(group)
        self.groups.keep(planned, group)

    def open(self, planned: PlannedPass) -> System:
        """The system of the pass, with what the pass needs and with its number of threads. One that
        serves no longer gives its memory back before, unless it stays open."""
        system = planned.system
        if system is not self.system:
            if self.close() and self.launch.world_size > 1:
                torch.distributed.barrier()  # all ranks have given back what they do not use
            self.system = system
            torch.set_num_threads(system.run.config.parallel.threads)
            if not system.stays_open:
                self.memory[system] = MemoryWatch(self.device)
        system.open(planned.serving_pass, self.device, self.progress)
        return system

    def close(self) -> bool:
        """Closes the open system. Returns whether there was one that does not stay open."""
        system = self.system
        self.system = None
        if system is None or system.stays_open:
            return False
        system.close()
        release_memory(self.device)
        return True

    def warm_up(self, planned: PlannedPass, number: int) -> None:
        """Serves some requests unmeasured, so that what happens once is not measured."""
        rounds = self.groups.num_warm_ups(self.measured[planned])
        if rounds is None:
            return
        with self.progress.task("warm-up", rounds) as advance, naming(f"warm-up, {planned.name}"):
            for _ in range(rounds):
                self.serve(planned, number, PassObserver())
                advance()
        planned.system.end_warm_up()

    def serve_measured(self, planned: PlannedPass, number: int) -> tuple[MeasuredGroup, PassOutput]:
        """What a pass over a group gives, and the same with its recorder."""
        system = planned.system
        load = LoadWatch(self.launch.rank == 0 and not system.is_external)
        with self.progress.task(planned.name, self.groups.num_tokens()) as advance:
            observer = PassObserver(
                advance=advance,
                is_measured=True,
                is_logged=self.groups.is_counted,
                is_timed=system.are_steps_timed,
                phases=PhaseTimer(self.device, self.is_timed),
            )
            load.begin()
            requests, details, ranks = self.serve(planned, number, observer)
            load.end()
        self.gpu.read()
        output = PassOutput(planned.name, planned.serving_pass, system, requests, details.recorder)
        measured = MeasuredGroup(
            number=number,
            requests=requests,
            observer=observer,
            details=replace(details, recorder=None),
            ranks=ranks,
            load=load,
            judged=output.judge_steps(),
            prefill=system.kept,
        )
        return measured, output

    def serve(
        self, planned: PlannedPass, number: int, observer: PassObserver
    ) -> tuple[list[Request], SystemDetails, AllRanks]:
        """Serves a group of requests in a pass. Raises AssertionError as `AllRanks.of`."""
        system = planned.system
        watch = self.memory[system]
        is_reset = list[bool]()

        def reset_peak() -> None:
            watch.note()
            is_reset.append(reset_peak_memory(self.device))

        observer.note_begin = reset_peak
        observer.begin(system.runners)
        # The first of them arrives now.
        requests = self.groups.requests(planned, number, observer.is_measured)
        details = system.serve(planned.serving_pass, requests, observer)
        observer.end()
        watch.note()
        ours = OneRank.of(self.launch.rank, system, observer, watch, all(is_reset), self.device)
        ranks = all_gather_values(ours, OneRank, self.launch.world_size)
        return requests, details, AllRanks.of(planned.name, ranks)

    def measure_bandwidth(self) -> None:
        """Measures how fast all ranks read memory, for passes whose reads are counted."""
        if any(planned.system.counts_reads for planned in self.passes):
            self.bandwidths.append(read_bandwidth(world_of(self.launch), self.device))

    def describe_environment(
        self, load: OtherLoad, session: RankSession | None = None
    ) -> Environment:
        """The record's `environment`, with this other load. `session`: of the pass, if it has one
        of its own."""
        # The larger bandwidth counts, because a busy host rarely slows down both measurements.
        bandwidth = max(self.bandwidths, default=None)
        described = (session or self.session).describe_environment(bandwidth)
        return load.add_to(self.gpu.add_to(described))


def world_of(launch: Launch) -> Group:
    """All ranks."""
    handle = torch.distributed.group.WORLD if launch.world_size > 1 else None
    return Group(tuple(range(launch.world_size)), launch.rank, handle)
