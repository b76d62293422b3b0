"""Which cases of a parametrised test `make test` runs; `make test-all` runs every case.

`@pytest.mark.narrow("pairs")` keeps cases that together have every pair of parameter values,
`@pytest.mark.narrow("values")` cases that together have every value. The others are marked `wide`.
Other tests and cases carry that mark themselves. Cases of `interpreted` Triton kernels are slow:
they are chosen apart, by value. Cases that need a GPU are chosen apart, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import Any

import pytest

SIZES = {"values": 1, "pairs": 2}
APART = ("cuda", "interpreted")


def mark_wide(items: Sequence[pytest.Item]) -> None:
    """Mark every case that `make test` leaves out."""
    groups = defaultdict(list)
    for item in items:
        if item.get_closest_marker("narrow") and not item.get_closest_marker("wide"):
            test = item.nodeid.partition("[")[0]
            is_apart = (item.get_closest_marker(name) is not None for name in APART)
            groups[(test, *is_apart)].append(item)
    for (_, _, is_interpreted), cases in groups.items():
        marker = cases[0].get_closest_marker("narrow")
        assert marker is not None
        size = 1 if is_interpreted else SIZES[marker.args[0]]
        kept = covering([case.callspec.params for case in cases], size)  # type: ignore[attr-defined]
        for index, case in enumerate(cases):
            if index not in kept:
                case.add_marker(pytest.mark.wide)


def covering(cases: Sequence[dict[str, Any]], size: int) -> set[int]:
    """The places of cases that together have every combination of `size` parameter values that
    occurs in `cases`: always the case next that adds most, the first of these."""
    each = [combinations_of(case, min(size, len(case))) for case in cases]
    missing: set[Hashable] = set().union(*each)
    kept = set()
    while missing:
        best = max(range(len(cases)), key=lambda index: (len(each[index] & missing), -index))
        kept.add(best)
        missing -= each[best]
    return kept


def combinations_of(case: dict[str, Any], size: int) -> set[Hashable]:
    return set(combinations(sorted((name, repr(value)) for name, value in case.items()), size))
