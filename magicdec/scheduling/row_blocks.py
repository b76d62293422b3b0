"""RowBlocks: how many blocks of the KV cache each row holds, and which rows need more.

Owns these counts; the cache itself gives the blocks. Must not know which request has a row. Imports
no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Collection

from magicdec.scheduling.plan import Limits


class RowBlocks:
    """Without `Limits.num_blocks` every row has room for its whole request, and nothing is
    counted."""

    def __init__(self, num_rows: int, limits: Limits) -> None:
        self.limits, self.is_limited = limits, limits.num_blocks is not None
        self.held = [0] * num_rows
        # The most cached tokens of a row for which its blocks have room for one more step.
        self._enough = [0 if self.is_limited else sys.maxsize] * num_rows
        self.short: dict[int, int] = {}  # row: the tokens that it must have room for; it has not

    def free(self, leaving: Collection[int] = ()) -> int:
        """The blocks that no row holds when the rows that are `leaving` have given theirs back."""
        assert self.limits.num_blocks is not None, "asked only if blocks are limited"
        return self.limits.num_blocks - sum(self.held) + sum(self.held[row] for row in leaving)

    def lacking(self, row: int, num_tokens: int) -> int:
        """The blocks that a row lacks for `num_tokens` tokens."""
        return self.limits.num_blocks_of(num_tokens) - self.held[row]

    def grow(self, row: int, num_cached: int) -> None:
        """A row holds `num_cached` tokens before its next step."""
        if num_cached > self._enough[row]:
            self.short[row] = num_cached + self.limits.step_tokens

    def reserve(self, row: int, num_tokens: int) -> None:
        self.held[row] = held = self.limits.num_blocks_of(num_tokens)
        self._enough[row] = held * self.limits.block_size - self.limits.step_tokens
        self.short.pop(row, None)

    def move(self, source: int, target: int) -> None:
        self.held[target], self._enough[target] = self.held[source], self._enough[source]
        if source in self.short:
            self.short[target] = self.short[source]
        self.release(source)

    def release(self, row: int) -> None:
        self.held[row] = 0
        self.short.pop(row, None)
