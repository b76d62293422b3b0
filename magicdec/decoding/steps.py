"""Steps: how the work of one decoding step gets done: draft, verify, or decode one token a row.

Owns the order of forwards, judging and truncation within a step. Must not know how many tokens are
drafted nor why (`speculative`, `draft_length`). `EagerSteps` starts every operation from the host;
`replayed_steps` has them recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from magicdec.decoding.drafter import Drafter
from magicdec.decoding.replayed_steps import ReplayedSteps
from magicdec.decoding.strategy import (
    Phase,
    Proposal,
    Setup,
    choosing_of,
    judge,
    newest_tokens,
    next_tokens,
)
from magicdec.request import Batch
from magicdec.runner import ModelRunner


class Steps(Protocol):
    """Of a batch whose cached lengths the host knows before and after each call."""

    phase: Phase

    def begin(self, batch: Batch, draft_lengths: Sequence[int]) -> None:
        """Prepare for `batch`, and for steps of so many draft tokens."""
        ...

    def decode(self, batch: Batch) -> list[list[int]]:
        """The next token of each request, a list a row."""
        ...

    def draft(self, batch: Batch, num_draft_tokens: int) -> Proposal:
        """Valid until the next draft."""
        ...

    def verify(self, batch: Batch, proposal: Proposal) -> list[list[int]]:
        """For each row how many of its drafts were accepted, then the K + 1 ids of which it emits
        that many + 1."""
        ...

    def undo(self, batch: Batch, lengths: Sequence[int]) -> None:
        """Go back to cached `lengths`, at most what the rows of `batch` hold; the requests have
        emitted nothing since."""
        ...


class EagerSteps:
    def __init__(self, runner: ModelRunner, drafter: Drafter | None, phase: Phase) -> None:
        self.runner, self.drafter, self.phase = runner, drafter, phase

    def begin(self, batch: Batch, draft_lengths: Sequence[int]) -> None:
        """Nothing to prepare."""

    def decode(self, batch: Batch) -> list[list[int]]:
        runner, rows = self.runner, batch.rows
        with self.phase("decode"):
            last = newest_tokens(batch, runner.device)
            logits = runner.forward(last, rows)
            tokens = next_tokens(runner, logits, choosing_of(runner, batch)).tolist()
        if self.drafter is not None:
            self.drafter.commit(rows, runner.cache.lengths_of(rows))
        ids: list[list[int]] = tokens
        return ids

    def draft(self, batch: Batch, num_draft_tokens: int) -> Proposal:
        assert self.drafter is not None, "what drafts has a drafter"
        with self.phase("draft"):
            return self.drafter.propose(batch, num_draft_tokens)

    def verify(self, batch: Batch, proposal: Proposal) -> list[list[int]]:
        assert self.drafter is not None, "what drafts has a drafter"
        runner, rows = self.runner, batch.rows
        before = [runner.cache.lengths[row] for row in rows]
        with self.phase("verify"):
            tokens = torch.cat([newest_tokens(batch, runner.device), proposal.ids], dim=1)
            logits = runner.forward(tokens, rows, watch=self.drafter.watch)
            count, ids = judge(runner, choosing_of(runner, batch), proposal, logits)
            verdict: list[list[int]] = torch.cat([count.unsqueeze(1), ids], dim=1).tolist()
        # What stays cached is the last token and the accepted drafts; the newest emitted token is
        # not cached yet.
        lengths = [b + 1 + row[0] for b, row in zip(before, verdict, strict=True)]
        runner.truncate(rows, lengths)
        self.drafter.commit(rows, lengths)
        return verdict

    def undo(self, batch: Batch, lengths: Sequence[int]) -> None:
        self.runner.truncate(batch.rows, lengths)
        if self.drafter is not None:
            self.drafter.commit(batch.rows, lengths)


def make_steps(setup: Setup, drafter: Drafter | None = None) -> Steps:
    """Replayed, if there is a recorder."""
    if setup.recorder is None:
        return EagerSteps(setup.runner, drafter, setup.phase)
    return ReplayedSteps(setup.runner, drafter, setup.phase, setup.recorder)
