"""CapturedSteps: decoding steps that are captured once and replayed (`recorder.CudaGraphs`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from magicdec.kv.cache import BatchRows, upload
from magicdec.runner.device_batch import NEWEST, DeviceBatch
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.request import Batch
from magicdec.runner.sampling.model_tokens import AcceptanceRule, Proposal
from magicdec.runner.sampling.verification import Verdicts
from magicdec.speculation.drafter import Drafter, DraftShape
from magicdec.speculation.steps.logits_recorder import JudgedStep, StepRecorder
from magicdec.speculation.steps.recorder import RecordedWork, Recorder, record
from magicdec.speculation.steps.steps import DecodeSteps, PendingVerification
from magicdec.speculation.steps.strategy import Phase

MOST_CAPTURED = 16  # sets of rows whose captured steps are kept

Works = dict[tuple[str, int, int], RecordedWork]


@dataclass(frozen=True)
class SeenLogits:
    """Buffers for the logits that captured verifications leave for a `StepRecorder`."""

    rows: tuple[int, ...]
    index: Tensor  # int64 [R]: their places in the captured batch
    logits: Tensor  # [at least R, 1 + most drafts, V]

    @classmethod
    def of(
        cls,
        runner: ModelRunner,
        rows: Sequence[int],
        batch: DeviceBatch,
        max_gamma: int,
        before: SeenLogits | None,
    ) -> SeenLogits:
        """Of `rows` as far as they are in the batch. The buffer is that of the batch before, if it
        has room: a step's logits are read before the next step."""
        numbers = batch.rows.numbers
        kept = tuple(row for row in numbers if row in rows)
        index = upload([numbers.index(row) for row in kept], runner.device)
        shape = len(rows), 1 + max_gamma, runner.model.width_out
        if before is not None and before.logits.shape == shape:
            return cls(kept, index, before.logits)
        return cls(kept, index, runner.cache.k.new_zeros(shape))

    def take(self, verification: PendingVerification) -> None:
        logits = verification.logits()
        self.logits[: len(self.rows), : logits.shape[1]].copy_(logits[self.index])

    def copy_rows(self, rows: Sequence[int], num_tokens: int) -> Tensor:
        """A copy of the logits [R, T, V] of the last verification."""
        return self.logits[[self.rows.index(row) for row in rows], :num_tokens]


@dataclass(frozen=True)
class CapturedBatch:
    """What the steps that were captured for a set of rows read and write."""

    batch: DeviceBatch
    works: Works
    proposal: Proposal
    seen: SeenLogits | None


class CapturedSteps(DecodeSteps):
    """Steps that are captured by set of rows.

    Ended rows stay in the batch until the next is admitted, and read no context. With
    `is_in_flight` their memory may be another request's, so steps are captured, and kept, for
    each set of rows."""

    can_join = False  # a step is captured for one batch

    def __init__(
        self,
        runner: ModelRunner,
        drafter: Drafter,
        phase: Phase,
        recorder: Recorder,
        is_in_flight: bool = False,
        logits_recorder: StepRecorder | None = None,
        rule: AcceptanceRule | None = None,
    ) -> None:
        super().__init__(runner, drafter, phase, is_in_flight, logits_recorder, rule)
        self.recorder = recorder
        self._captures_drafts = drafter.can_capture
        self._works: Works = {}
        self._seen: SeenLogits | None = None
        self._captured: dict[tuple[int, ...], CapturedBatch] = {}

    @torch.inference_mode()
    def admit(self, batch: Batch, draft_lengths: Sequence[int]) -> None:
        """Capture all steps now. A step runs once before, and is undone."""
        before = self._runners
        self._find_runners(draft_lengths)
        if list(map(id, before)) != list(map(id, self._runners)):
            self._captured.clear()
        self._take_captured(batch)
        for count in self._lengths:
            self._work("verify", count, 0)
            if count and self._captures_drafts:
                for pending in self.drafter.pendings(count):
                    self._work("draft", count, pending)

    def padded_gamma(self, gamma: int) -> int:
        return min(count for count in self._lengths if count >= gamma)

    def release(self, rows: Sequence[int]) -> None:
        """Free nothing unless in flight: ended rows are computed until the whole batch has
        ended."""
        if self.is_in_flight:
            super().release(rows)

    def _drafted(self, batch: Batch, gamma: int) -> Proposal:
        drafter = self.drafter
        pending = drafter.prepare(batch.requests, gamma)
        if not self._captures_drafts:
            uncaptured = DeviceBatch.of(batch, self._vocab_size, self.runner.device)
            proposal = drafter.propose(uncaptured, DraftShape(gamma, pending))
            self._batch.sampling.take_flaws(uncaptured.sampling, self._place_index)
            return proposal
        # Indexing copies: the result of a replay lasts only until the next replay, but a proposal
        # must last until the next draft.
        ids = self._work("draft", gamma, pending)()[self._place_index]
        probs = self._pending_proposal.first(gamma).probabilities
        return Proposal(ids, None if probs is None else probs[self._place_index])

    def _judged(self, batch: Batch, proposal: Proposal | None) -> Verdicts:
        self._show(batch)
        count = 0 if proposal is None else self._hand_over(proposal)
        result = self._work("verify", count, 0)()
        verdicts = self._read(result, count)
        recorder = self.logits_recorder
        if self._seen is not None and recorder is not None:
            places = recorder.wants(batch.rows)
            if places:
                logits = self._seen.copy_rows([batch.rows[place] for place in places], 1 + count)
                judged = proposal or self._pending_proposal.first(0)
                recorder.keep(JudgedStep(batch.requests, judged, verdicts, places, logits))
        if not self._captures_drafts:
            # The captured verification did not truncate the drafter's cache.
            rows = BatchRows.of(self._rows, self.runner.device)
            self.drafter.commit(rows, self.runner.cache.lengths_of(rows))
        return verdicts

    def _propose(self, count: int, pending: int) -> Tensor:
        """Draft ids [B, K] of a captured step; probabilities go to the pending proposal."""
        proposal = self.drafter.propose(self._batch, DraftShape(count, pending))
        target = self._pending_proposal.first(count).probabilities
        if target is not None:
            assert proposal.probabilities is not None, "some rows are sampled"
            target.copy_(proposal.probabilities)
        return proposal.ids

    def _work(self, kind: str, count: int, pending: int) -> RecordedWork:
        """What is captured, with room in the caches for it, which only the host can make."""
        for runner in self._runners:
            runner.caches.make_room(self._batch.rows.numbers, self._most + NEWEST)
        key = kind, count, pending
        if key not in self._works:
            batch = self._batch

            def work() -> Tensor:
                if kind == "draft":
                    return self._propose(count, pending)
                proposal = self._pending_proposal.first(count) if count else None
                verification = self._begin(proposal)
                self.runner.execute()
                if self._seen is not None:
                    self._seen.take(verification)
                return self._finish(verification, self._captures_drafts)

            caches = [runner.cache.seq_lens for runner in self._runners]
            state = [*caches, batch.newest, *batch.sampling.state]
            if self.drafter.draft_kv is not None:
                state += self.drafter.draft_kv.state
            counts = list({id(r.counts): r.counts for r in self._runners}.values())
            with self._newest_unchanged(pending - 1):
                self._works[key] = record(self.recorder, work, state, counts)
        return self._works[key]

    @contextmanager
    def _newest_unchanged(self, count: int) -> Iterator[None]:
        """Within the block drafts may compute the `count` newest tokens of their cache again, whose
        K and V are others where a policy shows them another part of the text."""
        draft_kv = self.drafter.draft_kv
        if count < 1 or draft_kv is None:
            yield
            return
        runner = draft_kv.runner
        rows = self._batch.rows.index
        back = torch.arange(-count, 0, device=runner.device)
        newest = runner.cache.seq_lens[rows].unsqueeze(1) + back
        with runner.caches.unchanged(rows, newest.clamp(min=0)):
            yield

    def _make_proposal(self) -> Proposal:
        drafts = self._batch.newest.new_zeros(len(self._batch.rows), self._most)
        probs = None
        if self.drafter.has_probabilities and self._batch.sampling.draws:
            shape = *drafts.shape, self.runner.model.config.vocab_size
            probs = drafts.new_zeros(shape, dtype=torch.float64)
        return Proposal(drafts, probs)

    def _hand_over(self, proposal: Proposal) -> int:
        """Copy a proposal to the buffers of captured steps. Returns its tokens a row."""
        count = proposal.ids.shape[1]
        target = self._pending_proposal.first(count)
        target.ids.index_copy_(0, self._place_index, proposal.ids)
        # If all rows are greedy, there are no probabilities.
        if target.probabilities is not None and proposal.probabilities is not None:
            target.probabilities.index_copy_(0, self._place_index, proposal.probabilities)
        return count

    def _take_captured(self, batch: Batch) -> None:
        """Make `batch` the captured batch. Steps captured for the same rows serve again if both
        batches are greedy."""
        rows = tuple(batch.rows)
        before = self._captured.get(rows)
        self._load(batch)
        if before is not None and (
            before.batch.sampling.is_greedy and self._batch.sampling.is_greedy
        ):
            self._batch = before.batch
            self._works = before.works
            self._pending_proposal = before.proposal
            self._seen = before.seen
            self._batch.load(batch)
            return
        self._works = {}
        self._pending_proposal = self._make_proposal()
        if self.logits_recorder is not None:
            self._seen = SeenLogits.of(
                self.runner, self.logits_recorder.rows, self._batch, self._most, self._seen
            )
        if self.is_in_flight:
            self._captured.pop(rows, None)
            while len(self._captured) >= MOST_CAPTURED:
                del self._captured[next(iter(self._captured))]
            self._captured[rows] = CapturedBatch(
                self._batch, self._works, self._pending_proposal, self._seen
            )

    def _load(self, batch: Batch) -> None:
        device = self.runner.device
        max_tail = self._most + 1
        self._set_batch(DeviceBatch.of(batch, self._vocab_size, device, max_tail), batch)

    def _show(self, batch: Batch) -> None:
        if batch.requests == self._shown:
            return
        if self.is_in_flight:
            self._take_captured(batch)
            return
        self._set_batch(self._batch, batch)
        idle_rows = [row for row in self._batch.rows.numbers if row not in self._rows]
        for runner in self._runners:
            # Ended rows are still computed, so each needs room for the tokens that a step appends,
            # and positions: the model's rotary table ends before the last block of a row does. (A
            # small cache of chosen tokens only takes drafts, one or two at a time, from positions
            # that the row had: ended rows do not advance.)
            cache = runner.cache
            most = runner.max_tokens - (self._most + 1)
            cache.truncate(idle_rows, [min(cache.lengths[row], most) for row in idle_rows])
        self._batch.load(batch)
