"""Speculative decoding: draft tokens, verify them in one forward, keep each row's accepted ones and
one more token of the target. Without a drafter it is autoregressive decoding, the baseline.

Greedy drafts are compared with the target's tokens, others judged by rejection sampling: Leviathan
et al., arXiv 2211.17192, algorithm 1. Acceptance by row: MagicDec, arXiv 2408.11049.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from magicdec.kv.cache import upload
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.observers.draft_log import DraftLog
from magicdec.runner.request import Batch, Request, StepOutput
from magicdec.runner.sampling.model_tokens import (
    AcceptanceRule,
    EmulatedAcceptance,
    Proposal,
    join,
)
from magicdec.runner.sampling.verification import Verdicts
from magicdec.speculation.draft_length import DraftLength, FixedLength, make_draft_length
from magicdec.speculation.drafter import Drafter, DraftPlan, make_drafter
from magicdec.speculation.no_drafter import NoDrafter
from magicdec.speculation.steps.calibration import measure_steps
from magicdec.speculation.steps.captured_steps import CapturedSteps
from magicdec.speculation.steps.steps import DecodeSteps
from magicdec.speculation.steps.strategy import Setup


@dataclass(frozen=True)
class StepDraft:
    """The draft of rows that draft as many tokens: none, or `draft_width` tokens a row with
    padding, and `counts` without."""

    batch: Batch
    plan: DraftPlan
    proposal: Proposal | None
    draft_width: int
    counts: Sequence[int]


@dataclass(frozen=True)
class DraftsTogether:
    """The drafts that one forward verifies, with the time when drafting `started`. If the forward
    `is_alone`, nothing else was enqueued before."""

    drafts: Sequence[StepDraft]
    started: float
    is_alone: bool


class Speculative:
    """The strategy in which `drafter` drafts as many tokens as `draft_length` chooses."""

    def __init__(
        self,
        runner: ModelRunner,
        drafter: Drafter,
        draft_length: DraftLength,
        steps: DecodeSteps,
    ) -> None:
        self.runner = runner
        self.drafter = drafter
        self.draft_length = draft_length
        self.steps = steps
        self._running: dict[int, Request] = {}  # by row

    def admit(self, batch: Batch) -> None:
        self._running |= zip(batch.rows, batch.requests, strict=True)
        running = Batch(tuple(self._running[row] for row in sorted(self._running)))
        self.drafter.admit(batch.requests)
        self.steps.admit(running, self.draft_length.choices)
        self.draft_length.begin(running, self.measure)

    def release(self, rows: Sequence[int]) -> None:
        admitted_rows = [row for row in rows if self._running.pop(row, None) is not None]
        self.steps.release(admitted_rows)

    def step(self, batch: Batch) -> StepOutput:
        """Every row emits one token more than it accepts. Rows with different numbers of drafts
        share a forward if `DecodeSteps.can_join`; else each group is padded to its longest and
        computed apart."""
        log = self.runner.observer(DraftLog)
        if log is not None:
            log.begin()
        drafts = list[StepDraft]()
        verdicts = list[Verdicts]()
        for groups in self._groups(batch):
            together = self._draft(groups, log)
            verdicts.append(self._verify(together))
            drafts += together.drafts
        return self._accept(batch, drafts, Verdicts.joined(verdicts), log)

    def _groups(self, batch: Batch) -> list[list[tuple[Batch, int]]]:
        """The rows with each draft length, and that length; by which are verified together."""
        lengths = self.draft_length.lengths(batch)
        distinct = sorted(set(lengths))
        if len(distinct) == 1:
            return [[(batch, distinct[0])]]
        groups = [(_rows_with(batch, lengths, length), length) for length in distinct]
        return [groups] if self.steps.can_join else [[group] for group in groups]

    def _draft(self, groups: Sequence[tuple[Batch, int]], log: DraftLog | None) -> DraftsTogether:
        started = time.perf_counter()
        is_alone = not self.runner.enqueued
        drafts = [self._draft_rows(rows, count, log) for rows, count in groups]
        return DraftsTogether(drafts, started, is_alone)

    def _verify(self, together: DraftsTogether) -> Verdicts:
        """The verdicts of the rows of each draft in turn, of which the draft length learns."""
        drafts = together.drafts
        rows = drafts[0].batch
        if len(drafts) > 1:
            rows = Batch(_requests_of(drafts))
        proposal = self._join(drafts)
        verdicts = self.steps.verify(rows, proposal)
        seconds = time.perf_counter() - together.started
        is_ragged = proposal is not None and proposal.counts is not None
        step_seconds = seconds if together.is_alone and len(drafts) == 1 else None
        first = 0
        for draft in drafts:
            last = first + len(draft.counts)
            self._observe(draft, verdicts.accepted[first:last], step_seconds, is_ragged)
            first = last
        return verdicts

    def _accept(
        self,
        batch: Batch,
        drafts: Sequence[StepDraft],
        verdicts: Verdicts,
        log: DraftLog | None,
    ) -> StepOutput:
        """What each row emits: its accepted drafts, if they are kept, and a token of the target.
        `verdicts` are those of the rows of each draft in turn."""
        counts = [count for draft in drafts for count in draft.counts]
        if len(drafts) > 1:
            place_of = {request: place for place, request in enumerate(_requests_of(drafts))}
            places = [place_of[request] for request in batch.requests]
            verdicts = verdicts.at(places)
            counts = [counts[place] for place in places]
        accepted = verdicts.accepted
        kept = accepted if self.steps.keeps_drafts else [0] * len(accepted)
        emitted = [ids[: 1 + count] for ids, count in zip(verdicts.ids, kept, strict=True)]
        draft_width = max([draft.draft_width for draft in drafts])
        if draft_width == 0:
            return StepOutput(emitted, digests=None if log is None else [])
        digests = None if log is None else log.digests(batch.rows)
        acceptance = verdicts.acceptance
        if acceptance is not None:
            acceptance = [row[:count] for row, count in zip(acceptance, counts, strict=True)]
        return StepOutput(
            emitted, draft_width, accepted, counts, digests=digests, acceptance=acceptance
        )

    def _draft_rows(self, batch: Batch, count: int, log: DraftLog | None) -> StepDraft:
        can_join = self.steps.can_join
        plan = self.drafter.plan(batch.requests, count, self.draft_length, can_join)
        if not any(plan.counts):
            return StepDraft(batch, plan, None, 0, plan.counts)
        proposal = self.steps.draft(batch, self.steps.padded_gamma(max(plan.counts)))
        width = proposal.ids.shape[1]  # the draft may end before
        counts = [min(width, count) for count in plan.counts]
        if log is not None:
            log.drafted(batch.rows, proposal.ids, counts)
        return StepDraft(batch, plan, proposal, width, counts)

    def _join(self, drafts: Sequence[StepDraft]) -> Proposal | None:
        """The proposal for the rows of all `drafts`, ragged if rows can be verified so."""
        proposal = drafts[0].proposal
        counts = [draft.counts for draft in drafts]
        if len(drafts) > 1:
            return join([draft.proposal for draft in drafts], counts)
        is_ragged = len(set(counts[0])) > 1 and self.steps.can_join
        return replace(proposal, counts=counts[0]) if proposal and is_ragged else proposal

    def _observe(
        self,
        draft: StepDraft,
        accepted: Sequence[int],
        seconds: float | None,
        is_ragged: bool,
    ) -> None:
        judged = draft.plan.judged
        verified = draft.draft_width
        if is_ragged:
            verified = round(sum(draft.counts) / len(draft.counts)) or 1
            if any(judged) and judged != draft.plan.counts:  # some are those of a model
                seconds = None
        self.draft_length.observe(
            draft.batch,
            draft.draft_width,
            accepted if draft.draft_width else (),
            seconds,
            judged,
            verified,
        )

    def measure(self, batch: Batch) -> list[float]:
        """Seconds of a step of `batch` with 0, 1, 2, ... draft tokens. Changes nothing."""
        cached = [self.runner.cache.lengths[row] for row in batch.rows]
        return measure_steps(self.steps, batch, cached, self.draft_length.max_gamma)


def _rows_with(batch: Batch, counts: Sequence[int], count: int) -> Batch:
    pairs = zip(batch.requests, counts, strict=True)
    return Batch(tuple([request for request, own_count in pairs if own_count == count]))


def _requests_of(drafts: Sequence[StepDraft]) -> tuple[Request, ...]:
    """Those of each draft in turn."""
    return tuple([request for draft in drafts for request in draft.batch.requests])


def speculative(setup: Setup) -> Speculative:
    assert setup.decoding.drafter is not None, "a speculative run names its drafter"
    runner = setup.runner
    drafter = make_drafter(setup.decoding.drafter, setup)
    # Captured steps are captured for sets of rows, and groups would be many sets.
    per_row = setup.is_in_flight and not setup.recorder.captures
    length = setup.draft_length or make_draft_length(
        setup.decoding, runner.group, runner.device, per_row=per_row
    )
    rule = setup.rule
    if setup.decoding.emulated_rates is not None:
        rates = upload(setup.decoding.emulated_rates, runner.device, torch.float64)
        rule = EmulatedAcceptance(rates)
    return Speculative(runner, drafter, length, make_steps(setup, drafter, rule))


def autoregressive(setup: Setup) -> Speculative:
    drafter = NoDrafter()
    return Speculative(setup.runner, drafter, FixedLength(0), make_steps(setup, drafter))


def make_steps(setup: Setup, drafter: Drafter, rule: AcceptanceRule | None = None) -> DecodeSteps:
    if setup.recorder.captures:
        return CapturedSteps(
            setup.runner,
            drafter,
            setup.phase,
            setup.recorder,
            is_in_flight=setup.is_in_flight,
            logits_recorder=setup.logits_recorder,
            rule=rule,
        )
    return DecodeSteps(
        setup.runner,
        drafter,
        setup.phase,
        is_in_flight=setup.is_in_flight,
        logits_recorder=setup.logits_recorder,
        rule=rule,
    )
