"""The standalone draft: another, smaller model drafts, on a group of ranks of its own.

Owns the record of which tokens the draft's cache holds and which it still lacks. Sources: Leviathan
et al. 2023, section 2; on a subgroup of the ranks with a bounded cache: MagicDec (Chen et al.
2024).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from magicdec.config.sections import KVSection
from magicdec.config.tree_shape import TreeShape
from magicdec.device_batch import NEWEST, DeviceBatch, last_tokens
from magicdec.drafting.draft_kv import AcceptedPath, DraftKV, draft_chain
from magicdec.drafting.draft_tree import draft_tree, fold
from magicdec.drafting.drafter import Drafter, DraftModel, DraftSetup
from magicdec.drafting.policies.policy import make_draft_kv
from magicdec.kv.cache import BatchRows, Lengths, upload
from magicdec.prefill import prefill
from magicdec.request import Request
from magicdec.runner import ModelRunner
from magicdec.sampling.model_tokens import Proposal
from magicdec.scheduling.plan import Part

STOPPED = -1  # no token: what stands behind a chain that has stopped


class ModelDrafter(Drafter):
    """On ranks without the draft, `propose` receives the draft tokens, and the other methods do
    nothing."""

    # The draft's cache always lacks a row's newest token. If all drafts of the last step were
    # accepted, it lacks the last draft too, because no draft forward has taken it.
    pending = tuple(range(1, NEWEST + 1))

    def __init__(
        self, target: ModelRunner, draft: DraftModel, kv: KVSection, pa: float = 0.0
    ) -> None:
        self.target, self.draft, self.pa = target, draft, pa
        self.vocab_size = target.model.config.vocab_size
        self.draft_kv = None if draft.runner is None else make_draft_kv(draft.runner, kv)
        self.can_capture = not draft.is_rolling

    @classmethod
    def build(cls, setup: DraftSetup) -> ModelDrafter:
        assert setup.draft is not None, "a run with this drafter has a draft model"
        return cls(setup.runner, setup.draft, setup.kv, setup.decoding.pa or 0.0)

    def admit(self, requests: Sequence[Request]) -> None:
        """Prefill the texts into the draft's own cache."""
        runner = self.draft.runner
        if self.draft_kv is None or runner is None:
            return
        parts = Part.whole(requests)
        for part in parts:
            runner.cache.release(part.row)
            runner.allocate(part.row)
        prefill(runner, parts, self.draft.prefill_chunk)
        self.draft_kv.admit(requests)

    def release(self, rows: Sequence[int]) -> None:
        if self.draft_kv is not None and self.draft.runner is not None:
            self.draft_kv.release(rows)
            for row in rows:
                self.draft.runner.cache.release(row)

    def prepare(self, requests: Sequence[Request], num_draft_tokens: int) -> int:
        """After steps without drafts, the draft's cache lacks any number of tokens. This appends
        all but the newest, together for rows that lack almost as many: a row that lacks fewer than
        another is rewound and takes some again."""
        kv = self.draft_kv
        if kv is None:
            return 1
        lengths = kv.lengths([r.row for r in requests if r.row is not None]).bounds
        text_lengths = [len(r.prompt_ids) + len(r.output_ids) for r in requests]
        lacking = [text - held for text, held in zip(text_lengths, lengths, strict=True)]
        by_lack = sorted(zip(lacking, requests, strict=True), key=lambda each: -each[0])
        while by_lack and by_lack[0][0] > NEWEST:
            most = by_lack[0][0]
            group = [request for count, request in by_lack if most - count < NEWEST]
            by_lack = by_lack[len(group) :]
            self._append(kv, group, most)
        return max([count for count, _ in by_lack], default=1)

    def _append(self, kv: DraftKV, requests: Sequence[Request], most: int) -> None:
        """Append the last `most` tokens of each text, but not the newest."""
        rows, device = [r.row for r in requests if r.row is not None], kv.runner.device
        lengths = [len(r.prompt_ids) + len(r.output_ids) - most for r in requests]
        kv.rewind(rows, Lengths.of(lengths, device))
        tokens = self._known(upload([last_tokens(r, most)[:-1] for r in requests], device))
        for chunk in tokens.split(self.draft.prefill_chunk, dim=1):
            kv.forward(chunk, rows, kv.lengths(rows), num_outputs=0)

    def propose(
        self,
        batch: DeviceBatch,
        num_draft_tokens: int,
        pending: int = 1,
        tree: TreeShape | None = None,
    ) -> Proposal:
        """As `Drafter.propose`. All draft tokens are in the target's vocabulary."""
        group, source, device = self.target.group, self.draft.source, self.target.device
        if self.draft_kv is not None:
            proposal = self._draft(self.draft_kv, batch, num_draft_tokens, pending, tree)
        else:
            rows, num_drafts, num_drawn = len(batch.rows), num_draft_tokens, num_draft_tokens
            if tree is not None:
                num_drafts, num_drawn = tree.num_nodes, tree.num_expanded
            ids = torch.zeros(rows, num_drafts, dtype=torch.int64, device=device)
            probs = None
            if batch.sampling.draws is not None:
                shape = (rows, num_drawn, self.vocab_size)
                probs = torch.zeros(shape, dtype=torch.float64, device=device)
            proposal = Proposal(ids, probs)
        ids, probs = proposal.ids, proposal.probabilities
        if self.pa > 0:  # every rank learns from padding where the chain has stopped
            padding = num_draft_tokens - ids.shape[1]
            ids = torch.nn.functional.pad(ids, (0, padding), value=STOPPED)
        ids = group.broadcast(ids, source)
        if self.pa > 0:
            ids = ids[:, : int((ids[0] != STOPPED).sum())]
            probs = None if probs is None else probs[:, : ids.shape[1]]
        return Proposal(ids, None if probs is None else group.broadcast(probs, source), tree)

    def commit(self, rows: BatchRows, lengths: Lengths, path: AcceptedPath | None = None) -> None:
        """Forget rejected drafts. The policy's own `commit` is not called, because it would copy K
        and V from the target, and the draft model has its own."""
        if self.draft_kv is None:
            return
        if path is None:
            self.draft_kv.rewind(rows, lengths)
        else:  # the last level of the tree was not computed
            self.draft_kv.keep_path(rows, path, path.nodes.shape[1] - 1)

    def _draft(
        self,
        kv: DraftKV,
        batch: DeviceBatch,
        num_draft_tokens: int,
        pending: int,
        tree: TreeShape | None,
    ) -> Proposal:
        # The target holds all tokens but the newest.
        kv.rewind(batch.rows, self.target.cache.lengths_of(batch.rows).plus(1 - pending))
        newest = self._known(batch.newest[:, -pending:])
        rows, committed, sampling = batch.rows, kv.lengths(batch.rows), batch.sampling
        if tree is not None:
            return draft_tree(kv, rows, committed, newest, sampling, tree, self.vocab_size)
        count = num_draft_tokens
        proposal = draft_chain(kv, rows, committed, newest, sampling, count, self.pa)
        probs = proposal.probabilities
        return Proposal(
            proposal.ids.clamp(max=self.vocab_size - 1),
            None if probs is None else fold(probs, self.vocab_size),
        )

    def _known(self, token_ids: Tensor) -> Tensor:
        """`token_ids` limited to the draft's vocabulary. The two models may pad their vocabularies
        to different sizes; no text holds the padding."""
        assert self.draft.runner is not None, "asked on ranks with the draft"
        return token_ids.clamp(max=self.draft.runner.model.config.vocab_size - 1)
