"""The order of the test files, which two processes take one after the other (see the Makefile).

Files that start several ranks are spread among the others, so that two of them seldom run at once:
ranks that wait for each other waste time where more of them run than the machine has cores. The
short files of `unit/` come last, so that both processes end at about the same time.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

BETWEEN = 2  # files of one rank between two of several


def ordered(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The items in the order of their files. Items of one file stay in their order."""
    files = list(dict.fromkeys(item.path for item in items))
    several = [file for file in files if file.parent.name == "distributed"]
    others = [file for file in files if file.parent.name != "distributed"]
    spread = [*others]
    for index, file in enumerate(several):
        spread.insert(index * (BETWEEN + 1), file)
    places = {file: place for place, file in enumerate(spread)}
    return sorted(items, key=lambda item: places[item.path])
