"""Which tests `make test` runs, and the order of the test files, which two processes take one after
the other (see the Makefile).

Files that start several ranks, or other processes at once, are spread among the others, so that two
of them seldom run at once: ranks that wait for each other waste time where more of them run than
the machine has cores. The short files of `unit/` come last, so that both processes end at about the
same time; the file that plants faults takes minutes, and what would be the very last file half of
one: it comes first."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import Any

import pytest

SIZES = {"values": 1, "pairs": 2, "triples": 3}


def choose(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Mark every case that `make test` leaves out. Returns the cases that nothing runs."""
    groups = defaultdict(list)
    never = set()
    for item in items:
        if item.get_closest_marker("narrow") and not item.get_closest_marker("wide"):
            test = item.nodeid.partition("[")[0]
            groups[test, item.get_closest_marker("cuda") is not None].append(item)
    for cases in groups.values():
        marker = cases[0].get_closest_marker("narrow")
        assert marker is not None
        narrow, *widest = marker.args
        params = [case.callspec.params for case in cases]  # type: ignore[attr-defined]
        if widest:
            kept = covering(params, SIZES[widest[0]])
            never |= {case for index, case in enumerate(cases) if index not in kept}
            cases, params = ([values[i] for i in sorted(kept)] for values in (cases, params))
        if isinstance(narrow, int):
            kept = spread(len(cases), narrow)
        else:
            kept = covering(params, SIZES[narrow])
        for index, case in enumerate(cases):
            if index not in kept:
                case.add_marker(pytest.mark.wide)
    return never


def spread(num_cases: int, count: int) -> set[int]:
    """The places of `count` cases, evenly spread from the first one to the last."""
    steps = min(count, num_cases) - 1
    return {round((num_cases - 1) * place / max(1, steps)) for place in range(steps + 1)}


def covering(cases: Sequence[dict[str, Any]], size: int) -> set[int]:
    """The places of cases that together have every combination of `size` parameter values that
    occurs in `cases`: always the case next that adds most, the first of these."""
    covered = [combinations_of(case, min(size, len(case))) for case in cases]
    missing: set[Hashable] = set().union(*covered)
    kept = set()
    while missing:
        best = max(range(len(cases)), key=lambda index: (len(covered[index] & missing), -index))
        kept.add(best)
        missing -= covered[best]
    return kept


def nested(cases: Sequence[dict[str, Any]], size: int, widest: int) -> list[int]:
    """As `covering`, but of the cases that cover `widest`, in their order: where a test runs with
    both sizes, the smaller one adds no case."""
    kept = sorted(covering(cases, widest))
    return [kept[i] for i in sorted(covering([cases[i] for i in kept], size))]


def combinations_of(case: dict[str, Any], size: int) -> set[Hashable]:
    return set(combinations(sorted((name, repr(value)) for name, value in case.items()), size))


BETWEEN = 2  # files of one rank between two of several
LONG = "test_wheel.py"
SEVERAL = "test_planted_errors.py"  # the file of another folder that is like those of several ranks


def ordered(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The items in the order of their files. Items of one file stay in their order."""
    files = list(dict.fromkeys(item.path for item in items))
    several = [file for file in files if file.parent.name == "distributed" or file.name == SEVERAL]
    others = [file for file in files if file not in several]
    others.sort(key=lambda file: file.name != LONG)
    spread = [*others]
    for index, file in enumerate(several):
        spread.insert(index * (BETWEEN + 1), file)
    places = {file: place for place, file in enumerate(spread)}
    return sorted(items, key=lambda item: places[item.path])
