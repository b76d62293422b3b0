"""The standalone draft: another, smaller model drafts, on a group of ranks of its own.

Owns what the draft's cache holds of the text and what it must still take. Must not know how its
cache is kept (a runner and a reader do that), nor how its tokens are judged. Sources: Leviathan et
al. 2023, section 2; on a subgroup of the ranks with a bounded cache: MagicDec (Chen et al. 2024).
"""

from __future__ import annotations

import torch
from torch import Tensor

from magicdec.config.sections import KVSection
from magicdec.decoding.device_batch import NEWEST, DeviceBatch, last_tokens
from magicdec.decoding.drafter import Proposal, draw
from magicdec.decoding.reader import Reader, make_reader
from magicdec.decoding.strategy import DraftModel, Setup, choosing_of, prefill
from magicdec.kv.device_rows import DeviceRows, Lengths, Rows, upload
from magicdec.request import Batch
from magicdec.runner import ModelRunner


class ModelDrafter:
    """On ranks without the draft `propose` only receives; the rest does nothing there."""

    watch = None
    draws = True

    def __init__(self, target: ModelRunner, draft: DraftModel, kv: KVSection) -> None:
        self.target, self.draft = target, draft
        self.vocab_size = target.model.config.vocab_size
        self.reader = None if draft.runner is None else make_reader(draft.runner, kv)

    @classmethod
    def build(cls, setup: Setup) -> ModelDrafter:
        assert setup.draft is not None, "a run with this drafter has a draft model"
        return cls(setup.runner, setup.draft, setup.kv)

    def begin(self, batch: Batch) -> None:
        """Take the prompts into the draft's own cache."""
        runner = self.draft.runner
        if self.reader is None or runner is None:
            return
        for row in range(runner.num_rows):
            runner.cache.release(row)
        prefill(runner, batch, self.draft.prefill_chunk)
        self.reader.begin(batch)

    def prepare(self, batch: Batch, num_draft_tokens: int) -> None:
        """Steps without drafts may have left the draft further behind than a replay makes up."""
        if self.reader is not None and max(self._missing(self.reader, batch)) > NEWEST:
            newest = self._catch_up(self.reader, batch)
            self.reader.forward(newest, batch.rows, self.reader.lengths(batch.rows))

    def propose(self, batch: Batch | DeviceBatch, num_draft_tokens: int) -> Proposal:
        group, source, device = self.target.group, self.draft.source, self.target.device
        is_greedy = all(request.sampling.is_greedy for request in batch.requests)
        shape, probs = (len(batch.rows), num_draft_tokens), None
        if self.reader is not None and num_draft_tokens:
            ids, probs = self._draft(self.reader, batch, num_draft_tokens)
        else:
            ids = torch.zeros(shape, dtype=torch.int64, device=device)
            if not is_greedy:
                probs = torch.zeros(*shape, self.vocab_size, dtype=torch.float64, device=device)
        if num_draft_tokens == 0:
            return Proposal(ids)
        ids = group.broadcast(ids, source)
        return Proposal(ids, None if probs is None else group.broadcast(probs, source))

    @property
    def can_replay(self) -> bool:
        return not self.draft.is_rolling

    def commit(self, rows: Rows, lengths: Lengths) -> None:
        if self.reader is None:
            return
        # Not the reader's own commit: it would take over what the target computed.
        if not isinstance(rows, DeviceRows):
            held = self.reader.lengths(rows)
            lengths = [min(h, n) for h, n in zip(held, lengths, strict=True)]
        self.reader.rewind(rows, lengths)

    def _draft(
        self, reader: Reader, batch: Batch | DeviceBatch, num_draft_tokens: int
    ) -> tuple[Tensor, Tensor | None]:
        """Draft tokens int64 [B, K], ids that the target knows, and what they were drawn from, [B,
        K, V] over the target's ids, None where nothing was."""
        rows, newest = batch.rows, self._catch_up(reader, batch)
        settled, choosing = reader.lengths(rows), choosing_of(reader.runner, batch)
        drafts, drawn_from = newest[:, :0], []
        for _ in range(num_draft_tokens):
            logits = reader.forward(newest, rows, settled)[:, -1:]
            newest, probs = draw(reader.runner, logits, choosing, drafts)
            drafts = torch.cat([drafts, newest], dim=1)
            drawn_from += [] if probs is None else [probs]
        drawn = fold(torch.cat(drawn_from, dim=1), self.vocab_size) if drawn_from else None
        return drafts.clamp(max=self.vocab_size - 1), drawn

    def _missing(self, reader: Reader, batch: Batch) -> list[int]:
        """Tokens of each request that the draft has not taken."""
        known = [len(r.prompt_ids) + len(r.output_ids) for r in batch.requests]
        return [k - int(h) for k, h in zip(known, reader.lengths(batch.rows), strict=True)]

    def _catch_up(self, reader: Reader, batch: Batch | DeviceBatch) -> Tensor:
        """The tokens [B, T] with which the draft has taken the whole text.

        A row's newest token is always missing; after a step in which all its drafts were accepted
        the last of these is too, since nothing followed it. Rows that miss fewer than another go
        back, and take what they held again: one forward serves all. More than a chunk, after steps
        without drafts, goes in chunks.
        """
        if isinstance(batch, DeviceBatch):
            # As many as can be missing, whatever is. The target holds all but the newest.
            reader.rewind(batch.rows, self.target.cache.seq_lens[batch.rows.index] + 1 - NEWEST)
            pending = batch.newest
        else:
            most = max(self._missing(reader, batch))
            known = [len(r.prompt_ids) + len(r.output_ids) for r in batch.requests]
            reader.rewind(batch.rows, [k - most for k in known])
            pending = upload([last_tokens(r, most) for r in batch.requests], reader.runner.device)
        # Vocabularies of two models are padded differently; no text holds the padding.
        pending = pending.clamp(max=reader.runner.model.config.vocab_size - 1)
        *before, last = pending.split(self.draft.prefill_chunk, dim=1)
        for part in before:
            reader.forward(part, batch.rows, reader.lengths(batch.rows))
        return last


def fold(probs: Tensor, vocab_size: int) -> Tensor:
    """What ids clamped to `vocab_size` were drawn from: probs [B, K, any] -> [B, K, vocab_size]."""
    missing = vocab_size - probs.shape[2]
    if missing >= 0:
        return torch.nn.functional.pad(probs, (0, missing))
    last = probs[:, :, vocab_size - 1 :].sum(dim=2, keepdim=True)
    return torch.cat([probs[:, :, : vocab_size - 1], last], dim=2)
