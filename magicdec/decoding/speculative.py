"""Speculative decoding: propose, verify all proposals in one forward, keep each row's accepted
prefix and one token more. Greedy requests take their own branch, exact; others are judged by
rejection sampling. A step without proposals is a step of autoregressive decoding.

Source: Leviathan et al. 2023, algorithm 1; ragged over the batch as in MagicDec (Chen et al. 2024).
"""

from __future__ import annotations

import time
from statistics import median

import torch
from torch import Tensor

from magicdec.decoding.draft_length import DraftLength, make_draft_length
from magicdec.decoding.drafter import Drafter, Proposal, make_drafter
from magicdec.decoding.randomness import Purpose, uniforms_ahead
from magicdec.decoding.sampling import count_accepted, probabilities
from magicdec.decoding.strategy import (
    Phase,
    Setup,
    choose,
    newest_tokens,
    next_tokens,
    untimed,
    whole_logits,
)
from magicdec.decoding.verification import verify
from magicdec.request import Batch, StepOutput
from magicdec.runner import ModelRunner

REPEATS = 5  # of each timing before decoding


class Speculative:
    """As many proposals a row a step as `draft_length` says, from any drafter."""

    def __init__(
        self,
        runner: ModelRunner,
        drafter: Drafter,
        draft_length: DraftLength,
        phase: Phase = untimed,
    ) -> None:
        self.runner, self.drafter = runner, drafter
        self.draft_length, self.phase = draft_length, phase

    @classmethod
    def build(cls, setup: Setup) -> Speculative:
        assert setup.decoding.drafter is not None, "a speculative run names its drafter"
        drafter = make_drafter(setup.decoding.drafter, setup)
        runner = setup.runner
        length = setup.draft_length or make_draft_length(
            setup.decoding, runner.group, runner.device
        )
        return cls(runner, drafter, length, setup.phase)

    def begin(self, batch: Batch) -> None:
        self.drafter.begin(batch)
        self.draft_length.begin(batch, self.measure)

    def step(self, batch: Batch) -> StepOutput:
        """Every row emits 1 token, and one more for each draft that it accepts."""
        count = self.draft_length.choose(batch)
        started = time.perf_counter()
        output = self._speculate(batch, count) if count else self._decode(batch)
        seconds = time.perf_counter() - started
        self.draft_length.observe(batch, count, output.num_accepted or (), seconds)
        return output

    def _decode(self, batch: Batch) -> StepOutput:
        runner, rows = self.runner, batch.rows
        last = newest_tokens(batch, runner.device)
        with self.phase("decode"):
            tokens = next_tokens(runner, runner.forward(last, rows), batch.requests).tolist()
        self.drafter.commit(rows, [runner.cache.lengths[row] for row in rows])
        return StepOutput(tokens)

    def _speculate(self, batch: Batch, num_draft_tokens: int) -> StepOutput:
        """One verification. One read by the host."""
        runner, rows = self.runner, batch.rows
        before = [runner.cache.lengths[row] for row in rows]
        last = newest_tokens(batch, runner.device)
        with self.phase("draft"):
            proposal = self.drafter.propose(batch, num_draft_tokens)
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
        return StepOutput(emitted, num_draft_tokens, accepted)

    def measure(self, batch: Batch) -> list[float]:
        """Seconds of a step of `batch` with 0, 1, ..., most draft tokens; changes nothing. Drafting
        is taken to be linear in their number, verification is measured for each."""
        most, rows, cache = self.draft_length.most, batch.rows, self.runner.cache
        before = [cache.lengths[row] for row in rows]
        draft_s: dict[int, list[float]] = {1: [], most: []}
        verify_s: list[list[float]] = [[] for _ in range(most + 1)]
        last = newest_tokens(batch, self.runner.device)
        for _ in range(REPEATS):
            for count in draft_s:
                started = time.perf_counter()
                proposal = self.drafter.propose(batch, count)
                proposal.ids.tolist()  # waits for the device
                draft_s[count].append(time.perf_counter() - started)
                self.drafter.commit(rows, before)
            for count in range(most + 1):
                ids, probs = proposal.ids[:, :count], proposal.probabilities
                part = Proposal(ids, None if probs is None else probs[:, :count])
                started = time.perf_counter()
                logits = self.runner.forward(torch.cat([last, ids], dim=1), rows)
                if count:
                    self._judge(batch, part, logits)[1].tolist()
                else:
                    next_tokens(self.runner, logits, batch.requests).tolist()
                verify_s[count].append(time.perf_counter() - started)
                self.runner.truncate(rows, before)
        first, last_draft = median(draft_s[1]), median(draft_s[most])
        each = (last_draft - first) / max(1, most - 1)
        return [
            median(seconds) + (first + each * (count - 1) if count else 0.0)
            for count, seconds in enumerate(verify_s)
        ]

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
