"""Speculative decoding: propose, verify all proposals in one forward, keep each row's accepted
prefix and one token more. Greedy requests take their own branch, exact; others are judged by
rejection sampling.

Source: Leviathan et al. 2023, algorithm 1; ragged over the batch as in MagicDec (Chen et al. 2024).
"""

from __future__ import annotations

import torch
from torch import Tensor

from magicdec.decoding.drafter import Drafter, Proposal, make_drafter
from magicdec.decoding.randomness import Purpose, uniforms_ahead
from magicdec.decoding.sampling import count_accepted, probabilities
from magicdec.decoding.strategy import (
    Phase,
    Setup,
    choose,
    newest_tokens,
    untimed,
    whole_logits,
)
from magicdec.decoding.verification import verify
from magicdec.request import Batch, StepOutput
from magicdec.runner import ModelRunner


class Speculative:
    """`num_draft_tokens` proposals a row a step, from any drafter."""

    def __init__(
        self, runner: ModelRunner, drafter: Drafter, num_draft_tokens: int, phase: Phase = untimed
    ) -> None:
        self.runner, self.drafter = runner, drafter
        self.num_draft_tokens, self.phase = num_draft_tokens, phase

    @classmethod
    def build(cls, setup: Setup) -> Speculative:
        assert setup.decoding.drafter is not None, "a speculative run names its drafter"
        drafter = make_drafter(setup.decoding.drafter, setup)
        return cls(setup.runner, drafter, setup.decoding.num_draft_tokens, setup.phase)

    def begin(self, batch: Batch) -> None:
        self.drafter.begin(batch)

    def step(self, batch: Batch) -> StepOutput:
        """One verification: every row emits 1 to num_draft_tokens + 1 tokens. One read by the
        host."""
        runner, rows = self.runner, batch.rows
        before = [runner.cache.lengths[row] for row in rows]
        last = newest_tokens(batch, runner.device)
        with self.phase("draft"):
            proposal = self.drafter.propose(batch, self.num_draft_tokens)
        with self.phase("verify"):
            tokens = torch.cat([last, proposal.ids], dim=1)
            logits = runner.forward(tokens, rows, watch=self.drafter.watch)
            count, tokens = self._judge(batch, proposal, logits)
            verdict = torch.cat([count.unsqueeze(1), tokens], dim=1).tolist()
        accepted = [row[0] for row in verdict]
        # What stays cached is the last token and the accepted drafts; the newest emitted token is
        # not cached yet.
        lengths = [b + 1 + a for b, a in zip(before, accepted, strict=True)]
        runner.truncate(rows, lengths)
        self.drafter.commit(rows, lengths)
        emitted = [row[1 : 2 + row[0]] for row in verdict]
        return StepOutput(emitted, self.num_draft_tokens * len(rows), accepted)

    def _judge(self, batch: Batch, proposal: Proposal, logits: Tensor) -> tuple[Tensor, Tensor]:
        """How many drafts of each row are kept [B], and ids [B, K+1] whose first that many + 1 the
        row emits."""
        runner, requests, drafts = self.runner, batch.requests, proposal.ids
        params = [request.sampling for request in requests]
        if all(p.is_greedy for p in params):
            target = choose(runner, logits, requests, drafts)
            return count_accepted(drafts, target), target
        probs = probabilities(whole_logits(runner, logits, requests, drafts), params)
        count, following = verify(
            drafts,
            proposal.probabilities,
            probs,
            uniforms_ahead(requests, drafts.shape[1], Purpose.ACCEPT, logits.device),
            uniforms_ahead(requests, drafts.shape[1] + 1, Purpose.RESAMPLE, logits.device),
        )
        tokens = torch.cat([drafts, following.unsqueeze(1)], dim=1)
        return count, tokens.scatter(1, count.unsqueeze(1), following.unsqueeze(1))
