"""The cells of one lane: the KV slots of one request, the same on every stage.

Cell p is the home of position p. Cells past the last position are spare: they hold branches whose
home is taken. A free cell is given to a later run only, and every stage runs in order, so an
earlier reader has read before it is written again.

Must not know tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from magicdec.pipelined_speculation.messages import Ranges


class Cells:
    def __init__(self, num_positions: int, num_spare: int) -> None:
        self.num_positions = num_positions
        self.taken: set[int] = set()  # homes
        self.spare = list(range(num_positions, num_positions + num_spare))

    def take(self, position: int) -> int | None:
        """The home of the position, or else a spare cell; None if there is none."""
        if position not in self.taken:
            self.taken.add(position)
            return position
        return heapq.heappop(self.spare) if self.spare else None

    def give(self, cell: int) -> None:
        """The cell is free again."""
        if cell < self.num_positions:
            self.taken.remove(cell)
        else:
            heapq.heappush(self.spare, cell)


def to_ranges(prefix: int, cells: Iterable[int]) -> Ranges:
    """The cells below `prefix` and `cells`, as ascending (first, end) pairs."""
    ranges = [[0, prefix]] if prefix else []
    for cell in sorted(cells):
        if ranges and ranges[-1][1] == cell:
            ranges[-1][1] = cell + 1
        else:
            ranges.append([cell, cell + 1])
    return tuple((first, end) for first, end in ranges)
