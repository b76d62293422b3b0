"""What steps will yield: acceptance, counted, and the time until a batch is done. Imports no torch.

Pure arithmetic on counts and seconds; knows no clock, no model and no choice. Source: Leviathan et
al. 2023, section 3.1, with a rate for each position and row in place of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from statistics import NormalDist

PRIOR, PRIOR_WEIGHT = 0.8, 4.0  # acceptance before anything was drafted, in draft tokens seen
POOLED_WEIGHT = 8.0  # how much a position leans on the mean of all positions
ROW_WEIGHT = 32.0  # how much a row leans on the mean of all rows
MOST_LIKELY = 0.98  # no row's draft token is held for surer
KEEP = 0.98  # weight of what was counted, after one more step of counting


class Acceptance:
    """Running rate for each draft position, given that all before it were accepted, and how much
    better or worse each request fares."""

    def __init__(self, most: int) -> None:
        self.judged, self.accepted = [0.0] * most, [0.0] * most
        self._rows: dict[int, tuple[float, float]] = {}  # request -> accepted, expected to be

    def forget_rows(self) -> None:
        """Other requests follow."""
        self._rows.clear()

    def observe(self, requests: Sequence[int], num_drafted: int, accepted: Sequence[int]) -> None:
        rates = self.rates()
        self.judged = [KEEP * n for n in self.judged]
        self.accepted = [KEEP * n for n in self.accepted]
        for request, count in zip(requests, accepted, strict=True):
            reached = min(count + 1, num_drafted)
            for k in range(reached):
                self.judged[k] += 1
                self.accepted[k] += k < count
            got, expected = self._rows.get(request, (0.0, 0.0))
            self._rows[request] = got + count, expected + sum(rates[:reached])

    def rates(self, request: int | None = None) -> list[float]:
        """Of each position, for a request or (None) the mean of all."""
        pooled = self._pooled()
        got, expected = self._rows.get(request, (0.0, 0.0)) if request is not None else (0.0, 0.0)
        weight = ROW_WEIGHT * pooled
        factor = (got + weight) / (expected + weight)
        return [
            min(MOST_LIKELY, factor * (a + pooled * POOLED_WEIGHT) / (n + POOLED_WEIGHT))
            for a, n in zip(self.accepted, self.judged, strict=True)
        ]

    def _pooled(self) -> float:
        return (sum(self.accepted) + PRIOR * PRIOR_WEIGHT) / (sum(self.judged) + PRIOR_WEIGHT)


def tokens_of_steps(rates: Sequence[float]) -> list[tuple[float, float]]:
    """(mean, variance) of the tokens that a step with 0, 1, 2, ... draft tokens yields a row."""
    # X = 1 + accepted; P(X > k) = survival of k; E[X^2] = 1 + sum over k of (2k + 1) P(X > k).
    mean, square, survival = 1.0, 1.0, 1.0
    steps = [(1.0, 0.0)]
    for k, rate in enumerate(rates, 1):
        survival *= rate
        mean, square = mean + survival, square + (2 * k + 1) * survival
        steps.append((mean, max(0.0, square - mean * mean)))
    return steps


@cache
def order_statistics(count: int) -> tuple[float, ...]:
    """Expected value of each of so many standard normal numbers, sorted (Blom 1958)."""
    normal = NormalDist()
    return tuple(normal.inv_cdf((i - 0.375) / (count + 0.25)) for i in range(1, count + 1))


def seconds_until_done(
    wanted: Sequence[int], tokens: Sequence[tuple[float, float]], seconds: Callable[[int], float]
) -> float:
    """Time until every row has its `wanted` tokens, where a step yields it `tokens` (mean,
    variance) and takes `seconds` by the rows still there."""
    # A row's last step yields more than is wanted, by half of what a step adds on average.
    rows = [((n + (mean - 1) / 2) / mean, variance / mean**2)
            for n, (mean, variance) in zip(wanted, tokens, strict=True)]  # fmt: skip
    total = done = 0.0
    spread = order_statistics(len(rows))
    for index, (steps, variance) in enumerate(sorted(rows)):
        until = max(done, steps + spread[index] * math.sqrt(steps * variance))
        total += (until - done) * seconds(len(rows) - index)
        done = until
    return total
