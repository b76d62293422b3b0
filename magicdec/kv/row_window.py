"""The window of rows: which rows move so that the rows that are taken become adjacent.

Owns the rule. Must not know what moves with a row. Imports no torch. Source: the memory shuffle of
Flover (Yao et al. 2023), in which the fewest rows move.
"""

from __future__ import annotations

from collections.abc import Sequence


def window_moves(is_taken: Sequence[bool]) -> list[tuple[int, int]]:
    """The moves (source, target) after which the rows that are taken are adjacent. The window is
    the first one of their number that has most of them; the others move into its free rows in
    ascending order. None move if they are adjacent already."""
    taken = [row for row, one in enumerate(is_taken) if one]
    if not taken or taken[-1] - taken[0] + 1 == len(taken):
        return []
    size = len(taken)
    before = [0]  # the number of taken rows before each row
    for one in is_taken:
        before.append(before[-1] + one)
    starts = range(len(is_taken) - size + 1)
    start = max(starts, key=lambda row: before[row + size] - before[row])
    window = range(start, start + size)
    free = [row for row in window if not is_taken[row]]
    outside = [row for row in taken if row not in window]
    return list(zip(outside, free, strict=True))
