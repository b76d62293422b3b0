"""ReplayedSteps: every step of a batch is one of a few pieces of work, recorded once and replayed:
a decode step, a draft of so many tokens, a verification of so many. On CUDA a piece is one graph.

Owns the state that lives on the device from step to step (`DeviceBatch`, the caches' lengths) and
the host's copy of it, which one read a step brings up to date. The work itself is what an eager
step does, with `DeviceRows` in place of row numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from magicdec.decoding.device_batch import DeviceBatch
from magicdec.decoding.drafter import Drafter
from magicdec.decoding.recorded import record
from magicdec.decoding.strategy import (
    Phase,
    Proposal,
    Recorder,
    judge,
    newest_tokens,
    next_tokens,
)
from magicdec.kv.cache import KVCache
from magicdec.kv.device_rows import upload
from magicdec.request import Batch
from magicdec.runner import ModelRunner

Work = Callable[[int], Tensor]


class ReplayedSteps:
    """A drafter that cannot be replayed drafts as it does without graphs. Rows that have ended stay
    in the batch until the next one begins: they are computed, and read nothing of their context."""

    def __init__(
        self, runner: ModelRunner, drafter: Drafter | None, phase: Phase, recorder: Recorder
    ) -> None:
        self.runner, self.drafter, self.phase = runner, drafter, phase
        self.recorder = recorder

    @torch.inference_mode()
    def begin(self, batch: Batch, draft_lengths: Sequence[int]) -> None:
        """Record all steps to come; each is done once first, and its traces removed."""
        drafter = self.drafter
        self._replays_drafts = drafter is not None and drafter.can_replay
        self._reader = None if drafter is None or not drafter.can_replay else drafter.reader
        self._runners = [self.runner]
        if self._reader is not None and self._reader.runner is not self.runner:
            self._runners.append(self._reader.runner)
        self._shown: tuple[int, ...] = ()
        for runner in self._runners:
            runner.counts.begin_on_device(runner.device)
        most, vocab_size = max(draft_lengths), max(r.model.config.vocab_size for r in self._runners)
        self._batch = DeviceBatch.of(batch, most + 1, vocab_size, self.runner.device)
        self._drafts = self._batch.newest.new_zeros(len(batch.rows), most)
        self._drawn_from = None
        if drafter is not None and drafter.draws and self._batch.choosing.draws is not None:
            shape = *self._drafts.shape, self.runner.model.config.vocab_size
            self._drawn_from = self._drafts.new_zeros(shape, dtype=torch.float64)
        self._show(batch)
        self._replays: dict[tuple[Work, int], Callable[[], Tensor]] = {}
        for count in draft_lengths:
            for work in (self._verify, self._propose) if count else (self._decode,):
                if work != self._propose or self._replays_drafts:
                    self._replays[work, count] = self._record(work, count)

    @torch.inference_mode()
    def decode(self, batch: Batch) -> list[list[int]]:
        with self.phase("decode"):
            self._show(batch)
            return self._read(batch, self._decode, 0)

    @torch.inference_mode()
    def draft(self, batch: Batch, num_draft_tokens: int) -> Proposal:
        assert self.drafter is not None, "what drafts has a drafter"
        with self.phase("draft"):
            self._show(batch)
            if not self._replays_drafts:
                return self.drafter.propose(batch, num_draft_tokens)
            self.drafter.prepare(batch, num_draft_tokens)
            # Copied: a proposal lasts until the next draft, a replay's result until any replay.
            ids = self._replay(self._propose, num_draft_tokens)[self._place_index]
            if self._drawn_from is None:
                return Proposal(ids)
            return Proposal(ids, self._drawn_from[:, :num_draft_tokens][self._place_index])

    @torch.inference_mode()
    def verify(self, batch: Batch, proposal: Proposal) -> list[list[int]]:
        assert self.drafter is not None, "what drafts has a drafter"
        with self.phase("verify"):
            self._show(batch)
            places, count = self._place_index, proposal.ids.shape[1]
            self._drafts[:, :count].index_copy_(0, places, proposal.ids)
            # What a greedy row's were drawn from does not matter, and is not said where all are.
            if self._drawn_from is not None and proposal.probabilities is not None:
                self._drawn_from[:, :count].index_copy_(0, places, proposal.probabilities)
            verdict = self._read(batch, self._verify, count)
        if not self._replays_drafts:
            cache = self.runner.cache
            self.drafter.commit(batch.rows, [cache.lengths[row] for row in batch.rows])
        return verdict

    @torch.inference_mode()
    def undo(self, batch: Batch, lengths: Sequence[int]) -> None:
        self.runner.truncate(batch.rows, lengths)
        if self.drafter is not None:
            self.drafter.commit(batch.rows, lengths)
        self._batch.load(batch)

    def _decode(self, _: int) -> Tensor:
        """[B, caches + 1]: their lengths, and the next token of each row."""
        batch, runner = self._batch, self.runner
        logits = runner.forward(newest_tokens(batch, runner.device), batch.rows)
        token = next_tokens(runner, logits, batch.choosing)
        batch.choosing.take(token, torch.ones_like(batch.rows.index), batch.rows.active)
        batch.newest.copy_(torch.cat([batch.newest[:, 1:], token], dim=1))
        if self.drafter is not None and self._replays_drafts:
            self.drafter.commit(batch.rows, runner.cache.lengths_of(batch.rows))
        return torch.cat([*self._lengths(), token], dim=1)

    def _propose(self, count: int) -> Tensor:
        """Draft ids [B, K]; what they were drawn from stays where a verification finds it."""
        assert self.drafter is not None, "what drafts has a drafter"
        proposal = self.drafter.propose(self._batch, count)
        if self._drawn_from is not None:
            assert proposal.probabilities is not None, "some rows are sampled"
            self._drawn_from[:, :count].copy_(proposal.probabilities)
        return proposal.ids

    def _verify(self, count: int) -> Tensor:
        """[B, caches + 1 + K + 1]: their lengths, how many drafts were accepted, the target's
        ids."""
        assert self.drafter is not None, "what drafts has a drafter"
        batch, runner, drafts = self._batch, self.runner, self._drafts[:, :count]
        drawn_from = None if self._drawn_from is None else self._drawn_from[:, :count]
        rows, before = batch.rows, runner.cache.seq_lens[batch.rows.index]
        last = newest_tokens(batch, runner.device)
        logits = runner.forward(torch.cat([last, drafts], 1), rows, watch=self.drafter.watch)
        accepted, ids = judge(runner, batch.choosing, Proposal(drafts, drawn_from), logits)
        batch.choosing.take(ids, accepted + 1, rows.active)
        runner.truncate(rows, before + 1 + accepted)
        if self._replays_drafts:
            self.drafter.commit(rows, runner.cache.lengths_of(rows))
        places = torch.stack([accepted, accepted + 1], dim=1)
        batch.newest.copy_(torch.cat([last, ids], dim=1).gather(1, places))
        return torch.cat([*self._lengths(), accepted.unsqueeze(1), ids], dim=1)

    def _lengths(self) -> list[Tensor]:
        """Of every cache, [B, 1] each."""
        index = self._batch.rows.index
        return [runner.cache.seq_lens[index].unsqueeze(1) for runner in self._runners]

    def _caches(self) -> list[KVCache]:
        return [runner.cache for runner in self._runners]

    def _record(self, work: Work, count: int) -> Callable[[], Tensor]:
        batch = self._batch
        state = [*(c.seq_lens for c in self._caches()), batch.newest, *batch.choosing.state]
        if self._reader is not None and self._reader.memory is not None:
            state.append(self._reader.memory)
        counts = list({id(r.counts): r.counts for r in self._runners}.values())
        return record(self.recorder, lambda: work(count), state, counts)

    def _replay(self, work: Work, count: int) -> Tensor:
        return self._replays[work, count]()

    def _read(self, batch: Batch, work: Work, count: int) -> list[list[int]]:
        """A replay's result for the rows of `batch`, without the lengths, which are taken note of.
        The one read of a step."""
        caches = self._caches()
        result = self._replay(work, count).tolist()
        found = [result[place] for place in self._places]
        for i, cache in enumerate(caches):
            cache.note(batch.rows, [row[i] for row in found])
        return [row[len(caches) :] for row in found]

    def _show(self, batch: Batch) -> None:
        """Tell the device which rows go on, if that has changed; and where they stand in its
        batch."""
        rows = tuple(batch.rows)
        if rows == self._shown:
            return
        self._shown, place_of = rows, {n: i for i, n in enumerate(self._batch.rows.numbers)}
        self._places = [place_of[row] for row in rows]
        self._place_index = upload(self._places, self.runner.device)
        ended = [row for row in self._batch.rows.numbers if row not in rows]
        for cache in self._caches():
            # They are computed on: from where all that a step appends has room.
            most = cache.tokens_per_row - self._batch.rows.max_tail - 1
            cache.truncate(ended, [min(cache.lengths[row], most) for row in ended])
        self._batch.load(batch)
