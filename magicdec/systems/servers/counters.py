"""Counters: the counters of a server in Prometheus's text format, and their differences around a
pass. Imports no torch."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from magicdec.records.acceptance import ReportedCounts

# A sample: name, labels, value, and perhaps a time
# (https://prometheus.io/docs/instrumenting/exposition_formats/).
SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?")
POSITION = re.compile(r'(?:^|,)\s*position="(\d{1,4})"')
COUNTER = "_total"  # the end of the name of a counter
STARTED = "process_start_time_seconds"


@dataclass(frozen=True)
class Counters:
    """Values by name and, of drafts, their position (None without one), summed over other
    labels."""

    values: dict[tuple[str, int | None], float]
    started_s: float | None = None  # when the process began that counts, if it says so

    @classmethod
    def read(cls, text: str) -> Counters:
        values = defaultdict[tuple[str, int | None], float](float)
        started_s = None
        for line in text.splitlines():
            sample = SAMPLE.fullmatch(line.strip())
            if sample is None:
                continue  # a comment, an empty line, or no metrics at all
            name, labels, value = sample.groups()
            try:
                number = float(value)
            except ValueError:
                continue
            if name == STARTED:
                started_s = number
            if name.endswith(COUNTER):
                found = POSITION.search(labels or "")
                values[name, None if found is None else int(found[1])] += number
        return cls(dict(values), started_s)

    def begins_with(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name, _ in self.values)

    def since(self, before: Counters) -> Counters:
        """What was counted since. Raises ValueError, one sentence, if counting began anew."""
        if self.started_s != before.started_s:
            raise ValueError("the server has restarted while it was measured")
        for key, value in before.values.items():
            now = self.values.get(key, -math.inf)
            if not now >= value:
                shown = "is gone" if math.isinf(now) else f"went from {value:g} to {now:g}"
                raise ValueError(f"{key[0]} {shown}, so that the server has restarted meanwhile")
        return Counters(
            {key: value - before.values.get(key, 0.0) for key, value in self.values.items()}
        )

    def count(self, name: str) -> int | None:
        """The count of that name; None if there is no such counter. Raises ValueError for a number
        that is no count."""
        value = self.values.get((name, None))
        return None if value is None else _whole(name, value)

    def by_position(self, name: str) -> list[int]:
        """The counts of that name at the positions 0, 1, ... as far as they go."""
        found = list[int]()
        while (value := self.values.get((name, len(found)))) is not None:
            found.append(_whole(name, value))
        return found


def _whole(name: str, value: float) -> int:
    if not value.is_integer():
        raise ValueError(f"{name} has grown by {value:g}, which is no count")
    return int(value)


def drafts_counted(prefix: str, counted: Counters) -> ReportedCounts | None:
    """The counts of vLLM's counters of drafts, under this or another program's prefix; None without
    them."""
    name = f"{prefix}spec_decode_num"
    verified = counted.count(f"{name}_drafts{COUNTER}")
    if verified is None:
        return None
    survivors = counted.by_position(f"{name}_accepted_tokens_per_pos{COUNTER}")
    histogram = None
    if survivors:
        ends = pairwise((verified, *survivors, 0))
        histogram = tuple(more - less for more, less in ends)
        if min(histogram) < 0:
            raise ValueError("more drafts were accepted at a position than at the one before")
    return ReportedCounts(
        counted.count(f"{name}_draft_tokens{COUNTER}"),
        counted.count(f"{name}_accepted_tokens{COUNTER}"),
        verified,
        histogram=histogram,
    )
