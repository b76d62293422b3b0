"""Speculative decoding: propose, verify all proposals in one forward, keep each row's accepted
prefix and one token more.

Source: Leviathan et al. 2023, algorithm 1; ragged over the batch as in MagicDec (Chen et al. 2024).
"""

from __future__ import annotations

import torch

from magicdec.decoding.drafter import Drafter, make_drafter
from magicdec.decoding.sampling import count_accepted
from magicdec.decoding.strategy import Phase, Setup, choose, newest_tokens, untimed
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
            drafts = self.drafter.propose(batch, self.num_draft_tokens).ids  # [B, K]
        with self.phase("verify"):
            tokens = torch.cat([last, drafts], dim=1)
            logits = runner.forward(tokens, rows, watch=self.drafter.watch)
            target = choose(runner, logits)  # [B, K+1]
            verdict = torch.cat(
                [count_accepted(drafts, target).unsqueeze(1), target], dim=1
            ).tolist()
        accepted = [row[0] for row in verdict]
        # What stays cached is the last token and the accepted drafts; the newest emitted token is
        # not cached yet.
        lengths = [b + 1 + a for b, a in zip(before, accepted, strict=True)]
        runner.truncate(rows, lengths)
        self.drafter.commit(rows, lengths)
        emitted = [row[1 : 2 + row[0]] for row in verdict]
        return StepOutput(emitted, self.num_draft_tokens * len(rows), accepted)
