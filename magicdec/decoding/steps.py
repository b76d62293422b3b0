"""Steps: the two parts of a decoding step. One drafts K tokens, the other verifies them. With K = 0
the verification is a step of plain decoding.

Owns the state that stays on the device from step to step (`DeviceBatch` and the lengths of the
caches), the order of forward, judgement and truncation, and the host's copy of the lengths. The
host reads the device once in each step. A recorder starts each part. Must not know who chooses the
number of draft tokens (`speculative`, `draft_length`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

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

ANY_NUMBER = 1 << 30  # of pending tokens: no limit
MOST_CAPTURED = 16  # sets of rows whose captured steps are kept

Works = dict[tuple[str, int, int], Work]


class Steps:
    """Before and after each call, the host knows how many tokens each row has cached.

    If steps are captured, rows that have ended stay in the batch until the next batch is admitted.
    They are still computed, but read nothing of their context. If requests join and leave a running
    batch (`is_in_flight`), the memory of such a row may be another's already. Steps are then
    captured for each set of rows, and used again when these rows run again.
    """

    def __init__(
        self,
        runner: ModelRunner,
        drafter: Drafter | None,
        phase: Phase,
        recorder: Recorder,
        is_in_flight: bool = False,
    ) -> None:
        self.runner, self.drafter = runner, drafter
        self.phase, self.recorder, self.is_in_flight = phase, recorder, is_in_flight
        self._captures_drafts = drafter is not None and drafter.can_capture
        self._runners: list[ModelRunner] = []
        self._batch: DeviceBatch
        self._works: Works = {}
        self._captured: dict[tuple[int, ...], tuple[DeviceBatch, Works, Proposal]] = {}

    @torch.inference_mode()
    def admit(self, batch: Batch, draft_lengths: Sequence[int]) -> None:
        """Prepare for steps of `batch`, all requests that run now, with any of these numbers of
        draft tokens. If steps are captured, all of them are captured now. Each runs once before
        that, and what it changed is undone."""
        draft_kv = None if self.drafter is None else self.drafter.draft_kv
        runners = [self.runner]
        if draft_kv is not None and draft_kv.runner is not self.runner:
            runners.append(draft_kv.runner)
        if any(a is not b for a, b in zip_longest(runners, self._runners)):
            self._captured.clear()
        self._runners, self._most = runners, max(draft_lengths)
        self._vocab_size = max(r.model.config.vocab_size for r in self._runners)
        if not self.recorder.captures:
            self._load(batch)
            return
        self._take_captured(batch)
        for count in draft_lengths:
            self._work("verify", count, 0)
            if count and self.drafter is not None and self._captures_drafts:
                for pending in self.drafter.pending:
                    self._work("draft", count, pending)

    def release(self, rows: Sequence[int]) -> None:
        """The requests in `rows` have left the batch. Unless others may join it, rows of a captured
        batch keep their memory, because they are computed until the whole batch has ended."""
        if self.drafter is not None and (self.is_in_flight or not self.recorder.captures):
            self.drafter.release(rows)

    @torch.inference_mode()
    def decode(self, batch: Batch) -> list[list[int]]:
        """The next token of each request, as a list for each row."""
        with self.phase("decode"):
            self._show(batch)
            verdict = self._judged(None)
        return [row[1:] for row in verdict]

    @torch.inference_mode()
    def draft(self, batch: Batch, num_draft_tokens: int) -> Proposal:
        """A proposal for the rows of `batch`, valid until the next draft."""
        assert self.drafter is not None, "only a strategy with a drafter drafts"
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
            # Indexing copies: the result of a replay lasts only until the next replay, but a
            # proposal must last until the next draft.
            ids = self._work("draft", num_draft_tokens, pending)()[self._place_index]
            drawn = self._pending_proposal.first(num_draft_tokens).probabilities
            return Proposal(ids, None if drawn is None else drawn[self._place_index])

    @torch.inference_mode()
    def verify(self, batch: Batch, proposal: Proposal) -> list[list[int]]:
        """For each row: the number n of accepted drafts, then K + 1 ids, of which the row emits
        the first n + 1."""
        with self.phase("verify"):
            self._show(batch)
            return self._judged(proposal)

    @torch.inference_mode()
    def undo(self, batch: Batch, lengths: Sequence[int]) -> None:
        """Truncate the rows of `batch` to earlier `lengths`. Their requests must have emitted
        nothing since then."""
        device = self.runner.device
        self.runner.truncate(batch.rows, lengths)
        if self.drafter is not None:
            rows = BatchRows.of(batch.rows, device)
            self.drafter.commit(rows, Lengths.of(lengths, device))
        self._batch.load(batch)

    def _judged(self, proposal: Proposal | None) -> list[list[int]]:
        """Verify, and read the result, which is the only read of a step."""
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
        """The draft of a captured step: ids [B, K]. Their probabilities are copied to the pending
        proposal, from which the captured verification reads them."""
        assert self.drafter is not None, "only a strategy with a drafter drafts"
        proposal = self.drafter.propose(self._batch, count, pending)
        kept = self._pending_proposal.first(count).probabilities
        if kept is not None:
            assert proposal.probabilities is not None, "some rows are sampled"
            kept.copy_(proposal.probabilities)
        return proposal.ids

    def _verify(self, proposal: Proposal | None) -> Tensor:
        """int64 [B, caches + 1 + K + 1]: the length of each cache, the number of accepted drafts,
        and the ids of which the row emits the first."""
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
        # The newest token and the accepted drafts stay cached. The last emitted token is not cached
        # yet.
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
        """One captured part of a step. It is captured when it is first needed."""
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
        """The tensors that hold the drafts of captured steps between draft and verification."""
        drafts = self._batch.newest.new_zeros(len(self._batch.rows), self._most)
        drafter, probs = self.drafter, None
        if drafter is not None and drafter.has_probabilities and self._batch.sampling.draws:
            shape = *drafts.shape, self.runner.model.config.vocab_size
            probs = drafts.new_zeros(shape, dtype=torch.float64)
        return Proposal(drafts, probs)

    def _hand_over(self, proposal: Proposal) -> int:
        """Copy a proposal for the rows of the current batch to the tensors that captured steps
        read. Returns the number of tokens that it has for each row."""
        count = proposal.ids.shape[1]
        kept = self._pending_proposal.first(count)
        kept.ids.index_copy_(0, self._place_index, proposal.ids)
        # If all rows are greedy, there are no probabilities.
        if kept.probabilities is not None and proposal.probabilities is not None:
            kept.probabilities.index_copy_(0, self._place_index, proposal.probabilities)
        return count

    def _take_captured(self, batch: Batch) -> None:
        """Make `batch` the captured batch. Steps that were captured for the same rows are used
        again if both batches are greedy; else the device batch has other tensors."""
        rows = tuple(batch.rows)
        batch_before = self._captured[rows][0] if rows in self._captured else None
        self._load(batch)
        if batch_before is not None and (
            batch_before.sampling.is_greedy and self._batch.sampling.is_greedy
        ):
            self._batch, self._works, self._pending_proposal = self._captured[rows]
            self._batch.load(batch)
            return
        self._works, self._pending_proposal = {}, self._make_proposal()
        if self.is_in_flight:
            self._captured.pop(rows, None)
            while len(self._captured) >= MOST_CAPTURED:
                del self._captured[next(iter(self._captured))]
            self._captured[rows] = self._batch, self._works, self._pending_proposal

    def _load(self, batch: Batch) -> None:
        """Make a new device batch of the requests of `batch`."""
        tail = self._most + 1 if self.recorder.captures else None
        self._batch = DeviceBatch.of(batch, self._vocab_size, self.runner.device, tail)
        self._shown, self._rows = batch.requests, batch.rows
        self._places = list(range(len(self._rows)))
        self._place_index = upload(self._places, self.runner.device)

    def _show(self, batch: Batch) -> None:
        """Make `batch` the current batch, if it is not yet."""
        if batch.requests == self._shown:
            return
        if not self.recorder.captures:
            self._load(batch)
            return
        if self.is_in_flight:
            self._take_captured(batch)
            return
        place_of = {row: place for place, row in enumerate(self._batch.rows.numbers)}
        self._shown, self._rows = batch.requests, batch.rows
        self._places = [place_of[row] for row in self._rows]
        self._place_index = upload(self._places, self.runner.device)
        ended = [row for row in self._batch.rows.numbers if row not in self._rows]
        for runner in self._runners:
            # Ended rows are still computed, so each needs room for the tokens that a step appends.
            cache = runner.cache
            most = cache.tokens_per_row - (self._most + 1) - 1
            cache.truncate(ended, [min(cache.lengths[row], most) for row in ended])
        self._batch.load(batch)
