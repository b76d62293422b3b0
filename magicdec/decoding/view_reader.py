"""ViewReader: a draft reads the runner's own cache through a view; nothing is copied or kept."""

from __future__ import annotations

import torch
from torch import Tensor

from magicdec.kv.device_rows import DeviceRows, Lengths, Rows
from magicdec.kv.policy import RangePolicy
from magicdec.request import Batch
from magicdec.runner import ModelRunner


class ViewReader:
    """For policies whose choice is arithmetic on lengths (full, StreamingLLM)."""

    watch = memory = None

    def __init__(self, runner: ModelRunner, policy: RangePolicy) -> None:
        self.runner, self.policy = runner, policy

    @classmethod
    def build(
        cls, runner: ModelRunner, policy: RangePolicy, kv_dtype: torch.dtype | None
    ) -> ViewReader:
        return cls(runner, policy)

    def begin(self, batch: Batch) -> None:
        """Nothing to prepare."""

    def refresh(self, batch: Batch, num_draft_tokens: int, most_behind: int = 0) -> None:
        """The policy's arithmetic is always up to date."""

    def follow(self, rows: DeviceRows, most: int) -> None:
        """What drafts read is the runner's own cache."""

    def lengths(self, rows: Rows) -> Lengths:
        return self.runner.cache.lengths_of(rows)

    def forward(self, token_ids: Tensor, rows: Rows, settled: Lengths) -> Tensor:
        return self.runner.forward(token_ids, rows, self.policy, settled)

    def rewind(self, rows: Rows, lengths: Lengths) -> None:
        self.runner.truncate(rows, lengths)

    def commit(self, rows: Rows, lengths: Lengths) -> None:
        """The cache is the runner's own, and stands."""
