"""PaddedSteps: decoding steps in which rows that have ended are left in place.

The batch is all rows from the first to the last that decodes, without those that hold another
request's prompt. Rows between them that nobody has are computed for nothing. This is how a batch
runs that is neither kept dense nor gathered (`--compaction none`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from magicdec.config.tree_shape import TreeShape
from magicdec.decoding.steps import ANY_NUMBER, Steps
from magicdec.device_batch import DeviceBatch
from magicdec.kv.cache import BatchRows
from magicdec.request import Batch, Request, SamplingParams
from magicdec.runner import QueryWatch, Watch
from magicdec.sampling.model_tokens import Proposal


class PaddedSteps(Steps):
    """The runner's cache has a spare block (`KVCache.keep_spare_block`), to which a row without a
    request writes. Only the target computes such rows; drafts are made for the others."""

    def _show(self, batch: Batch) -> None:
        if batch.requests != self._shown or self._numbers(batch) != self._batch.rows.numbers:
            self._load(batch)

    def _load(self, batch: Batch) -> None:
        request_of = {request.row: request for request in batch.requests}
        nobody = Request(-1, (0,), SamplingParams(1))
        padded = [request_of.get(row) or replace(nobody, row=row) for row in self._numbers(batch)]
        device_batch = DeviceBatch.of(Batch(tuple(padded)), self._vocab_size, self.runner.device)
        device_batch.load(batch)
        self._set_batch(device_batch, batch)

    def _numbers(self, batch: Batch) -> tuple[int, ...]:
        rows, blocks = batch.rows, self.runner.cache.blocks
        decoding = set(rows)
        between = range(rows[0], rows[-1] + 1)
        return tuple(row for row in between if row in decoding or not blocks[row])

    def _drafted(self, batch: Batch, num_draft_tokens: int, tree: TreeShape | None) -> Proposal:
        assert tree is None, "refused before"
        assert self.drafter is not None, "only a strategy with a drafter drafts"
        pending = self.drafter.prepare(batch.requests, num_draft_tokens, ANY_NUMBER)
        live = DeviceBatch.of(batch, self._vocab_size, self.runner.device)
        return self.drafter.propose(live, num_draft_tokens, pending)

    def _judged(self, proposal: Proposal | None) -> list[list[int]]:
        padded = None if proposal is None else self._padded(proposal)
        verdict = self._read(self._verify(padded, False))
        idle_rows = [row for row in self._batch.rows.numbers if row not in self._rows]
        self.runner.cache.set_host_lengths(idle_rows, [0] * len(idle_rows))
        if self.drafter is not None:
            rows = BatchRows.of(self._rows, self.runner.device)
            self.drafter.commit(rows, self.runner.cache.lengths_of(rows))
        return verdict

    def _padded(self, proposal: Proposal) -> Proposal:
        """The proposal with zeros for the rows without a request."""

        def pad(x: Tensor) -> Tensor:
            padded = x.new_zeros(len(self._batch.rows), *x.shape[1:])
            return padded.index_copy_(0, self._place_index, x)

        probs = proposal.probabilities
        return Proposal(pad(proposal.ids), None if probs is None else pad(probs))

    def _watches(self) -> tuple[Watch | None, QueryWatch | None]:
        """The drafter sees only the rows that decode."""
        index = self._place_index

        def narrowed(watch: Watch | None) -> Watch | None:
            if watch is None:
                return None
            return lambda layer, values: watch(layer, torch.index_select(values, 0, index))

        watch, watch_queries = super()._watches()
        return narrowed(watch), narrowed(watch_queries)
