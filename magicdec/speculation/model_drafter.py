"""Drafters that run a model: the target under a KV policy, a low-bit copy of it, or a smaller model
on its own ranks.

Draft K and V land past the committed length; verification overwrites them. Sources: MagicDec, arXiv
2408.11049, section 4; TriForce, arXiv 2404.11912, section 4.1; Leviathan et al., arXiv 2211.17192,
section 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from magicdec.kv.cache import BatchRows, Lengths, upload
from magicdec.runner.device_batch import NEWEST, DeviceBatch, last_tokens
from magicdec.runner.prefill import prefill
from magicdec.runner.request import Request
from magicdec.runner.sampling.model_tokens import Proposal
from magicdec.runner.step_plan import PrefillChunk
from magicdec.speculation.draft_kv import DraftKV, draft_chain
from magicdec.speculation.drafter import (
    Drafter,
    DraftSetup,
    DraftShape,
    StandaloneDrafter,
    proposal_of_source,
)
from magicdec.speculation.policies.policy import make_draft_kv


def draft(
    kv: DraftKV,
    batch: DeviceBatch,
    committed: Lengths,
    newest: Tensor,
    shape: DraftShape,
    pa: float,
    vocab_size: int,
) -> Proposal:
    """Draft tokens with ids below `vocab_size` after the `committed` tokens in `kv` and the
    newest tokens [B, T], which it lacks. Appends all drafts but the last, uncommitted."""
    proposal = draft_chain(kv, batch.rows, committed, newest, batch.sampling, shape.gamma, pa)
    if kv.runner.model.config.vocab_size == vocab_size:
        return proposal
    probs = proposal.probabilities
    return Proposal(
        proposal.ids.clamp(max=vocab_size - 1), None if probs is None else fold(probs, vocab_size)
    )


def fold(probs: Tensor, vocab_size: int) -> Tensor:
    """Probabilities [B, K, any] of ids clamped to `vocab_size`: [B, K, vocab_size]."""
    missing = vocab_size - probs.shape[2]
    if missing >= 0:
        return torch.nn.functional.pad(probs, (0, missing))
    last = probs[:, :, vocab_size - 1 :].sum(dim=2, keepdim=True)
    return torch.cat([probs[:, :, : vocab_size - 1], last], dim=2)


class SelfDrafter(Drafter):
    draft_kv: DraftKV

    def __init__(self, draft_kv: DraftKV, pa: float = 0.0) -> None:
        self.draft_kv = draft_kv
        self.pa = pa
        self.observers = draft_kv.observers

    @classmethod
    def build(cls, setup: DraftSetup) -> SelfDrafter:
        kv = make_draft_kv(setup.runner.drafting_runner, setup.kv)
        return cls(kv, setup.decoding.pa or 0.0)

    def admit(self, requests: Sequence[Request]) -> None:
        self.draft_kv.admit(requests)

    def prepare(self, requests: Sequence[Request], gamma: int) -> int:
        self.draft_kv.prepare(requests, gamma)
        return 1

    def propose(self, batch: DeviceBatch, shape: DraftShape) -> Proposal:
        kv = self.draft_kv
        kv.follow(batch.rows, shape.gamma + 1)
        committed = kv.lengths(batch.rows)
        vocab_size = kv.runner.model.config.vocab_size
        newest = batch.newest[:, -1:]
        proposal = draft(kv, batch, committed, newest, shape, self.pa, vocab_size)
        kv.rewind(batch.rows, committed)
        return proposal

    def commit(self, rows: BatchRows, lengths: Lengths) -> None:
        self.draft_kv.commit(rows, lengths)

    def fork(self, forks: Sequence[Request], texts: Sequence[Request]) -> None:
        self.draft_kv.fork(forks, texts)

    def release(self, rows: Sequence[int]) -> None:
        self.draft_kv.release(rows)


class ModelDrafter(StandaloneDrafter):
    """A drafter with a smaller model."""

    # The draft's cache always lacks a row's newest token. If all drafts of the last step were
    # accepted, it lacks the last draft too, because no draft forward has taken it.
    pending = tuple(range(1, NEWEST + 1))

    @classmethod
    def build(cls, setup: DraftSetup) -> ModelDrafter:
        assert setup.draft is not None, "a run with this drafter has a draft model"
        decoding = setup.decoding
        return cls(setup.runner, setup.draft, setup.kv, decoding.pa or 0.0, decoding.max_gamma)

    def admit(self, requests: Sequence[Request]) -> None:
        runner = self.draft.runner
        if self.draft_kv is None or runner is None:
            return
        parts = list[PrefillChunk]()
        for part in PrefillChunk.whole(requests):
            num_shared = self.begin(runner, part.request)
            parts.append(replace(part, start=num_shared, num_shared=num_shared))
        prefill(runner, parts, self.draft.prefill_chunk)
        for request in requests:
            self.keep(runner, request)
        self.draft_kv.admit(requests)

    def prepare(self, requests: Sequence[Request], gamma: int) -> int:
        """Append the tokens that the draft's cache lacks after steps without drafts, except the
        newest. Rows that lack almost as many share a forward, for which some are rewound."""
        kv = self.draft_kv
        if kv is None:
            return 1
        lengths = kv.lengths([r.row for r in requests if r.row is not None]).bounds
        text_lengths = [len(r.prompt_ids) + len(r.output_ids) for r in requests]
        lacking = [text - held for text, held in zip(text_lengths, lengths, strict=True)]
        by_lack = sorted(zip(lacking, requests, strict=True), key=lambda pair: -pair[0])
        while by_lack and by_lack[0][0] > NEWEST:
            most = by_lack[0][0]
            group = [request for count, request in by_lack if most - count < NEWEST]
            by_lack = by_lack[len(group) :]
            self._append(kv, group, most)
        return max([count for count, _ in by_lack], default=1)

    def _append(self, kv: DraftKV, requests: Sequence[Request], most: int) -> None:
        rows = [r.row for r in requests if r.row is not None]
        device = kv.runner.device
        lengths = [len(r.prompt_ids) + len(r.output_ids) - most for r in requests]
        kv.rewind(rows, Lengths.of(lengths, device))
        tokens = self._known(upload([last_tokens(r, most)[:-1] for r in requests], device))
        for chunk in tokens.split(self.draft.prefill_chunk, dim=1):
            kv.forward(chunk, rows, kv.lengths(rows), num_outputs=0)

    def propose(self, batch: DeviceBatch, shape: DraftShape) -> Proposal:
        kv = self.draft_kv
        proposal = None
        if kv is not None:
            # The target holds all tokens but the newest.
            kv.rewind(batch.rows, self.target.cache.lengths_of(batch.rows).plus(1 - shape.pending))
            newest = self._known(batch.newest[:, -shape.pending :])
            committed = kv.lengths(batch.rows)
            proposal = draft(kv, batch, committed, newest, shape, self.pa, self.vocab_size)
        return proposal_of_source(proposal, batch, shape, self.draft, self.target, self.pa)

    def _known(self, token_ids: Tensor) -> Tensor:
        """Clamp ids to the draft's vocabulary, which may be padded differently; no text holds
        padding."""
        assert self.draft.runner is not None, "asked on ranks with the draft"
        return token_ids.clamp(max=self.draft.runner.model.config.vocab_size - 1)
