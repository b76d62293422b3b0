"""GatheredReader: a draft reads a small cache of its own, filled once with the entries that SnapKV
chose, per KV head, from the model's full cache.

Owns the copy and its upkeep. A token keeps the rotation of its place in the context; only its
address is new.

Under a sliding window a draft may read nothing that the target's token in its place would not see.
What was chosen leaves the window in another order in each head, so only what stays in it is chosen:
until the next choice, or, where there is none, until the text ends.

Source: SnapKV (Li et al. 2024), section 4; as a self-speculation draft: MagicDec (Chen et al.
2024), section 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from magicdec.config.sections import MOST_DRAFT_TOKENS
from magicdec.kv.device_rows import DeviceRows, Lengths, Rows, index_of, upload
from magicdec.kv.policy import first_key
from magicdec.kv.snapkv import SnapKV
from magicdec.request import Batch, Request
from magicdec.runner import ModelRunner


class GatheredReader:
    """`source` holds the whole context; `runner`, which drafts, what was chosen of it and the
    tokens since."""

    watch = memory = None

    def __init__(
        self, source: ModelRunner, policy: SnapKV, kv_dtype: torch.dtype | None = None
    ) -> None:
        self.source, self.policy, self.kv_dtype = source, policy, kv_dtype
        self.runner = source
        self.chosen_at = [0] * source.num_rows  # context length at the last choice
        self.lasts_until = [
            0
        ] * source.num_rows  # positions before this one see all that was chosen
        self.shifts = [0] * source.num_rows  # `runner.offsets` on the host

    @classmethod
    def build(
        cls, runner: ModelRunner, policy: SnapKV, kv_dtype: torch.dtype | None
    ) -> GatheredReader:
        return cls(runner, policy, kv_dtype)

    @property
    def _offsets(self) -> Tensor:
        assert self.runner.offsets is not None, "a cache of its own has offsets"
        return self.runner.offsets

    def begin(self, batch: Batch) -> None:
        room = self.source.max_tokens - min(r.num_cached for r in batch.requests)
        kept = min(self.policy.budget, max(r.num_cached for r in batch.requests))
        self.runner = self.source.with_cache(
            min(kept + room, self.source.max_tokens), self.kv_dtype
        )
        for request, row in zip(batch.requests, batch.rows, strict=True):
            self.runner.cache.allocate(row, self.runner.max_tokens)
            self._choose(request, row)

    def refresh(self, batch: Batch, num_draft_tokens: int, most_behind: int = 0) -> None:
        held = self.lengths(batch.rows)
        behind = max(r.num_cached - int(n) for r, n in zip(batch.requests, held, strict=True))
        if behind > most_behind:
            self._take_over(batch.rows, behind)
        every = self.policy.reselect_every
        for request, row in zip(batch.requests, batch.rows, strict=True):
            last = request.num_cached + num_draft_tokens
            is_due = every and request.num_cached >= self.chosen_at[row] + every
            if is_due or last > self.lasts_until[row]:
                self._choose(request, row, num_draft_tokens)

    def _choose(
        self, request: Request, row: int, num_draft_tokens: int = MOST_DRAFT_TOKENS
    ) -> None:
        """Fill `row` anew from the source, which holds all of the request's settled tokens."""
        source, cache = self.source, self.runner.cache
        length = request.num_cached
        tokens = [*request.prompt_ids, *request.output_ids][:length]
        kept: list[Tensor] = []
        until, first = self._reach(length, num_draft_tokens)
        index = upload([row], source.device)
        everything = source.cache.slots(index, torch.arange(length, device=source.device)[None])

        def select(layer: int, queries: Tensor) -> None:
            keys, _ = source.cache.read(layer, everything)
            kept.append(first + self.policy.select(queries[0], keys[0, :, first:]))

        source.replay(row, tokens[-self.policy.window_size :], select)
        count = kept[0].shape[1]
        target = cache.slots(index, torch.arange(count, device=source.device)[None])
        for layer, positions in enumerate(kept):
            slots = everything.gather(2, positions.unsqueeze(0))  # [1, G, count]
            k, v = source.cache.read(layer, slots)
            cache.write(layer, target, k.transpose(1, 2), v.transpose(1, 2))
        cache.truncate([row], [0])
        cache.advance([row], count)
        self._offsets[row] = self.shifts[row] = length - count
        self.chosen_at[row], self.lasts_until[row] = length, until

    def _reach(self, length: int, num_draft_tokens: int) -> tuple[int, int]:
        """The position up to which a choice after `length` tokens is made, and the first that is
        still seen from there."""
        until, every = self.source.max_tokens, self.policy.reselect_every
        if every and self.source.window is not None:
            until = min(until, length + every + num_draft_tokens)
        return until, min(length, first_key(until - 1, self.source.window))

    def lengths(self, rows: Rows) -> Lengths:
        if isinstance(rows, DeviceRows):
            return self.runner.cache.seq_lens[rows.index] + self._offsets[rows.index]
        return [self.runner.cache.lengths[row] + self.shifts[row] for row in rows]

    def forward(self, token_ids: Tensor, rows: Rows, settled: Lengths) -> Tensor:
        return self.runner.forward(token_ids, rows)

    def rewind(self, rows: Rows, lengths: Lengths) -> None:
        if isinstance(rows, DeviceRows):
            assert isinstance(lengths, Tensor), "the host knows no length of such rows"
            self.runner.truncate(rows, lengths - self._offsets[rows.index])
            return
        pairs = zip(rows, lengths, strict=True)
        self.runner.truncate(rows, [int(length) - self.shifts[row] for row, length in pairs])

    def commit(self, rows: Rows, lengths: Lengths) -> None:
        """What was settled is taken over when it is next of use."""

    def follow(self, rows: DeviceRows, most: int) -> None:
        self._take_over(rows, most)

    def _take_over(self, rows: Rows, count: int) -> None:
        """Copy the source's own K and V of the tokens that were settled since, at most `count` of a
        row."""
        source, cache = self.source.cache, self.runner.cache
        index, steps = index_of(rows, source.k.device), torch.arange(count, device=source.k.device)
        held = cache.seq_lens[index].unsqueeze(1)
        # Rows that settled fewer copy past their end too: rejected drafts, forgotten right after.
        cache.copy_from(
            source,
            source.slots(index, held + self._offsets[index].unsqueeze(1) + steps),
            cache.slots(index, held + steps),
        )
        cache.advance(rows, count)
        self.rewind(rows, source.lengths_of(rows))
