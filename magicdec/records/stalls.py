"""Stalls: decode steps that took far longer than others of their kind, because the machine did
something else.

Steps of a kind have equal numbers of forwards, draft tokens and rows. A step is judged by the
median of the nearest steps of its kind in its batch, so that growing contexts and a slowing machine
are no stalls. It stalled if it took more than `FACTOR` times that median, and more than `SPREADS`
times the spread of the pass's steps above it on the log scale. docs/results.md says what these
bounds find on a quiet machine.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np

from magicdec.records.samples import PassSamples

FACTOR = 3.0
SPREADS = 6.0
FEWEST = 8  # steps of a kind that have a median of their own
NEAREST = 31  # steps of a kind that the median is of
TO_DEVIATION = 1.4826  # from the median of absolute deviations to the standard deviation

T = TypeVar("T")
StepKind = tuple[int, int, int]
"""Forwards, draft tokens of a row, and rows of a step."""
Place = tuple[int, int]
"""Batch and step."""


class TimedStep(NamedTuple):
    """A step of a pass that has no batches. Prompt tokens that it took stand for its forwards."""

    ms: float
    kind: StepKind


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
    step_ms: Sequence[Sequence[float]]  # by batch and step
    kinds: Mapping[StepKind, Sequence[Place]]  # the places of its steps, in order

    @classmethod
    def of(cls, samples: PassSamples) -> PassSteps:
        kinds = defaultdict[StepKind, list[Place]](list)
        for place, kind in _kinds(samples):
            kinds[kind].append(place)
        return cls(samples.step_ms, kinds)

    @classmethod
    def of_steps(cls, steps: Sequence[TimedStep]) -> PassSteps:
        kinds = defaultdict[StepKind, list[Place]](list)
        for place, step in enumerate(steps):
            kinds[step.kind].append((0, place))
        return cls([[step.ms for step in steps]], kinds)

    @property
    def num_steps(self) -> int:
        return sum(map(len, self.step_ms))

    @cached_property
    def stalls(self) -> list[Stall]:
        medians = self._medians()
        if not medians:
            return []
        of_rare = self._medians_of_rare()
        logs = [abs(math.log(self._ms(place) / median)) for place, median in medians.items()]
        spread = TO_DEVIATION * float(np.median(logs))
        bound = max(FACTOR, math.exp(min(SPREADS * spread, 300.0)))
        found = [
            Stall(place, self._ms(place), median)
            for place, median in (medians | of_rare).items()
            if self._ms(place) > bound * median
        ]
        return sorted(found, key=lambda stall: stall.place)

    @cached_property
    def steady_ms(self) -> list[float]:
        """The time of each batch's steps, with the median of its kind for a stalled one."""
        times = [sum(batch) for batch in self.step_ms]
        for stall in self.stalls:
            times[stall.place[0]] -= stall.lost_ms
        return times

    def _ms(self, place: Place) -> float:
        batch, step = place
        return self.step_ms[batch][step]

    def _medians(self) -> dict[Place, float]:
        """Medians over the nearest steps in the batch, or over all batches where the batch has too
        few."""
        medians = dict[Place, float]()
        for places in self.kinds.values():
            if len(places) < FEWEST:
                continue
            of_all = float(np.median([self._ms(place) for place in places]))
            by_batch = defaultdict[int, list[Place]](list)
            for place in places:
                by_batch[place[0]].append(place)
            for inside in by_batch.values():
                times = [self._ms(place) for place in inside]
                few = len(inside) < FEWEST
                medians |= zip(
                    inside, [of_all] * len(inside) if few else running(times), strict=True
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


def _kinds(samples: PassSamples) -> Iterator[tuple[Place, StepKind]]:
    for batch, times in enumerate(samples.step_ms):
        num_steps = len(times)
        forwards = _known(samples.num_forwards, batch, num_steps, 0)
        drafted = _known(samples.padded_gamma, batch, num_steps, 0)
        rows = map(len, _known(samples.num_emitted, batch, num_steps, list[int]()))
        for step, kind in enumerate(zip(forwards, drafted, rows, strict=True)):
            yield (batch, step), kind


def _known(counts: Sequence[list[T]], batch: int, num_steps: int, absent: T) -> list[T]:
    known = counts[batch] if batch < len(counts) else []
    return known + [absent] * (num_steps - len(known))
