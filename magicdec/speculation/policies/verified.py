"""VerifiedKV: the blocks with the largest attention in the last verification, by layer and KV head.

Sources: Vegas, arXiv 2602.07223; SparseSpec, arXiv 2512.01278 (PillarAttn).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from magicdec.config.capabilities import MOST_WATCHED
from magicdec.config.sections import KVSection
from magicdec.kv.cache import BatchRows, Lengths, upload
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.observers.attention import AttentionWeights
from magicdec.runner.request import Request
from magicdec.speculation.block_kv import BlockKV, BlockSelection
from magicdec.speculation.draft_kv import DraftKV
from magicdec.speculation.observation import newest_cached, rerun_tail

RERUN_TOKENS = 16  # newest prompt tokens that run again for the first choice


@dataclass(frozen=True)
class VerifiedKV(BlockSelection):
    """A policy that scores blocks by received attention weights, summed over the tokens of the
    last verification and the query heads of a KV head."""

    needs_weights: ClassVar[bool] = True

    @classmethod
    def check(cls, kv: KVSection, gamma: int, flag: str | None) -> None:
        super().check(kv, gamma, flag)
        if gamma >= MOST_WATCHED:
            raise ValueError(
                f"{gamma} draft tokens (--gamma) are too many for --kv_policy "
                f"{kv.policy}; it takes at most {MOST_WATCHED - 1}"
            )

    def rerun_tokens(self, context: int) -> int:
        return min(RERUN_TOKENS, context)

    def state_numbers(self, num_blocks: int, head_dim: int, queries_per_head: int) -> int:
        return num_blocks

    def draft_kv(self, runner: ModelRunner) -> DraftKV:
        return WeighedBlocks(runner, self)


class WeighedBlocks(BlockKV):
    """A draft KV with an attention weight for each block."""

    def __init__(self, runner: ModelRunner, policy: BlockSelection) -> None:
        super().__init__(runner, policy)
        shape = runner.cache.shape
        self._weights = torch.zeros(
            shape.num_layers,
            runner.num_rows,
            shape.num_kv_heads,
            self.num_blocks,
            device=runner.device,
        )
        self._seen = AttentionWeights()  # of the last verification's rows
        self.observers = (self._seen,)

    def admit(self, requests: Sequence[Request]) -> None:
        """Run the newest tokens of long prompts again to observe their attention."""
        runner = self.runner
        self._choice = None
        new = upload([r.row for r in requests if r.row is not None], runner.device)
        self._weights.index_fill_(1, new, 0)
        long = [r for r in requests if r.row is not None and r.num_cached > self.policy.budget]
        if not long:
            return
        rows = BatchRows.of([r.row for r in long if r.row is not None], runner.device)
        lengths = runner.cache.lengths_of(rows)
        count = self.policy.rerun_tokens(min(lengths.bounds))
        rerun_tail(runner, rows, newest_cached(long, count, runner.device), self._seen)
        self.commit(rows, lengths)

    @property
    def state(self) -> list[Tensor]:
        return [self._weights]

    def scores(self, rows: BatchRows, committed: Lengths, num_blocks: int) -> tuple[Tensor, Tensor]:
        return self._weights, rows.index

    def commit(self, rows: BatchRows, lengths: Lengths) -> None:
        for number, weights in self.in_widest(self._seen.layers):
            self._weights[number, :, :, : weights.shape[2]].index_copy_(0, rows.index, weights)
        self._seen.layers.clear()
        super().commit(rows, lengths)
