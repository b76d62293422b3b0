"""DraftKV: the context that a drafting model reads, the K and V of its drafts, and the drafting
loop.

The base class serves policies whose choice follows from lengths alone: a draft reads a view of the
runner's own cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from magicdec.kv.cache import BatchRows, Lengths, Rows
from magicdec.kv.view import Visible
from magicdec.runner.forward_batch import ForwardBatch, ForwardObserver
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.request import Request
from magicdec.runner.sampling.metadata import SamplingMetadata
from magicdec.runner.sampling.model_tokens import Proposal, confidence, draft_token


class DraftKV:
    """The KV cache of a drafting model. Lengths count tokens of context, wherever their K and V
    are.

    Order of calls for a request: `admit`; for each step `prepare` (on the host), `follow`,
    forwards, `rewind`, a verification by the target, `commit`; at the end `release`. From
    `follow` to `commit` work is on tensors alone, so that steps can be captured."""

    observers: Sequence[ForwardObserver] = ()
    """They see verifications."""

    def __init__(self, runner: ModelRunner, visible: Visible) -> None:
        self.runner = runner
        self.visible = visible

    @property
    def state(self) -> list[Tensor]:
        """Tensors beside the caches that a verification writes and drafts read."""
        return []

    def admit(self, requests: Sequence[Request]) -> None:
        """Take in `requests`, whose prompts are in the runner's cache."""

    def fork(self, forks: Sequence[Request], texts: Sequence[Request]) -> None:
        """Take in `forks` (see `Drafter.fork`), which the runner's own cache has."""

    def release(self, rows: Sequence[int]) -> None:
        """Forget the ended requests in `rows`."""

    def prepare(self, requests: Sequence[Request], gamma: int) -> None:
        """The host phase before a draft."""

    def follow(self, rows: BatchRows, most: int) -> None:
        """Copy the K and V of at most `most` newly committed tokens of a row, if the policy
        keeps a copy."""

    def lengths(self, rows: Rows) -> Lengths:
        """The context lengths after which the next forward continues."""
        return self.runner.cache.lengths_of(BatchRows.of(rows, self.runner.device))

    def forward(
        self,
        token_ids: Tensor,
        rows: Rows,
        committed: Lengths,
        num_outputs: int | None = None,
    ) -> Tensor:
        """Append token_ids [B, T] to `rows`. Returns this rank's logits [B, T, V], or those of
        the last `num_outputs` tokens.

        The policy chooses among the first `committed` tokens; later ones are all read. All
        forwards between two verifications pass the same `committed` object."""
        return self.runner.forward(self.batch(token_ids, rows, committed, num_outputs))

    def chain(
        self, token_ids: Tensor, rows: Rows, committed: Lengths, count: int, pa: float
    ) -> Tensor:
        """The ids of `draft_chain` for greedy requests of a runner that can chain."""
        return self.runner.draft(self.batch(token_ids, rows, committed), count, pa)

    def batch(
        self, token_ids: Tensor, rows: Rows, committed: Lengths, num_outputs: int | None = None
    ) -> ForwardBatch:
        """Token ids [B, T] after the first `committed` tokens, among which the policy chooses."""
        return ForwardBatch(
            token_ids,
            rows,
            policy=self.select(rows, committed),
            committed=self.held(rows, committed),
            num_outputs=num_outputs,
            is_draft=True,
        )

    def held(self, rows: Rows, committed: Lengths) -> Lengths:
        """The numbers of cache entries of the first `committed` tokens."""
        return committed

    def select(self, rows: Rows, committed: Lengths) -> Visible:
        """The view of the first `committed` tokens."""
        return self.visible

    def rewind(self, rows: Rows, lengths: Lengths) -> None:
        """Forget tokens after the first `lengths` of context."""
        self.runner.truncate(rows, self.held(rows, lengths))

    def commit(self, rows: BatchRows, lengths: Lengths) -> None:
        """Follow a verification that left `lengths` committed tokens in the target's cache."""


def draft_chain(
    kv: DraftKV,
    rows: BatchRows,
    committed: Lengths,
    newest: Tensor,
    sampling: SamplingMetadata,
    count: int,
    pa: float = 0.0,
) -> Proposal:
    """Draft up to `count` tokens of each row after its newest tokens [B, T].

    Appends `newest` and all drafts but the last, uncommitted, to a cache of the `committed`
    tokens. A row's chain stops behind a place whose likeliest token was less probable than `pa`;
    drafting ends when all chains have stopped. Tokens beyond a stop are kept: dropping tokens by
    their value would bias sampled rows."""
    if sampling.is_greedy and kv.runner.can_chain:
        return Proposal(kv.chain(newest, rows, committed, count, pa))
    drafts = newest[:, :0]
    drawn_from = []
    goes_on = None
    for _ in range(count):
        logits = kv.forward(newest, rows, committed, num_outputs=1)
        newest, probs = draft_token(kv.runner, logits, sampling, drafts)
        drafts = torch.cat([drafts, newest], dim=1)
        drawn_from += [] if probs is None else [probs]
        if pa > 0:
            is_sure = confidence(kv.runner, logits) >= pa
            goes_on = is_sure if goes_on is None else goes_on & is_sure
            if not goes_on.any():
                break
    return Proposal(drafts, torch.cat(drawn_from, dim=1) if drawn_from else None)
