"""What commands measure: a run's two passes over kept prompts (`execute`), and the modes of
`magicdec serve` (`measure_modes`). Both are passes of one `Runner`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from magicdec.bench.check.output import PassOutput
from magicdec.bench.check.passes import Checked, check_pass, combined
from magicdec.bench.check.replays import PrefilledMeans, ServedMeans, whole
from magicdec.bench.groups import ArrivingRequests, PromptBatches
from magicdec.bench.prepare import PreparedServing
from magicdec.bench.records_of import failed_record, record_of_mode, records_of_run
from magicdec.bench.runner import MeasuredPass, PlannedPass, Runner
from magicdec.distributed.start import close_groups, start_process_group
from magicdec.output.console import Progress, make_progress
from magicdec.records.correctness import JudgedAgain
from magicdec.records.pass_record import PassRecord
from magicdec.runner.request import NotFinite, Request
from magicdec.setup.memory_sampler import MemoryWatch
from magicdec.setup.prepare import Prepared
from magicdec.setup.session import RankSession, session_of
from magicdec.systems.prefilled_batching import PrefilledBatching
from magicdec.systems.shared_prefill import CacheDemand, SharedPrefill
from magicdec.systems.system import PassTrace

# --- Runs.


@dataclass
class Outcome:
    """The records of the passes of a run, the reference first, and finished requests of the last
    one in the order of the prompts."""

    records: list[PassRecord]
    requests: list[Request] = field(default_factory=list)

    @property
    def record(self) -> PassRecord:
        """That of the last pass, which drafts if one does."""
        return self.records[-1]


def passes_of(system: PrefilledBatching) -> list[PlannedPass]:
    """The passes of a run, the requested strategy last."""
    return [
        PlannedPass(serving_pass.full_name, serving_pass, system) for serving_pass in system.passes
    ]


def execute(prepared: Prepared) -> Outcome:
    """Executes the run on this rank. Exceptions propagate; the caller records them."""
    progress = make_progress(prepared.launch.rank == 0)
    with session_of(prepared) as session:
        return execute_in(session, prepared, progress)


def execute_in(
    session: RankSession,
    prepared: Prepared,
    progress: Progress,
    shared: SharedPrefill | None = None,
    room: CacheDemand | None = None,
) -> Outcome:
    """`execute` in an open session. `shared` and `room` as in `PrefilledBatching`."""
    was_in_use = shared is not None and not shared.is_empty
    watch = MemoryWatch(session.device)
    shared = shared or SharedPrefill(session.device, progress)
    system = PrefilledBatching(prepared, session.groups, session.device, shared, room)
    groups = PromptBatches(prepared, shared.is_counted)
    is_timed = session.device.type == "cpu" or prepared.config.output.benchmark
    runner = Runner(
        passes_of(system), groups, session, progress, memory={system: watch}, is_timed=is_timed
    )
    runner.measure()
    passes = list(runner.measured.values())
    taken = passes[-1].memory
    taken = replace(taken, process=None) if was_in_use else taken
    checked = check_run(passes, progress, is_whole=not shared.is_counted)
    environment = runner.describe_environment(runner.load.found)
    records = records_of_run(prepared, passes, checked, environment, taken)
    return Outcome(records, passes[-1].requests)


def check_run(passes: Sequence[MeasuredPass], progress: Progress, is_whole: bool) -> Checked:
    """The check of all batches together, since rounding explains so many differences of all. The
    forwards of the last batch are measured if it `is_whole` and not counted."""
    *_, measured = passes
    reference = passes[0]
    system = measured.planned.system
    assert isinstance(system, PrefilledBatching), "a run keeps its prompts"
    judged = [judgement for measured_pass in passes for judgement in measured_pass.judged]
    last: tuple[PassOutput, PassOutput] | None = None
    if is_whole and reference.last is not None and measured.last is not None:
        last = reference.last, measured.last
    batches = PromptBatches(system.run)
    keep = partial(batches.prefill, measured.planned, len(measured.groups) - 1)
    return check_pass(
        output_of(reference),
        output_of(measured),
        JudgedAgain.sum_of(judged) if system.is_watched(measured.planned.serving_pass) else None,
        PrefilledMeans(progress, last, keep),
        len(passes) > 1,
        system.launch.world_size,
    )


def output_of(measured: MeasuredPass) -> PassOutput:
    """The requests of all groups."""
    planned = measured.planned
    return PassOutput(planned.name, planned.serving_pass, planned.system, measured.requests)


# --- Serving.


@dataclass
class MeasuredPasses:
    """What a command has measured so far, on the first rank."""

    records: list[PassRecord] = field(default_factory=list)
    traces: list[list[PassTrace | None]] = field(default_factory=list)  # of each, by group


def measure_modes(
    prepared: PreparedServing, keep: Callable[[PassRecord], None], is_logged: bool = False
) -> MeasuredPasses:
    """`keep` gets each record as soon as its pass is done, so that what ends a later pass costs
    only that one; of passes that are not done it gets what they have served by then. With
    `is_logged` steps say what was drafted and read, as the gate compares it. All ranks call it;
    only the first makes records. Raises PeerLost, or the RuntimeError of a collective, if another
    rank has ended."""
    launch = prepared.launch
    session = RankSession(launch, prepared.run.config.parallel)
    session.begin()
    start_process_group(launch, session.device)
    progress = make_progress(launch.rank == 0 and not is_logged)
    passes = [
        PlannedPass(serving_pass.full_name, serving_pass, prepared.system_of(serving_pass))
        for serving_pass in prepared.options.passes
    ]
    checks = ServedChecks(prepared, keep, progress, is_logged)
    groups = ArrivingRequests(prepared, is_logged)
    is_timed = session.device.type == "cpu"  # elsewhere it costs time
    runner = Runner(passes, groups, session, progress, checks, is_timed=is_timed)
    try:
        runner.measure()
    except BaseException as error:
        if launch.rank == 0:
            checks.keep_unfinished(runner, error)
        raise
    runner.close()
    close_groups()
    return checks.measured


class ServedChecks:
    """Checks each pass as soon as it and the first one have served a group, and makes its record
    when it has served all groups."""

    def __init__(
        self,
        prepared: PreparedServing,
        keep: Callable[[PassRecord], None],
        progress: Progress,
        is_logged: bool,
    ) -> None:
        self.prepared = prepared
        self.keep = keep
        self.progress = progress
        self.is_logged = is_logged
        self.measured = MeasuredPasses()
        self.wholes: dict[str, PassOutput] = {}  # of the group, by the names of passes
        self.means: ServedMeans | None = None  # of the group

    def __call__(self, runner: Runner, planned: PlannedPass, number: int) -> None:
        output = runner.measured[planned].last
        assert output is not None, "it has just served the group"
        if len(self.prepared.systems) > 1:  # maybe on other ranks
            self.wholes[planned.name] = whole(output)
        reference = runner.measured[runner.passes[0]]
        if len(reference.groups) <= number or reference.last is None:
            return
        for measured in runner.measured.values():
            if len(measured.groups) > len(measured.checks):
                self.check(runner, number, reference.last, measured)
        if all(len(measured.groups) > number for measured in runner.measured.values()):
            self.wholes.clear()
            self.means = None

    def check(
        self, runner: Runner, number: int, reference: PassOutput, measured: MeasuredPass
    ) -> None:
        assert measured.last is not None, "it has served the group"
        self.means = means = self.means or self.means_of(runner, number)
        checked = check_pass(
            reference,
            measured.last,
            measured.groups[-1].judged,
            means,
            len(runner.passes) > 1,
            runner.launch.world_size,
        )
        measured.checks.append(checked)
        if measured.last is not reference:  # whose logits are compared with those of other passes
            self.wholes.pop(measured.name, None)
            measured.last = None
        if runner.launch.rank == 0 and len(measured.checks) == runner.groups.count:
            self.record(runner, measured)

    def record(self, runner: Runner, measured: MeasuredPass) -> None:
        """Makes the record of a pass from the groups that it has served."""
        record = record_of_mode(self.prepared, measured, combined(measured.checks), runner)
        self.measured.records.append(record)
        self.measured.traces.append([group.details.trace for group in measured.groups])
        self.keep(record)

    def keep_unfinished(self, runner: Runner, error: BaseException) -> None:
        """Makes the records of the passes that have not served all groups, where an error or the
        user ends the command: each has the groups whose tokens were checked by then, and the one
        whose logits are not finite has failed."""
        for planned, measured in runner.measured.items():
            if len(measured.checks) == runner.groups.count:
                continue  # it has its record
            del measured.groups[len(measured.checks) :]
            if isinstance(error, NotFinite) and planned is runner.current:
                self.keep(failed_record(self.prepared, measured, runner, str(error)))
            elif measured.groups:
                self.record(runner, measured)

    def means_of(self, runner: Runner, number: int) -> ServedMeans:
        """The means for a group. Forwards are compared once, in the first one."""
        planned = {plan.serving_pass: plan for plan in runner.passes}
        return ServedMeans(
            open=lambda serving_pass: runner.open(planned[serving_pass]),
            systems=self.prepared.systems,
            world_size=runner.launch.world_size,
            progress=self.progress,
            compares_forwards=number == 0 and not self.is_logged,
            wholes=self.wholes,
        )
