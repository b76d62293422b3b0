"""Steps: the work of decoding steps: a draft of K tokens, and a verification of K drafts (of none:
a decode step).

Owns the state that lives on the device from step to step (`DeviceBatch`, the lengths of the
caches), the order of forward, judgement and truncation, and the host's copy of the lengths, which
one read a step brings up to date. A recorder says how each piece of work is started. Must not know
how many tokens are drafted nor why (`speculative`, `draft_length`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from magicdec.decoding.recorder import Recorder, Work, record
from magicdec.decoding.strategy import Phase
from magicdec.device_batch import NEWEST, DeviceBatch
from magicdec.drafting.drafter import Drafter
from magicdec.kv.cache import BatchRows, Lengths, upload
from magicdec.request import Batch
from magicdec.runner import ModelRunner
from magicdec.sampling.model_tokens import Proposal, judge

ANY_NUMBER = 1 << 30


class Steps:
    """Of a batch whose cached lengths the host knows before and after each call.

    A capturing recorder keeps one batch: rows that have ended stay in it until the next batch is
    admitted. They are computed, and read nothing of their context.
    """

    def __init__(
        self, runner: ModelRunner, drafter: Drafter | None, phase: Phase, recorder: Recorder
    ) -> None:
        self.runner, self.drafter = runner, drafter
        self.phase, self.recorder = phase, recorder
        self._captures_drafts = drafter is not None and drafter.can_capture
        self._works: dict[tuple[str, int, int], Work] = {}

    @torch.inference_mode()
    def admit(self, batch: Batch, draft_lengths: Sequence[int]) -> None:
        """Prepare for steps of `batch` with so many draft tokens. Where steps are captured, all
        that may come are captured now; each runs once first, and its traces are removed."""
        draft_kv = None if self.drafter is None else self.drafter.draft_kv
        self._runners = [self.runner]
        if draft_kv is not None and draft_kv.runner is not self.runner:
            self._runners.append(draft_kv.runner)
        self._most, self._works = max(draft_lengths), {}
        self._vocab_size = max(r.model.config.vocab_size for r in self._runners)
        self._load(batch)
        if not self.recorder.captures:
            return
        self._pending_proposal = self._make_proposal()
        for count in draft_lengths:
            self._work("verify", count, 0)
            if count and self.drafter is not None and self._captures_drafts:
                for pending in self.drafter.pending:
                    self._work("draft", count, pending)

    def release(self, rows: Sequence[int]) -> None:
        """Rows of a captured batch are computed until the end: what they hold stays theirs."""
        if self.drafter is not None and not self.recorder.captures:
            self.drafter.release(rows)

    @torch.inference_mode()
    def decode(self, batch: Batch) -> list[list[int]]:
        """The next token of each request, a list a row."""
        with self.phase("decode"):
            self._show(batch)
            verdict = self._judged(None)
        return [row[1:] for row in verdict]

    @torch.inference_mode()
    def draft(self, batch: Batch, num_draft_tokens: int) -> Proposal:
        """A proposal for the rows of `batch`, valid until the next draft."""
        assert self.drafter is not None, "what drafts has a drafter"
        drafter, captures = self.drafter, self.recorder.captures
        with self.phase("draft"):
            self._show(batch)
            most = NEWEST if captures and self._captures_drafts else ANY_NUMBER
            pending = drafter.prepare(batch.requests, num_draft_tokens, most)
            if not captures:
                return drafter.propose(self._batch, num_draft_tokens, pending)
            if not self._captures_drafts:
                uncaptured = DeviceBatch.of(batch, self._vocab_size, self.runner.device)
                return drafter.propose(uncaptured, num_draft_tokens, pending)
            # Copied: a proposal lasts until the next draft, the result of a replay until any
            # replay.
            ids = self._work("draft", num_draft_tokens, pending)()[self._place_index]
            drawn = self._pending_proposal.first(num_draft_tokens).probabilities
            return Proposal(ids, None if drawn is None else drawn[self._place_index])

    @torch.inference_mode()
    def verify(self, batch: Batch, proposal: Proposal) -> list[list[int]]:
        """For each row how many of its drafts were accepted, then K + 1 ids of which the row emits
        that many + 1."""
        with self.phase("verify"):
            self._show(batch)
            return self._judged(proposal)

    @torch.inference_mode()
    def undo(self, batch: Batch, lengths: Sequence[int]) -> None:
        """Go back to cached `lengths`, at most what the rows of `batch` hold; the requests have
        emitted nothing since."""
        device = self.runner.device
        self.runner.truncate(batch.rows, lengths)
        if self.drafter is not None:
            rows = BatchRows.of(batch.rows, device)
            self.drafter.commit(rows, Lengths.of(lengths, device))
        self._batch.load(batch)

    def _judged(self, proposal: Proposal | None) -> list[list[int]]:
        """Verify, and read the verdict: the one read of a step."""
        caches = [runner.cache for runner in self._runners]
        if self.recorder.captures:
            count = 0 if proposal is None else self._hand_over(proposal)
            result = self._work("verify", count, 0)()
        else:
            result = self._verify(proposal)
        read = result.tolist()
        found = [read[place] for place in self._places]
        for i, cache in enumerate(caches):
            cache.set_host_lengths(self._rows, [row[i] for row in found])
        if self.recorder.captures and self.drafter is not None and not self._captures_drafts:
            # The captured verification did not truncate the drafter's cache.
            rows = BatchRows.of(self._rows, self.runner.device)
            self.drafter.commit(rows, self.runner.cache.lengths_of(rows))
        return [row[len(caches) :] for row in found]

    def _propose(self, count: int, pending: int) -> Tensor:
        """Captured: draft ids [B, K]; their probabilities stay where a verification finds them."""
        assert self.drafter is not None, "what drafts has a drafter"
        proposal = self.drafter.propose(self._batch, count, pending)
        kept = self._pending_proposal.first(count).probabilities
        if kept is not None:
            assert proposal.probabilities is not None, "some rows are sampled"
            kept.copy_(proposal.probabilities)
        return proposal.ids

    def _verify(self, proposal: Proposal | None) -> Tensor:
        """[B, caches + 1 + K + 1]: the lengths of all caches, how many drafts were accepted, the
        target's ids."""
        batch, runner, drafter = self._batch, self.runner, self.drafter
        rows, last = batch.rows, batch.newest[:, -1:]
        watch = watch_queries = None
        tokens = last
        if proposal is None:
            proposal = Proposal(last[:, :0])
        else:
            tokens = torch.cat([last, proposal.ids], dim=1)
            if drafter is not None:
                watch, watch_queries = drafter.watch, drafter.watch_queries
        before = runner.cache.lengths_of(rows)
        logits = runner.forward(tokens, rows, watch=watch, watch_queries=watch_queries)
        accepted, ids = judge(runner, batch.sampling, proposal, logits)
        batch.sampling.take(ids, accepted + 1, rows.active)
        # What stays cached is the newest token and the accepted drafts; the newest emitted token is
        # not cached yet.
        kept = Lengths(before.tensor + 1 + accepted, before.plus(tokens.shape[1]).bounds)
        if tokens.shape[1] > 1:
            runner.truncate(rows, kept)
        places = torch.stack([accepted, accepted + 1], dim=1)
        batch.newest.copy_(torch.cat([last, ids], dim=1).gather(1, places))
        if drafter is not None and not (self.recorder.captures and not self._captures_drafts):
            drafter.commit(rows, kept)
        lengths = [r.cache.seq_lens[rows.index].unsqueeze(1) for r in self._runners]
        return torch.cat([*lengths, accepted.unsqueeze(1), ids], dim=1)

    def _work(self, kind: str, count: int, pending: int) -> Work:
        """A captured piece of work, captured when it is first asked for."""
        key = kind, count, pending
        if key not in self._works:
            batch = self._batch

            def work() -> Tensor:
                if kind == "draft":
                    return self._propose(count, pending)
                return self._verify(self._pending_proposal.first(count) if count else None)

            caches = [runner.cache.seq_lens for runner in self._runners]
            state = [*caches, batch.newest, *batch.sampling.state]
            if self.drafter is not None and self.drafter.draft_kv is not None:
                state += self.drafter.draft_kv.state
            counts = list({id(r.counts): r.counts for r in self._runners}.values())
            self._works[key] = record(self.recorder, work, state, counts)
        return self._works[key]

    def _make_proposal(self) -> Proposal:
        """Where drafts of captured steps stand between draft and verification."""
        drafts = self._batch.newest.new_zeros(len(self._batch.rows), self._most)
        drafter, probs = self.drafter, None
        if drafter is not None and drafter.has_probabilities and self._batch.sampling.draws:
            shape = *drafts.shape, self.runner.model.config.vocab_size
            probs = drafts.new_zeros(shape, dtype=torch.float64)
        return Proposal(drafts, probs)

    def _hand_over(self, proposal: Proposal) -> int:
        """Copy a proposal for the shown rows to where captured steps read it; how many tokens."""
        count = proposal.ids.shape[1]
        kept = self._pending_proposal.first(count)
        kept.ids.index_copy_(0, self._place_index, proposal.ids)
        # Greedy rows have no probabilities, and none are kept where all rows are greedy.
        if kept.probabilities is not None and proposal.probabilities is not None:
            kept.probabilities.index_copy_(0, self._place_index, proposal.probabilities)
        return count

    def _load(self, batch: Batch) -> None:
        """A new device batch of just these requests."""
        tail = self._most + 1 if self.recorder.captures else None
        self._batch = DeviceBatch.of(batch, self._vocab_size, self.runner.device, tail)
        self._shown, self._rows = batch.requests, batch.rows
        self._places = list(range(len(self._rows)))
        self._place_index = upload(self._places, self.runner.device)

    def _show(self, batch: Batch) -> None:
        """Make `batch` the one that is computed, if it has changed."""
        if batch.requests == self._shown:
            return
        if not self.recorder.captures:
            self._load(batch)
            return
        place_of = {row: place for place, row in enumerate(self._batch.rows.numbers)}
        self._shown, self._rows = batch.requests, batch.rows
        self._places = [place_of[row] for row in self._rows]
        self._place_index = upload(self._places, self.runner.device)
        ended = [row for row in self._batch.rows.numbers if row not in self._rows]
        for runner in self._runners:
            # Ended rows are computed on, from where all that a step appends has room.
            cache = runner.cache
            most = cache.tokens_per_row - (self._most + 1) - 1
            cache.truncate(ended, [min(cache.lengths[row], most) for row in ended])
        self._batch.load(batch)
