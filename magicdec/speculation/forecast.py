"""Forecasts for `--gamma auto`: acceptance by draft position, step times, and the time until a
batch is done. Imports no torch.

Source: Leviathan et al., arXiv 2211.17192, section 3.1, with rates by position and row.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import cache
from statistics import NormalDist, median

# acceptance assumed at first; its weight in tokens
PRIOR = 0.8
PRIOR_WEIGHT = 4.0
POOLED_WEIGHT = 8.0  # weight, in tokens, of the mean of all positions in a position's rate
ROW_WEIGHT = 32.0  # weight, in tokens, of the mean of all rows in a row's rate
MOST_LIKELY = 0.98  # the highest rate that is ever assumed
KEEP = 0.98  # factor by which older counts shrink with each step
FADE = 0.995  # the same for a row that drafts nothing while others do


class Acceptance:
    """Running acceptance rates by draft position, given acceptance before it, and each request's
    deviation from the mean."""

    def __init__(self, max_gamma: int) -> None:
        self.judged = [0.0] * max_gamma
        self.accepted = [0.0] * max_gamma
        self._rows: dict[int, tuple[float, float]] = {}  # request -> accepted, expected to be
        self.num_judged = 0  # drafts ever judged

    def keep_rows(self, requests: Collection[int]) -> None:
        """Forget all other requests, but no rates of positions."""
        self._rows = {r: counts for r, counts in self._rows.items() if r in requests}

    def observe(
        self, requests: Sequence[int], drafted: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Count the accepted of the drafted tokens of each request, without padding."""
        rates = self.rates()
        self.judged = [KEEP * n for n in self.judged]
        self.accepted = [KEEP * n for n in self.accepted]
        for request, most, number in zip(requests, drafted, accepted, strict=True):
            count = min(number, most)
            reached = min(count + 1, most)
            self.num_judged += reached
            for k in range(reached):
                self.judged[k] += 1
                self.accepted[k] += k < count
            got, expected = self._rows.get(request, (0.0, 0.0))
            self._rows[request] = got + count, expected + sum(rates[:reached])

    def fade(self, requests: Sequence[int]) -> None:
        """Let the counts of `requests` that drafted nothing weigh less."""
        for request in requests:
            got, expected = self._rows.get(request, (0.0, 0.0))
            self._rows[request] = FADE * got, FADE * expected

    @property
    def pooled(self) -> float:
        """The mean of all positions and requests."""
        return (sum(self.accepted) + PRIOR * PRIOR_WEIGHT) / (sum(self.judged) + PRIOR_WEIGHT)

    @property
    def hope(self) -> float:
        """By what factor rates may be higher than they look: by a standard deviation of the mean of
        as many drafts as were judged so far (an upper confidence bound; Auer et al. 2002)."""
        count = self.num_judged + PRIOR_WEIGHT
        return 1 + math.sqrt((1 - self.pooled) / (self.pooled * count))

    def rates(self, request: int | None = None) -> list[float]:
        """The rate of each position for a request, or the mean of all requests."""
        pooled = self.pooled
        got, expected = self._rows.get(request, (0.0, 0.0)) if request is not None else (0.0, 0.0)
        weight = ROW_WEIGHT * pooled
        factor = (got + weight) / (expected + weight)
        return [
            min(MOST_LIKELY, factor * (a + pooled * POOLED_WEIGHT) / (n + POOLED_WEIGHT))
            for a, n in zip(self.accepted, self.judged, strict=True)
        ]


class ChainLengths:
    """Counts of how often a chain of drafts goes on after 0, 1, 2, ... tokens."""

    def __init__(self, max_gamma: int) -> None:
        self.wanted = [0.0] * max_gamma
        self.longer = [0.0] * max_gamma

    def observe(self, asked: int, gamma: int) -> None:
        for k in range(min(asked, gamma + 1)):
            self.wanted[k] = KEEP * self.wanted[k] + 1
            self.longer[k] = KEEP * self.longer[k] + (k < gamma)

    def mean(self, asked: int, seconds: Callable[[int], float]) -> float:
        """The expected seconds of a step asked for `asked` draft tokens, where k take
        `seconds(k)`."""
        total = 0.0
        share = 1.0
        for k in range(asked):
            rate = (self.longer[k] + PRIOR_WEIGHT) / (self.wanted[k] + PRIOR_WEIGHT)
            if rate < 1:
                total = total + share * (1 - rate) * seconds(k)
                share = share * rate
        return total + share * seconds(asked)


def tokens_of_steps(rates: Sequence[float]) -> list[tuple[float, float]]:
    """(mean, variance) of a row's tokens from a step with 0, 1, 2, ... draft tokens."""
    # X = 1 + accepted; P(X > k) = survival of k; E[X^2] = 1 + sum over k of (2k + 1) P(X > k).
    mean = 1.0
    square = 1.0
    survival = 1.0
    steps = [(1.0, 0.0)]
    for k, rate in enumerate(rates, 1):
        survival *= rate
        mean = mean + survival
        square = square + (2 * k + 1) * survival
        steps.append((mean, max(0.0, square - mean * mean)))
    return steps


@cache
def order_statistics(count: int) -> tuple[float, ...]:
    """The expected values of `count` sorted standard normal numbers (Blom 1958)."""
    normal = NormalDist()
    return tuple(normal.inv_cdf((i - 0.375) / (count + 0.25)) for i in range(1, count + 1))


def seconds_until_done(
    remaining: Sequence[int], tokens: Sequence[tuple[float, float]], seconds: Callable[[int], float]
) -> float:
    """The time until every row has its `remaining` tokens. A step gives rows (mean, variance)
    tokens in `seconds(unfinished rows)`."""
    # A row's last step gives more tokens than are wanted, on average half of what a step adds.
    rows = [
        ((n + (mean - 1) / 2) / mean, variance / mean**2)
        for n, (mean, variance) in zip(remaining, tokens, strict=True)
    ]
    total = steps_done = 0.0
    spread = order_statistics(len(rows))
    for index, (steps, variance) in enumerate(sorted(rows)):
        until = max(steps_done, steps + spread[index] * math.sqrt(steps * variance))
        total += (until - steps_done) * seconds(len(rows) - index)
        steps_done = until
    return total


def fastest_split(
    tokens: Sequence[float], count: int, uniform: float, seconds: Callable[[int, int], float]
) -> list[bool]:
    """Which rows draft `count` tokens while the others decode in a forward of their own; none
    unless that yields more than `uniform` tokens a second.

    `tokens`: mean tokens of each row from a drafting step. `seconds(rows, draft tokens)`: time
    of a step."""
    order = sorted(range(len(tokens)), key=lambda row: -tokens[row])
    emitted = 0.0
    best = uniform
    size = 0
    for num_drafting, row in enumerate(order[:-1], 1):
        emitted = emitted + tokens[row]
        rest = len(order) - num_drafting
        speed = (emitted + rest) / (seconds(num_drafting, count) + seconds(rest, 0))
        if speed > best:
            best = speed
            size = num_drafting
    drafting_rows = set(order[:size])
    return [row in drafting_rows for row in range(len(tokens))]


class StepTimes:
    """Seconds of a step by rows and draft tokens, corrected by recent steps; apart for steps
    with and without drafts, because a growing context slows them differently."""

    def __init__(
        self, rows: int, batch_seconds: Sequence[float], row_seconds: Sequence[float]
    ) -> None:
        self.rows = rows
        self.batch_seconds = batch_seconds
        self.row_seconds = row_seconds
        self._recent: dict[bool, deque[float]] = {False: deque(maxlen=8), True: deque(maxlen=8)}
        self._drift = {False: 1.0, True: 1.0}

    def measured(self, rows: int, gamma: int) -> float:
        """The time before correction, linear in the number of rows."""
        all_rows = self.batch_seconds[gamma]
        one = self.row_seconds[gamma]
        return one + (all_rows - one) * (rows - 1) / max(1, self.rows - 1)

    def correct(self, rows: int, gamma: int, seconds: float) -> None:
        self._recent[gamma > 0].append(seconds / self.measured(rows, gamma))

    @property
    def was_disturbed(self) -> bool:
        """Whether decode steps took less than half or more than twice the measured time."""
        recent = self._recent[False]
        return len(recent) == recent.maxlen and not 0.5 <= median(recent) <= 2

    def settle(self) -> None:
        self._drift = {kind: median(recent or [1.0]) for kind, recent in self._recent.items()}

    def __call__(self, rows: int, gamma: int) -> float:
        return self.measured(rows, gamma) * self._drift[gamma > 0]
