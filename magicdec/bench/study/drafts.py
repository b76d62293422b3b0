"""Measures several drafts of one model beside each other, within a given time, if any: groups runs
that share prompts and baseline, and cuts workloads down. All ranks execute this together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from magicdec.bench.measure import execute_in
from magicdec.bench.study.cells import StudyCell
from magicdec.bench.study.plan import grouped
from magicdec.bench.study.progress import PassProgress
from magicdec.bench.study.timed_runner import SLOWEST, TimedRunner
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import DecodingSection, WorkloadSection
from magicdec.distributed.groups import Launch
from magicdec.names import BASELINE
from magicdec.records.pass_record import PassRecord
from magicdec.setup.memory_check import needed
from magicdec.setup.prepare import Prepared, SetupCache, check_agreement, complete, find
from magicdec.setup.session import Sessions
from magicdec.systems.shared_prefill import SharedPrefill

TRIAL_PREFIX = 128
TRIAL_OUTPUT = 9
SHARE = 0.8  # of the time that is left, for what is expected
# What lengths and batches are cut down to, never to less than these.
LEAST_PREFIX = 256
LEAST_OUTPUT = 16
LEAST_BATCHES = 3


@dataclass
class Found:
    """The passes of the drafts by name, that without a draft first, and in words what is missing.
    `error` ended a pass."""

    passes: dict[str, list[PassRecord]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    is_interrupted: bool = False
    is_broken: bool = False  # a pass has not come to its end
    error: Exception | None = None

    @property
    def records(self) -> dict[str, PassRecord]:
        """Those of the drafts by name."""
        return {name: passes[-1] for name, passes in self.passes.items()}


@dataclass(frozen=True)
class BaselineTimes:
    """Seconds of a prompt token in prefill and of a step without drafts."""

    prefill_s: float
    step_s: float

    def seconds(self, w: WorkloadSection, num_candidates: int) -> float:
        passes_s = (1 + SLOWEST * num_candidates) * w.num_new_tokens * self.step_s
        batch_s = w.batch_size * w.prefix_len * self.prefill_s + passes_s
        return w.most_batches * batch_s + w.warmup_batches * passes_s


class DraftTrials:
    """One rank's part. `pace` shows the progress and has the time."""

    def __init__(self, launch: Launch, pace: PassProgress) -> None:
        self.launch = launch
        self.pace = pace
        self.cache = SetupCache()
        self.sessions = Sessions()
        self.shared: SharedPrefill | None = None

    def trial(self, config: RunConfig) -> BaselineTimes:
        """The rates of a short run without drafts, on the first rank."""
        w = replace(
            config.workload,
            prefix_len=TRIAL_PREFIX,
            gen_len=TRIAL_OUTPUT,
            num_batches=1,
            warmup_batches=1,
        )
        alone = replace(config, decoding=DecodingSection(BASELINE), draft=None, workload=w)
        run = find(alone, self.launch, self.cache)
        check_agreement(run)
        prepared = complete(run, self.cache)
        session = self.sessions.begin(prepared)
        shared = self._shared(prepared)
        record = execute_in(session, prepared, self.pace, shared).record
        (group,) = record.groups
        assert group.prefill_ms is not None, "a run prefills its prompts alone"
        num_tokens = sum(request.prompt_len for request in record.requests)
        rates = BaselineTimes(
            group.prefill_ms / 1e3 / num_tokens,
            median(group.step_ms or [0.0]) / 1e3,
        )
        return session.groups.target.all_gather_values(rates, BaselineTimes)[0]

    def measure(self, configs: Mapping[str, RunConfig]) -> Found:
        """Measures the drafts, by their names. Raises ValueError if none can run."""
        found = Found()
        prepared = self._prepare(configs, found)
        groups = self._groups(prepared)
        self.pace.expect(
            sum((1 + len(group)) * group_batches(group) for group in groups), len(groups)
        )
        for group in groups:
            if found.is_interrupted or found.error:
                break
            self.pace.next_group()
            shared = self._shared(next(iter(group.values())))
            runner = TimedRunner(group, self.sessions, shared, self.pace)
            runner.measure()
            found.passes |= runner.records()
            found.is_interrupted |= runner.is_interrupted
            found.is_broken |= runner.is_broken
            found.error = runner.error
            asked = group_batches(group)
            found.left_out += [
                f"{name}: batches after the first, in which it was far behind the fastest"
                for name in runner.ended
            ]
            if 0 < runner.num_batches < asked:
                found.left_out.append(f"{asked - runner.num_batches} of {asked} batches")
        found.left_out += [name for name in prepared if name not in found.passes]
        return found

    def _shared(self, prepared: Prepared) -> SharedPrefill:
        session = self.sessions.begin(prepared)
        self.shared = self.shared or SharedPrefill(session.device, self.pace)
        return self.shared

    def _prepare(self, configs: Mapping[str, RunConfig], found: Found) -> dict[str, Prepared]:
        prepared = dict[str, Prepared]()
        refusals = list[str]()
        for name, config in configs.items():
            run = find(config, self.launch, self.cache)
            check_agreement(run)
            try:
                prepared[name] = complete(run, self.cache)
            except ValueError as error:
                refusals.append(str(error))
                found.left_out.append(f"{name}: {error}")
        if not prepared:
            raise ValueError(refusals[0])
        return prepared

    def _groups(self, prepared: Mapping[str, Prepared]) -> list[dict[str, Prepared]]:
        """Runs to measure together: with the same state after prefill, and the same draft where
        memory is short."""
        cells = [StudyCell(run, name, run) for name, run in prepared.items()]
        groups = grouped(cells, lambda cell: (cell.model_key, cell.prompts_key))
        parts = [
            part
            for group in groups
            for part in ([group] if has_room(group) else grouped(group, draft_of))
        ]
        return [{c.name: c.prepared for c in part if c.prepared} for part in parts]


def group_batches(group: Mapping[str, Prepared]) -> int:
    return next(iter(group.values())).config.workload.num_batches


def draft_of(cell: StudyCell) -> object:
    """A key that runs share if their drafts need the same weights."""
    config = cell.resolved.config
    return config.low_bit, None if config.draft is None else config.draft.model


def has_room(cells: Sequence[StudyCell]) -> bool:
    """Whether all drafts of these runs fit into memory beside one target."""
    assert cells[0].prepared is not None
    free = cells[0].prepared.free
    if free is None:
        return True
    plans = {
        repr(draft_of(cell)): needed(
            cell.resolved.config, cell.resolved.models, cell.resolved.launch
        )
        for cell in cells
    }
    most = max(plan.total - plan.draft_weights for plan in plans.values())
    return most + sum(plan.draft_weights for plan in plans.values()) <= free


def fitting(
    asked: WorkloadSection,
    fixed: frozenset[str],
    rates: BaselineTimes,
    num_candidates: int,
    seconds: float,
) -> WorkloadSection:
    """The largest workload, up to the one asked for, that is expected to end in time, or the
    smallest. Settings in `fixed` stay."""
    smallest = asked
    for smallest in smaller(asked, fixed):
        if rates.seconds(smallest, num_candidates) <= SHARE * seconds:
            break
    return smallest


def smaller(asked: WorkloadSection, fixed: frozenset[str]) -> Iterator[WorkloadSection]:
    """Ever smaller workloads: first outputs, then batches, then contexts, which matter most."""

    def halves(name: str, value: int, least: int) -> list[int]:
        values = [value]
        while name not in fixed and values[-1] > least:
            values.append(max(least, values[-1] // 2))
        return values

    for prefix_len in halves("prefix_len", asked.prefix_len, LEAST_PREFIX):
        for num_batches in halves("num_batches", asked.most_batches, LEAST_BATCHES):
            for gen_len in halves("gen_len", asked.num_new_tokens, LEAST_OUTPUT):
                yield replace(
                    asked, prefix_len=prefix_len, num_batches=num_batches, gen_len=gen_len
                )
