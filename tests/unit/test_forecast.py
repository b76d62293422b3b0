"""What steps will yield: rates from counts, and the time until a batch is done, against
simulation."""

from __future__ import annotations

import random
from itertools import pairwise
from statistics import fmean, pvariance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicdec.drafting.forecast import (
    Acceptance,
    order_statistics,
    seconds_until_done,
    tokens_of_steps,
)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5), st.integers(0, 2)), max_size=200))
def test_rates_are_rates(steps: list[tuple[int, int, int]]) -> None:
    acceptance = Acceptance(5)
    assert acceptance.rates() == pytest.approx([0.8] * 5)
    assert acceptance.rates(7) == acceptance.rates()
    for accepted, drafted, request in steps:
        acceptance.observe([request], drafted, [min(accepted, drafted)])
    for request in (None, 0, 1, 2, 3):
        rates = acceptance.rates(request)
        assert all(0 < rate < 1 for rate in rates)
        means = [mean for mean, _ in tokens_of_steps(rates)]
        assert means[0] == 1 and all(a < b for a, b in pairwise(means))
    assert acceptance.rates(3) == acceptance.rates(), "nothing is known of it"


def test_a_position_is_judged_only_if_it_was_reached() -> None:
    acceptance = Acceptance(3)
    for _ in range(400):
        acceptance.observe([0, 1], 2, [0, 1])  # half the first; none of the second; no third
    assert acceptance.rates() == pytest.approx([0.48, 0.05, 0.38], abs=0.05)


def test_rows_differ_and_are_forgotten() -> None:
    acceptance = Acceptance(3)
    for _ in range(100):
        acceptance.observe([4, 9], 3, [3, 0])
    good, bad, mean = acceptance.rates(4)[0], acceptance.rates(9)[0], acceptance.rates()[0]
    assert bad < 0.7 * mean and good > 1.15 * mean
    acceptance.keep_rows(())
    assert acceptance.rates(4) == acceptance.rates(9) == acceptance.rates()


def test_what_is_old_counts_less() -> None:
    acceptance = Acceptance(1)
    for accepted in (0, 1):
        for _ in range(200):
            acceptance.observe([0], 1, [accepted])
    assert acceptance.rates()[0] > 0.9


def draw(rates: list[float], count: int, draws: random.Random) -> int:
    """Tokens of one step."""
    taken = 0
    while taken < count and draws.random() < rates[taken]:
        taken += 1
    return 1 + taken


def test_mean_and_variance_of_a_step() -> None:
    rates, draws = [0.9, 0.7, 0.4], random.Random(0)
    for count, (mean, variance) in enumerate(tokens_of_steps(rates)):
        sample = [draw(rates, count, draws) for _ in range(40000)]
        assert fmean(sample) == pytest.approx(mean, abs=0.02)
        assert pvariance(sample) == pytest.approx(variance, abs=0.03)


def test_order_statistics_are_those_of_normal_numbers() -> None:
    draws = random.Random(0)
    for count in (1, 2, 5, 8):
        samples = [sorted(draws.gauss(0, 1) for _ in range(count)) for _ in range(20000)]
        means = [fmean(column) for column in zip(*samples, strict=True)]
        assert order_statistics(count) == pytest.approx(means, abs=0.04)


def test_without_drafts_the_time_is_exact() -> None:
    """Rows that want 2, 5 and 5 tokens: two steps of three rows, three of two."""
    step = [(1.0, 0.0)] * 3
    assert seconds_until_done([5, 2, 5], step, lambda rows: 10.0 * rows) == 2 * 30 + 3 * 20


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("rates", [[0.9] * 4, [0.7, 0.5, 0.3, 0.1]], ids=str)
@pytest.mark.parametrize(
    ("wanted", "apart", "within"), [(30, 0, 0.04), (200, 0, 0.02), (80, 5, 0.05)]
)
def test_the_time_until_done_is_that_of_simulation(
    rows: int, rates: list[float], wanted: int, apart: int, within: float
) -> None:
    """The mean of tokens alone falls short of it."""
    draws, count, wants = random.Random(1), len(rates), [wanted - apart * r for r in range(rows)]

    def seconds(active: int) -> float:
        return 1.0 + 0.2 * active

    def simulate() -> float:
        left, total = list(wants), 0.0
        while left:
            total += seconds(len(left))
            left = [n - draw(rates, count, draws) for n in left]
            left = [n for n in left if n > 0]
        return total

    simulated = fmean(simulate() for _ in range(400))
    tokens = tokens_of_steps(rates)[count]
    predicted = seconds_until_done(wants, [tokens] * rows, seconds)
    assert predicted == pytest.approx(simulated, rel=within)
