"""Steps: the two parts of a decoding step. One drafts K tokens, the other verifies them. With K = 0
the verification is a step of plain decoding.

Owns the state that stays on the device from step to step (`DeviceBatch` and the lengths of the
caches), the order of forward, judgement and truncation, and the host's copy of the lengths. The
host reads the device once in each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from magicdec.config.tree_shape import TreeShape
from magicdec.decoding.strategy import Phase
from magicdec.device_batch import DeviceBatch
from magicdec.drafting.draft_kv import AcceptedPath
from magicdec.drafting.drafter import Drafter, DraftShape
from magicdec.kv.cache import BatchRows, Lengths, upload
from magicdec.kv.tree import DraftTree
from magicdec.request import Batch, Request
from magicdec.runner import Forward, ModelRunner
from magicdec.sampling.model_tokens import Proposal, judge


@dataclass(frozen=True)
class Verification:
    """A verification that may still wait for its forward, of rows that held `before`."""

    batch: DeviceBatch
    rows: Sequence[int]
    places: Sequence[int]  # of these rows in the batch
    proposal: Proposal
    before: Lengths
    forward: Forward


class Steps:
    """Before and after each call, the host knows how many tokens each row has cached. If requests
    join a running batch (`is_in_flight`), the batch is loaded by the first step that needs it."""

    def __init__(
        self, runner: ModelRunner, drafter: Drafter | None, phase: Phase, is_in_flight: bool = False
    ) -> None:
        self.runner, self.drafter = runner, drafter
        self.phase, self.is_in_flight = phase, is_in_flight
        self._runners: list[ModelRunner] = []
        self._batch: DeviceBatch
        self._shown: tuple[Request, ...] = ()

    @torch.inference_mode()
    def admit(self, batch: Batch, draft_lengths: Sequence[int]) -> None:
        """Prepare for steps of `batch`, all requests that run now, with any of these numbers of
        draft tokens."""
        self._find_runners(draft_lengths)
        if self.is_in_flight:
            self._shown = ()
        else:
            self._load(batch)

    def padded_length(self, num_draft_tokens: int) -> int:
        """The number of draft tokens of a step that has so many at least."""
        return num_draft_tokens

    def release(self, rows: Sequence[int]) -> None:
        """The requests in `rows` have left the batch."""
        if self.drafter is not None:
            self.drafter.release(rows)

    def decode(self, batch: Batch) -> list[list[int]]:
        """The next token of each request, as a list for each row."""
        return [row[1:] for row in self.verify(batch, None)]

    @torch.inference_mode()
    def draft(self, batch: Batch, num_draft_tokens: int, tree: TreeShape | None = None) -> Proposal:
        """A proposal for the rows of `batch`, valid until the next draft: a chain of
        `num_draft_tokens`, or a tree of that depth."""
        with self.phase("draft"):
            self._show(batch)
            return self._drafted(batch, num_draft_tokens, tree)

    def verify(self, batch: Batch, proposal: Proposal | None) -> list[list[int]]:
        """For each row: the number n of accepted drafts, then the ids of which the row emits the
        first n + 1. Without a proposal this is a decode."""
        return self.verify_all([(batch, proposal)])[0]

    @property
    def can_join(self) -> bool:
        """Whether `verify_all` reads the weights once for several batches. What watches attention
        watches that of one batch."""
        drafter = self.drafter
        is_watched = drafter is not None and (drafter.watch or drafter.watch_queries)
        return self.runner.executor is not None and not is_watched

    @torch.inference_mode()
    def verify_all(self, parts: Sequence[tuple[Batch, Proposal | None]]) -> list[list[list[int]]]:
        """As `verify` for each of these batches, which have other rows and other numbers of drafts.
        If there are several, `can_join` must hold."""
        with self.phase("verify" if any(proposal for _, proposal in parts) else "decode"):
            return self._judged(parts)

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

    def _find_runners(self, draft_lengths: Sequence[int]) -> None:
        """The models that choose tokens. A drafter may have made a new runner since the last
        call."""
        draft_kv = None if self.drafter is None else self.drafter.draft_kv
        self._lengths = draft_lengths
        if self.drafter is not None:
            self._lengths = self.drafter.lengths(draft_lengths)
        self._runners, self._most = [self.runner], max(self._lengths)
        if draft_kv is not None and draft_kv.runner is not self.runner:
            self._runners.append(draft_kv.runner)
        self._vocab_size = max(r.model.config.vocab_size for r in self._runners)

    def _drafted(self, batch: Batch, num_draft_tokens: int, tree: TreeShape | None) -> Proposal:
        assert self.drafter is not None, "only a strategy with a drafter drafts"
        pending = self.drafter.prepare(batch.requests, num_draft_tokens)
        return self.drafter.propose(self._batch, DraftShape(num_draft_tokens, pending, tree))

    def _judged(self, parts: Sequence[tuple[Batch, Proposal | None]]) -> list[list[list[int]]]:
        """Verify, and read the results, which is the only read of a step."""
        verifications = []
        for batch, proposal in parts:
            self._show(batch)
            verifications.append(self._begin(proposal))
        self.runner.flush()
        results = [(self._finish(each), each) for each in verifications]
        return [self._read(result, each.rows, each.places) for result, each in results]

    def _read(self, result: Tensor, rows: Sequence[int], places: Sequence[int]) -> list[list[int]]:
        lines = result.tolist()
        results = [lines[place] for place in places]
        for i, runner in enumerate(self._runners):
            runner.cache.set_host_lengths(rows, [row[i] for row in results])
        return [row[len(self._runners) :] for row in results]

    def _begin(self, proposal: Proposal | None) -> Verification:
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
        tree = None
        if proposal.tree is not None:
            parents = upload([-1, *proposal.tree.parents], before.tensor.device)
            tree = DraftTree(before.tensor, parents.expand(len(before.bounds), -1))
        forward = runner.defer(tokens, rows, watch=watch, watch_queries=watch_queries, tree=tree)
        return Verification(batch, self._rows, self._places, proposal, before, forward)

    def _finish(self, verification: Verification, tells_drafter: bool = True) -> Tensor:
        """int64 [B, caches + 1 + ids]: the length of each cache, the number of accepted drafts, and
        the ids of which the row emits the first. `tells_drafter`: the drafter's `commit` is part of
        this work."""
        batch, runner, drafter = verification.batch, self.runner, self.drafter
        proposal, before = verification.proposal, verification.before
        logits = verification.forward.out
        assert logits is not None, "the forward has been computed"
        rows, last = batch.rows, batch.newest[:, -1:]
        judgement = judge(runner, batch.sampling, proposal, logits)
        accepted, ids = judgement.accepted, judgement.ids
        emitted = accepted + 1
        batch.sampling.take(ids, emitted, rows.active)
        # The newest token and the accepted drafts stay cached. The last emitted token is not cached
        # yet.
        bounds = tuple(bound + ids.shape[1] for bound in before.bounds)
        new_lengths = Lengths(before.tensor + emitted, bounds)
        path = None if judgement.path is None else AcceptedPath(before, accepted, judgement.path)
        if path is not None:
            runner.cache.keep_path(rows, before, path.places())
        elif proposal.ids.shape[1] > 0:
            runner.truncate(rows, new_lengths)
        places = torch.stack([accepted, emitted], dim=1)
        batch.newest.copy_(torch.cat([last, ids], dim=1).gather(1, places))
        if drafter is not None and tells_drafter:
            drafter.commit(rows, new_lengths, path)
        lengths = [r.cache.seq_lens[rows.index].unsqueeze(1) for r in self._runners]
        return torch.cat([*lengths, accepted.unsqueeze(1), ids], dim=1)

    def _show(self, batch: Batch) -> None:
        """Make `batch` the current batch, if it is not yet."""
        if batch.requests != self._shown:
            self._load(batch)

    def _load(self, batch: Batch) -> None:
        """Make a new device batch of the requests of `batch`."""
        self._set_batch(DeviceBatch.of(batch, self._vocab_size, self.runner.device), batch)

    def _set_batch(self, device_batch: DeviceBatch, batch: Batch) -> None:
        """Let the requests of `batch` be the ones whose results are read. Their rows are some or
        all of the rows of `device_batch`."""
        place_of = {row: place for place, row in enumerate(device_batch.rows.numbers)}
        self._batch, self._shown, self._rows = device_batch, batch.requests, batch.rows
        self._places = [place_of[row] for row in self._rows]
        self._place_index = upload(self._places, self.runner.device)
