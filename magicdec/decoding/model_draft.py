"""The standalone draft: another, smaller model drafts, on a group of ranks of its own.

Owns what the draft's cache holds of the text and what it must still take. Must not know how its
cache is kept (a runner and a reader do that), nor how its tokens are judged. Sources: Leviathan et
al. 2023, section 2; on a subgroup of the ranks with a bounded cache: MagicDec (Chen et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from magicdec.decoding.drafter import Proposal, draw
from magicdec.decoding.reader import Reader, make_reader
from magicdec.decoding.strategy import DraftModel, Setup, prefill
from magicdec.request import Batch, Request
from magicdec.runner import ModelRunner
from magicdec.sections import KVSection


class ModelDrafter:
    """On ranks without the draft `propose` only receives; the rest does nothing there."""

    watch = None

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

    def propose(self, batch: Batch, num_draft_tokens: int) -> Proposal:
        group, source, device = self.target.group, self.draft.source, self.target.device
        shape = len(batch.rows), num_draft_tokens
        if num_draft_tokens == 0:
            return Proposal(torch.zeros(shape, dtype=torch.int64, device=device))
        if self.reader is not None:
            ids, probs = self._draft(self.reader, batch, num_draft_tokens)
        else:
            ids = torch.zeros(shape, dtype=torch.int64, device=device)
            probs = torch.zeros(*shape, self.vocab_size, dtype=torch.float64, device=device)
        ids = group.broadcast(ids, source)
        if all(request.sampling.is_greedy for request in batch.requests):
            return Proposal(ids)
        assert probs is not None, "a sampled draft is drawn from something"
        return Proposal(ids, group.broadcast(probs, source))

    def commit(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        if self.reader is None:
            return
        # Not the reader's own commit: it would take over what the target computed.
        held = self.reader.lengths(rows)
        self.reader.rewind(rows, [min(h, n) for h, n in zip(held, lengths, strict=True)])

    def _draft(
        self, reader: Reader, batch: Batch, num_draft_tokens: int
    ) -> tuple[Tensor, Tensor | None]:
        """Draft tokens int64 [B, K], ids that the target knows, and what they were drawn from, [B,
        K, V] over the target's ids, None where nothing was."""
        rows, newest = batch.rows, self._catch_up(reader, batch)
        settled = reader.lengths(rows)
        drafts, drawn_from = newest[:, :0], []
        for _ in range(num_draft_tokens):
            logits = reader.forward(newest, rows, settled)[:, -1:]
            newest, probs = draw(reader.runner, logits, batch.requests, drafts)
            drafts = torch.cat([drafts, newest], dim=1)
            drawn_from += [] if probs is None else [probs]
        drawn = fold(torch.cat(drawn_from, dim=1), self.vocab_size) if drawn_from else None
        return drafts.clamp(max=self.vocab_size - 1), drawn

    def _catch_up(self, reader: Reader, batch: Batch) -> Tensor:
        """The tokens [B, T] with which the draft has taken the whole text.

        A row's newest token is always missing; after a step in which all its drafts were accepted
        the last of these is too, since nothing followed it. Rows that miss fewer than another go
        back, and take what they held again: one forward serves all. More than a chunk, after steps
        without drafts, goes in chunks.
        """
        rows, runner = batch.rows, reader.runner
        known = [len(r.prompt_ids) + len(r.output_ids) for r in batch.requests]
        most = max(k - h for k, h in zip(known, reader.lengths(rows), strict=True))
        reader.rewind(rows, [k - most for k in known])
        tokens = [last_tokens(r, most) for r in batch.requests]
        pending = torch.tensor(tokens, device=runner.device)
        # Vocabularies of two models are padded differently; no text holds the padding.
        pending = pending.clamp(max=runner.model.config.vocab_size - 1)
        *before, last = pending.split(self.draft.prefill_chunk, dim=1)
        for part in before:
            reader.forward(part, rows, reader.lengths(rows))
        return last


def fold(probs: Tensor, vocab_size: int) -> Tensor:
    """What ids clamped to `vocab_size` were drawn from: probs [B, K, any] -> [B, K, vocab_size]."""
    missing = vocab_size - probs.shape[2]
    if missing >= 0:
        return torch.nn.functional.pad(probs, (0, missing))
    last = probs[:, :, vocab_size - 1 :].sum(dim=2, keepdim=True)
    return torch.cat([probs[:, :, : vocab_size - 1], last], dim=2)


def last_tokens(request: Request, count: int) -> list[int]:
    """The last `count` tokens of prompt and output."""
    of_prompt = count - len(request.output_ids)
    if of_prompt <= 0:
        return request.output_ids[-count:]
    return [*request.prompt_ids[-of_prompt:], *request.output_ids]
