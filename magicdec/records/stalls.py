"""Stalls: decode steps that took far longer than others of their kind, because the machine did
something else.

Steps of a kind have equal numbers of prompt tokens, forwards, draft tokens and rows. A step is
judged by the median of the nearest steps of its kind in its group, so that growing contexts and a
slowing machine are no stalls. It stalled if it took more than `FACTOR` times that median, and more
than `SPREADS` times the spread of the pass's steps above it on the log scale. docs/results.md says
what these bounds find on a quiet machine.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from magicdec.records.pass_record import GroupRecord

FACTOR = 3.0
SPREADS = 6.0
FEWEST = 8  # steps of a kind that have a median of their own
NEAREST = 31  # steps of a kind that the median is of
TO_DEVIATION = 1.4826  # from the median of absolute deviations to the standard deviation

StepKind = tuple[int, int, int, int]
"""Prompt tokens, forwards, draft tokens of the row with the most, and rows of a step; 0 where it is
not known."""
Place = tuple[int, int]
"""Group and step."""


@dataclass(frozen=True)
class Stall:
    place: Place
    ms: float
    median_ms: float

    @property
    def lost_ms(self) -> float:
        return self.ms - self.median_ms


@dataclass(frozen=True)
class PassSteps:
    step_ms: Sequence[Sequence[float]]  # by group and step
    kinds: Mapping[StepKind, Sequence[Place]]  # the places of its steps, in order

    @classmethod
    def of(cls, groups: Sequence[GroupRecord]) -> PassSteps:
        kinds = defaultdict[StepKind, list[Place]](list)
        for number, group in enumerate(groups):
            for step, kind in enumerate(kinds_of(group)):
                kinds[kind].append((number, step))
        return cls([group.step_ms for group in groups], kinds)

    @property
    def num_steps(self) -> int:
        return sum(map(len, self.step_ms))

    @cached_property
    def stalls(self) -> list[Stall]:
        medians = self._medians()
        if not medians:
            return []
        rare_medians = self._medians_of_rare()
        logs = [abs(math.log(self._ms(place) / median)) for place, median in medians.items()]
        spread = TO_DEVIATION * float(np.median(logs))
        bound = max(FACTOR, math.exp(min(SPREADS * spread, 300.0)))
        found = [
            Stall(place, self._ms(place), median)
            for place, median in (medians | rare_medians).items()
            if self._ms(place) > bound * median
        ]
        return sorted(found, key=lambda stall: stall.place)

    @cached_property
    def steady_ms(self) -> list[float]:
        """The time of each group's steps, with the median of its kind for a stalled one."""
        times = [sum(group) for group in self.step_ms]
        for stall in self.stalls:
            times[stall.place[0]] -= stall.lost_ms
        return times

    def _ms(self, place: Place) -> float:
        group, step = place
        return self.step_ms[group][step]

    def _medians(self) -> dict[Place, float]:
        """Medians over the nearest steps in the group, or over all groups where the group has too
        few."""
        medians = dict[Place, float]()
        for places in self.kinds.values():
            if len(places) < FEWEST:
                continue
            median_ms = float(np.median([self._ms(place) for place in places]))
            by_group = defaultdict[int, list[Place]](list)
            for place in places:
                by_group[place[0]].append(place)
            for inside in by_group.values():
                times = [self._ms(place) for place in inside]
                few = len(inside) < FEWEST
                medians |= zip(
                    inside, [median_ms] * len(inside) if few else running(times), strict=True
                )
        return {place: median for place, median in medians.items() if median > 0}

    def _medians_of_rare(self) -> dict[Place, float]:
        """For steps of rare kinds the smallest median of the kinds that do at least as much."""
        known = {
            kind: float(np.median([self._ms(place) for place in places]))
            for kind, places in self.kinds.items()
            if len(places) >= FEWEST
        }
        medians = dict[Place, float]()
        for kind, places in self.kinds.items():
            more = [ms for other, ms in known.items() if does_as_much(other, kind) and ms > 0]
            if kind not in known and more:
                medians |= dict.fromkeys(places, min(more))
        return medians


def running(times: Sequence[float]) -> list[float]:
    """For each time the median of the `NEAREST` around it; near the ends that of the first or last
    ones."""
    count = min(NEAREST, len(times))
    windows = np.lib.stride_tricks.sliding_window_view(np.array(times), count)
    middle = np.median(windows, axis=1)
    before = (count - 1) // 2
    return np.pad(middle, (before, count - 1 - before), mode="edge").tolist()


def does_as_much(kind: StepKind, other: StepKind) -> bool:
    return all(a >= b for a, b in zip(kind, other, strict=True))


def kinds_of(group: GroupRecord) -> list[StepKind]:
    unknown = [0] * len(group.step_ms)
    columns = (
        group.step_prompt_tokens or unknown,
        group.step_forwards or unknown,
        group.step_max_gamma or unknown,
        group.step_rows or unknown,
    )
    return list(zip(*columns, strict=True))
