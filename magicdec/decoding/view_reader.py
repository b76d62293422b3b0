"""ViewReader: a draft reads the runner's own cache through a view; nothing is copied or kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from magicdec.kv.policy import RangePolicy
from magicdec.request import Batch
from magicdec.runner import ModelRunner


class ViewReader:
    """For policies whose choice is arithmetic on lengths (full, StreamingLLM)."""

    watch = None

    def __init__(self, runner: ModelRunner, policy: RangePolicy) -> None:
        self.runner, self.policy = runner, policy

    @classmethod
    def build(
        cls, runner: ModelRunner, policy: RangePolicy, kv_dtype: torch.dtype | None
    ) -> ViewReader:
        return cls(runner, policy)

    def begin(self, batch: Batch) -> None:
        """Nothing to prepare."""

    def refresh(self, batch: Batch, num_draft_tokens: int) -> None:
        """The policy's arithmetic is always up to date."""

    def lengths(self, rows: Sequence[int]) -> list[int]:
        return [self.runner.cache.lengths[row] for row in rows]

    def forward(self, token_ids: Tensor, rows: Sequence[int], settled: Sequence[int]) -> Tensor:
        return self.runner.forward(token_ids, rows, self.policy, settled)

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self.runner.truncate(rows, lengths)

    def commit(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """The cache is the runner's own, and stands."""
