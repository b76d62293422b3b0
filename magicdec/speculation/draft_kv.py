"""DraftKV: the part of the context that a drafting model reads, and the place where the K and V of
its drafts are kept until the verification; and the loop in which a model drafts with it.

Every KV policy makes its own (`KVPolicy.draft_kv`). The class here serves policies whose choice
follows from lengths alone: a draft reads the runner's own cache through a view, and nothing is
copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from magicdec.kv.cache import BatchRows, Lengths, Rows
from magicdec.kv.view import Visible
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.native_steps.executor import AttentionObserver
from magicdec.runner.request import Request
from magicdec.runner.sampling.metadata import SamplingMetadata
from magicdec.runner.sampling.model_tokens import Proposal, confidence, draft_token


class DraftKV:
    """All lengths count tokens of the context, wherever their K and V are kept. For a request the
    order of calls is: `admit`; for each step `prepare`, `follow`, forwards, `rewind`, a
    verification by the target, and `commit`; at the end `release`. `prepare` is the host phase. The
    methods from `follow` to `commit` work on tensors only, so that steps can be captured."""

    watch: AttentionObserver | None = None
    """Called with the attention weights of each layer of a verification."""
    watch_queries: AttentionObserver | None = None
    """Called with the queries of each layer of a verification."""

    def __init__(self, runner: ModelRunner, visible: Visible) -> None:
        self.runner = runner
        self.visible = visible

    @property
    def state(self) -> list[Tensor]:
        """Tensors other than the caches which a verification writes and later drafts read."""
        return []

    def admit(self, requests: Sequence[Request]) -> None:
        """The prompts of `requests` are in the runner's cache."""

    def release(self, rows: Sequence[int]) -> None:
        """The requests in `rows` have ended."""

    def prepare(self, requests: Sequence[Request], gamma: int) -> None:
        """The host phase before `gamma` tokens are drafted for `requests`."""

    def follow(self, rows: BatchRows, most: int) -> None:
        """If the policy keeps a copy of K and V, copy those of the tokens that the target has
        committed since the last draft, at most `most` of each row."""

    def lengths(self, rows: Rows) -> Lengths:
        """The number of tokens of context of each row after which the next forward continues."""
        return self.runner.cache.lengths_of(BatchRows.of(rows, self.runner.device))

    def forward(
        self,
        token_ids: Tensor,
        rows: Rows,
        committed: Lengths,
        num_outputs: int | None = None,
    ) -> Tensor:
        """This rank's logits [B, T, V] of token_ids [B, T], appended to `rows`, or those of the
        last `num_outputs` tokens alone. The policy chooses among the first `committed` tokens of
        each row; all tokens after them are read. `committed` is one object for all forwards between
        two verifications."""
        num_held = self.held(rows, committed)
        visible = self.select(rows, committed)
        return self.runner.forward(
            token_ids, rows, visible, num_held, num_outputs=num_outputs, is_draft=True
        )

    def chain(
        self, token_ids: Tensor, rows: Rows, committed: Lengths, count: int, pa: float
    ) -> Tensor:
        """What `draft_chain` returns for greedy requests, from a runner that can chain."""
        return self.runner.draft(
            token_ids, rows, self.select(rows, committed), self.held(rows, committed), count, pa
        )

    def held(self, rows: Rows, committed: Lengths) -> Lengths:
        """The number of entries of the runner's cache that the first `committed` tokens of context
        have."""
        return committed

    def select(self, rows: Rows, committed: Lengths) -> Visible:
        """What forwards over `rows` see of their first `committed` tokens."""
        return self.visible

    def rewind(self, rows: Rows, lengths: Lengths) -> None:
        """Forget the tokens of `rows` after the first `lengths` tokens of context."""
        self.runner.truncate(rows, self.held(rows, lengths))

    def commit(self, rows: BatchRows, lengths: Lengths) -> None:
        """A verification has ended. The target now holds `lengths` committed tokens of `rows`."""


def draft_chain(
    kv: DraftKV,
    rows: BatchRows,
    committed: Lengths,
    newest: Tensor,
    sampling: SamplingMetadata,
    count: int,
    pa: float = 0.0,
) -> Proposal:
    """Draft `count` tokens of each row, one after the other, after its newest tokens [B, T]. Before
    the call the cache holds the `committed` tokens. The call appends `newest` and all drafts but
    the last, uncommitted.

    A row's chain stops behind a token if the likeliest token at its place was less probable than
    `pa`; when those of all rows have stopped, no more is drafted. What was drafted is kept: it
    would bias the draws of sampled rows to drop tokens for what they are."""
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
