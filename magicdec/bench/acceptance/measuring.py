"""Measures acceptance at every position: in forks of the model's own texts (`forks.py`) or, for
drafts that cannot fork, by the passes of a run, in which the target judges the drafts and emits its
own next token alone (`CountedAcceptance`). Of sampled drafts the probability of being accepted is
noted, which varies less than what is drawn with it.

All drafts and contexts share one prefill, which keeps states if an EAGLE head drafts; drafts of a
context that can fork share the decoded texts as well. The largest gamma stands for the smaller
ones. A draft is what a run drafts at that position if it follows from the text, and from what was
chosen at the end of the prompt. `inexact_reason` says of which drafts it does not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from magicdec.bench.acceptance.forks import (
    CONTINUATIONS,
    ForkedDrafts,
    TextDrafts,
    can_fork,
    inexact_reason,
)
from magicdec.bench.acceptance.memory import demand_of, plan_of_cells, state_layers_of
from magicdec.bench.acceptance.record import (
    AcceptanceRecord,
    cumulative_of,
    cumulative_of_counts,
    depths_by_category,
    depths_of,
    digits_of,
)
from magicdec.bench.groups import PromptBatches
from magicdec.bench.runner import MeasuredGroup, MeasuredPass, PlannedPass, Runner
from magicdec.bench.study.cells import StudyCell, config_key
from magicdec.bench.study.plan import grouped
from magicdec.bench.study.progress import PassProgress
from magicdec.config.capabilities import policy_called
from magicdec.config.resolved import ResolvedConfig
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import NGRAM
from magicdec.distributed.groups import Launch
from magicdec.hardware.environment import release_memory
from magicdec.records.describe import method_of
from magicdec.records.pass_record import hash_output
from magicdec.runner.request import Request
from magicdec.runner.sampling.model_tokens import CountedAcceptance
from magicdec.setup.memory_plan import MemoryPlan
from magicdec.setup.memory_sampler import MemoryWatch, describe_memory
from magicdec.setup.model_plan import max_following, max_tokens
from magicdec.setup.prepare import SetupCache, complete, find
from magicdec.setup.session import RankSession, Sessions
from magicdec.speculation.draft_length import DraftLength, WholeLookups
from magicdec.systems.modes import DRAFTING, Pass
from magicdec.systems.observer import PassObserver
from magicdec.systems.shared_prefill import CacheDemand, KeptPrompts, SharedPrefill
from magicdec.systems.system import System, SystemDetails

Keep = Callable[[StudyCell, AcceptanceRecord], None]


def is_chain(config: ResolvedConfig) -> bool:
    """Whether drafts of fewer tokens are the beginnings of those of `--gamma`. Where the policy
    reads what verifications attended to, these see the drafts themselves, and where a lookup and a
    model draft, the number of tokens decides which."""
    decoding = config.decoding
    if decoding.model_drafter is None:
        return True
    return not decoding.looks_up and not policy_called(config.kv.policy).needs_weights


class CountedDrafts(TextDrafts):
    """Drafts that are judged at every position of the target's own text. Lookups are judged
    whole: how many tokens of one a run drafts follows from what it has seen of others."""

    rule = CountedAcceptance()

    def _make_draft_length(self) -> DraftLength:
        decoding = self.run.config.decoding
        if decoding.drafter == NGRAM:
            return WholeLookups(decoding.max_gamma)
        return super()._make_draft_length()

    def _with_copy(self, kept: KeptPrompts) -> KeptPrompts:
        """With a runner of the rows of texts alone, so that no policy keeps anything of forks."""
        kept = super()._with_copy(kept)
        config = self.run.config
        following = max_following(config, max_tokens(config))
        runner = kept.engine.runner.with_rows(config.capacity.rows, following)
        return replace(kept, engine=kept.engine.with_runner(runner))

    def serve(
        self, serving_pass: Pass, requests: Sequence[Request], observer: PassObserver
    ) -> SystemDetails:
        # What it writes behind the prompts takes the place of what forks would read.
        self.caches.results.pop((CONTINUATIONS, 0), None)
        return super().serve(serving_pass, requests, observer)


@dataclass
class ColdBatches(PromptBatches):
    """Batches that are decoded once, since no time is compared."""

    def num_warm_ups(self, measured: MeasuredPass) -> int | None:
        return None


@dataclass(frozen=True)
class Common:
    """What all cells of a command share: models and texts, and their memory."""

    shared: SharedPrefill
    watch: MemoryWatch
    plan: MemoryPlan


class AcceptanceRunner(Runner):
    """The pass of a draft at a context."""

    def __init__(
        self,
        cell: StudyCell,
        session: RankSession,
        common: Common,
        room: CacheDemand,
        pace: PassProgress,
        keep: Keep,
    ) -> None:
        self.pace = pace
        self.keep = keep
        self.cell = cell
        self.common = common
        assert cell.prepared is not None, "only cells that can run are measured"
        kind = ForkedDrafts if can_fork(cell.prepared) else CountedDrafts
        system = kind(cell.prepared, session.groups, session.device, common.shared, room)
        planned = PlannedPass(cell.name, DRAFTING, system)
        groups = ColdBatches(system.run)
        memory: dict[System, MemoryWatch] = {system: common.watch}
        super().__init__([planned], groups, session, pace, memory=memory, is_timed=False)

    def begins_pass(self, planned: PlannedPass, number: int) -> bool:
        self.pace.begin(planned.name)
        return True

    def measure_pass(self, planned: PlannedPass, number: int) -> None:
        super().measure_pass(planned, number)
        self.keep(self.cell, self.record_of(planned, self.measured[planned].groups[-1]))
        self.measured[planned].groups.clear()  # what it held is in the record
        self.pace.end()

    def record_of(self, planned: PlannedPass, group: MeasuredGroup) -> AcceptanceRecord:
        run = planned.system.run
        config = run.config
        ids = [request.request_id for request in group.requests]
        noted = noted_by_request(group.observer, ids)
        if not any(noted):
            raise ValueError(
                "every continuation ends with its first token, so that nothing can be drafted; "
                "give --ignore_eos, or other texts"
            )
        gamma = config.decoding.max_gamma
        is_sampled = config.sampling.temperature > 0
        accepted = [[position.accepted for position in counts] for counts in noted]
        drafted = [[position.drafted for position in counts] for counts in noted]
        chances = [[position.acceptance for position in counts] for counts in noted]
        is_always = all(count == gamma for counts in drafted for count in counts)
        if is_sampled:
            cumulative = [cumulative_of(counts, gamma) for counts in chances]
        else:
            cumulative = [cumulative_of_counts(counts, gamma) for counts in accepted]
        is_forked = isinstance(planned.system, ForkedDrafts)
        has_steps = is_forked or not is_sampled
        workload = run.describe_workload()
        by_category = depths_by_category(
            workload.categories or (), cumulative, drafted, gamma, is_chain(config), has_steps
        )
        outputs = repr([request.output_ids for request in group.requests])
        return AcceptanceRecord(
            config=config.to_dict(),
            environment=group.load.add_to(self.session.describe_environment()),
            workload=workload,
            seconds=sum(step.seconds for step in group.observer.steps),
            outputs_sha256=hashlib.sha256(outputs.encode()).hexdigest(),
            text_hashes=[hash_output(request.output_ids) for request in group.requests],
            accepted=None if is_sampled else [digits_of(counts) for counts in accepted],
            acceptance_probabilities=rounded(chances) if is_sampled else None,
            drafted=None if is_always else [digits_of(counts) for counts in drafted],
            rows=depths_of(cumulative, drafted, gamma, is_chain(config), has_steps),
            rows_by_category=by_category or None,
            inexact=inexact_reason(config),
            memory=describe_memory(self.common.plan, run.free, group.ranks.memory),
            is_forked=is_forked,
        )


class NotedDraft(NamedTuple):
    """The number of tokens of a draft, and of those that were accepted; of a sampled one, the
    probabilities that the first 1, 2, ... are."""

    drafted: int
    accepted: int
    acceptance: list[float]


def noted_by_request(observer: PassObserver, ids: Sequence[int]) -> list[list[NotedDraft]]:
    """The draft at each position of each request."""
    noted: dict[int, list[NotedDraft]] = {number: [] for number in ids}
    for step in observer.steps:
        assert set(step.num_emitted) == {1}, "no draft is kept"
        for place, number in enumerate(step.request_ids):
            count = 0 if step.num_drafted is None else step.num_drafted[place]
            taken = 0 if step.num_accepted is None else step.num_accepted[place]
            acceptance = [] if step.acceptance is None else step.acceptance[place]
            noted[number].append(NotedDraft(count, min(taken, count), acceptance))
    return [*noted.values()]


def rounded(chances: Sequence[Sequence[Sequence[float]]]) -> list[list[list[float]]]:
    return [
        [[round(chance, 4) for chance in position] for position in counts] for counts in chances
    ]


def key_of(config: dict[str, Any], workload: Any) -> tuple[object, ...]:
    """A key of a cell: its config, weights and texts."""
    draft = None if workload.draft is None else workload.draft.model_sha256
    return config_key(config), workload.model_sha256, draft, workload.sha256


def cell_key(cell: StudyCell) -> tuple[object, ...]:
    assert cell.prepared is not None, "only cells that can run are measured"
    return key_of(cell.prepared.config.to_dict(), cell.prepared.describe_workload())


def record_key(record: AcceptanceRecord) -> tuple[object, ...]:
    return key_of(record.config, record.workload)


def group_key(cell: StudyCell) -> tuple[object, ...]:
    """A key of cells that may share a prefill, also those of several contexts: prompts of the
    shorter ones are the beginnings of the longer ones, if they are cut from books. With a sliding
    window, a draft's choice depends on the length of a row."""
    window = cell.resolved.source.config.narrowest_window
    prefix_len = cell.resolved.config.workload.prefix_len
    return cell.model_key, None if window is None else prefix_len


def in_order(cell: StudyCell) -> tuple[int, bool, int]:
    """The longest context first, and in a context first those that share the decoded texts, of
    which the longest drafts need most."""
    config = cell.resolved.config
    return -config.workload.prefix_len, not can_fork(cell.resolved), -config.decoding.max_gamma


def prepare_cells(configs: Sequence[RunConfig], cache: SetupCache) -> Iterator[StudyCell]:
    """The cells, all checked before anything is measured, but for their memory, which is that of
    all together (`memory.check_memory`). Raises ValueError as `prepare` of a run."""
    longest = max(config.workload.prefix_len for config in configs)
    for config in configs:
        resolved = find(config, Launch(), cache)
        prepared = complete(resolved, cache, check=lambda *given: "", cut_from=longest)
        resolved = replace(resolved, config=prepared.config)
        yield StudyCell(resolved, name_of(prepared.config), prepared)


def name_of(config: ResolvedConfig) -> str:
    return f"{method_of(config.to_dict())}, context {config.workload.prefix_len}"


def measure_cells(cells: Sequence[StudyCell], pace: PassProgress, keep: Keep) -> None:
    """Measures the cells, those of a model after one prefill of the longest prompts; `keep` gets
    each record as soon as it is made."""
    pace.expect(len(cells), 1)
    groups = groups_of(cells)
    sessions = Sessions()
    common: Common | None = None
    for group in groups:
        room = demand_of([cell.resolved for cell in group])
        for cell in group:
            assert cell.prepared is not None, "only cells that can run are measured"
            session = sessions.begin(cell.prepared)
            if common is None:
                shared = SharedPrefill(session.device, pace)
                common = Common(shared, MemoryWatch(session.device), plan_of_cells(groups))
            AcceptanceRunner(cell, session, common, room, pace, keep).measure_groups()
            release_memory(session.device)  # of its draft, before the next one takes some


def groups_of(cells: Sequence[StudyCell]) -> list[list[StudyCell]]:
    """The cells by what shares a prefill, in the order in which they are measured. EAGLE heads need
    states of the prompts: those of other layers than the first head have a prefill of their own."""
    first: dict[object, tuple[int, ...]] = {}
    for cell in cells:
        if states := state_layers_of(cell.resolved.config):
            first.setdefault(group_key(cell), states)

    def key(cell: StudyCell) -> object:
        states = state_layers_of(cell.resolved.config)
        return group_key(cell), states or first.get(group_key(cell), ())

    return [sorted(group, key=in_order) for group in grouped(cells, key)]
