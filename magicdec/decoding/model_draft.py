"""The standalone draft: another, smaller model drafts, on a group of ranks of its own.

Owns what the draft's cache holds of the text and what it must still take. Must not know how its
cache is kept (a runner and a reader do that), nor how its tokens are judged. Sources: Leviathan et
al. 2023, section 2; on a subgroup of the ranks with a bounded cache: MagicDec (Chen et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from magicdec.config import KVSection
from magicdec.decoding.drafter import Proposal
from magicdec.decoding.reader import Reader, make_reader
from magicdec.decoding.strategy import DraftModel, Setup, choose, prefill
from magicdec.request import Batch, Request
from magicdec.runner import ModelRunner


class ModelDrafter:
    """On ranks without the draft `propose` only receives; the rest does nothing there."""

    def __init__(self, target: ModelRunner, draft: DraftModel, kv: KVSection) -> None:
        self.target, self.draft = target, draft
        self.reader = None if draft.runner is None else make_reader(draft.runner, kv)

    @classmethod
    def build(cls, setup: Setup) -> ModelDrafter:
        assert setup.draft is not None, "a run with this drafter has a draft model"
        return cls(setup.runner, setup.draft, setup.kv)

    def begin(self, batch: Batch) -> None:
        """Take the prompts into the draft's own cache."""
        if self.reader is None:
            return
        runner = self.reader.runner
        for row in range(runner.num_rows):
            runner.cache.release(row)
        prefill(runner, batch, self.draft.prefill_chunk)
        self.reader.begin(batch)

    def propose(self, batch: Batch, num_draft_tokens: int) -> Proposal:
        shape = len(batch.rows), num_draft_tokens
        ids = torch.zeros(shape, dtype=torch.int64, device=self.target.device)
        if num_draft_tokens == 0:
            return Proposal(ids)
        if self.reader is not None:
            ids = self._draft(self.reader, batch, num_draft_tokens)
        return Proposal(self.target.group.broadcast(ids, self.draft.source))

    def commit(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        if self.reader is None:
            return
        held = self.reader.lengths(rows)
        self.reader.rewind(rows, [min(h, n) for h, n in zip(held, lengths, strict=True)])
        self.reader.commit(rows, lengths)

    def _draft(self, reader: Reader, batch: Batch, num_draft_tokens: int) -> Tensor:
        """Draft tokens int64 [B, K], of which all are ids that the target knows."""
        rows, runner = batch.rows, reader.runner
        ids = self._catch_up(reader, batch)
        settled = reader.lengths(rows)
        drafts = []
        for _ in range(num_draft_tokens):
            logits = reader.forward(ids, rows, settled)[:, -1:]
            ids = choose(runner, logits)
            drafts.append(ids)
        return torch.cat(drafts, dim=1).clamp(max=self.target.model.config.vocab_size - 1)

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
        tokens = [newest(r, most) for r in batch.requests]
        pending = torch.tensor(tokens, device=runner.device)
        # Vocabularies of two models are padded differently; no text holds the padding.
        pending = pending.clamp(max=runner.model.config.vocab_size - 1)
        *before, last = pending.split(self.draft.prefill_chunk, dim=1)
        for part in before:
            reader.forward(part, rows, reader.lengths(rows))
        return last


def newest(request: Request, count: int) -> list[int]:
    """The last `count` tokens of prompt and output."""
    of_prompt = count - len(request.output_ids)
    if of_prompt <= 0:
        return request.output_ids[-count:]
    return [*request.prompt_ids[-of_prompt:], *request.output_ids]
