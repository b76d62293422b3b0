"""Texts that have come, by their token ids: with how many of them a new text begins alike."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

TokenIds = tuple[int, ...]


class SeenTexts:
    """The texts in the order of their ids, in which the one that has most in common with a new text
    stands beside its place."""

    def __init__(self) -> None:
        self._sorted = list[TokenIds]()

    def add(self, ids: TokenIds) -> int:
        """Takes a text. Returns the tokens with which it begins as one that was taken before."""
        place = bisect_left(self._sorted, ids)
        beside = self._sorted[max(0, place - 1) : place + 1]
        self._sorted.insert(place, ids)
        return max((num_in_common(ids, other) for other in beside), default=0)


def num_in_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The items with which both begin; slices are compared faster than items."""
    low = 0
    high = min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
