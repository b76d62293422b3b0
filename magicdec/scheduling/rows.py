"""The rows of the KV cache as the scheduler counts them: how many blocks each holds and which need
more (`RowBlocks`; the cache itself gives the blocks), and which rows move so that the rows that are
taken become adjacent (`window_moves`). Imports no torch. Source: the memory shuffle of Flover (Yao
et al. 2023), in which the fewest rows move.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

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
        self.held[row] = num_blocks = self.limits.num_blocks_of(num_tokens)
        self._enough[row] = num_blocks * self.limits.block_size - self.limits.step_tokens
        self.short.pop(row, None)

    def move(self, source: int, target: int) -> None:
        self.held[target], self._enough[target] = self.held[source], self._enough[source]
        if source in self.short:
            self.short[target] = self.short[source]
        self.release(source)

    def release(self, row: int) -> None:
        self.held[row] = 0
        self.short.pop(row, None)


def window_moves(is_taken: Sequence[bool]) -> list[tuple[int, int]]:
    """The moves (source, target) after which the rows that are taken are adjacent. The window is
    the first one of their number that has most of them; the others move into its free rows in
    ascending order. None move if they are adjacent already."""
    taken_rows = [row for row, one in enumerate(is_taken) if one]
    if not taken_rows or taken_rows[-1] - taken_rows[0] + 1 == len(taken_rows):
        return []
    size = len(taken_rows)
    before = [0]  # the number of taken rows before each row
    for one in is_taken:
        before.append(before[-1] + one)
    starts = range(len(is_taken) - size + 1)
    start = max(starts, key=lambda row: before[row + size] - before[row])
    window = range(start, start + size)
    free = [row for row in window if not is_taken[row]]
    outside = [row for row in taken_rows if row not in window]
    return list(zip(outside, free, strict=True))
