"""The statistics of an audit: chi-squared tests of counts against a known distribution, how many
draws they need, total variation, and a correction for many tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from magicdec.records.intervals import Array

LEAST_EXPECTED = 5.0  # counts of a cell; rarer cells are one together
NUM_SIMULATED = 2000  # draws of counts, of which quantiles are taken
LEVEL = 0.95


def chi_squared_tail(statistic: float, df: int, noncentrality: float = 0.0) -> float:
    """The probability that a (noncentral) chi-squared variable with `df` degrees of freedom is
    `statistic` or more."""
    from scipy.stats import chi2, ncx2  # here, because it takes a second to import

    return float(ncx2.sf(statistic, df, noncentrality) if noncentrality else chi2.sf(statistic, df))


def num_draws(num_cells: int, total_variation: float, alpha: float, power: float) -> int:
    """How many draws find, with that power at level `alpha`, any distribution over these cells that
    is so far from the expected one: the noncentrality over 4 x the total variation squared, since
    the sum of (q - p)^2 / p is 4 x its square at least (Cauchy-Schwarz)."""
    from scipy.special import chdtri, chndtrinc

    df = num_cells - 1
    noncentrality = float(chndtrinc(chdtri(df, alpha), df, 1 - power))
    return math.ceil(noncentrality / (4 * total_variation**2))


@dataclass(frozen=True)
class CountsTest:
    """Counts beside the expected distribution. `p_value` is of Pearson's chi-squared test.
    `total_variation` is half the summed difference of shares, with its 95 % interval by resampling;
    `by_chance` is what 95 % of right draws stay below."""

    num_draws: int
    num_cells: int
    statistic: float
    p_value: float
    total_variation: float
    interval: tuple[float, float]
    by_chance: float


def compare_counts(
    counts: Sequence[int], expected: Sequence[float], error: float = 0.0, seed: int = 0
) -> CountsTest | None:
    """Test counts of cells against their probabilities. `error`: by how much, relatively, these may
    be wrong (root of the mean square), which is no fault. None if fewer than two cells can be
    told apart."""
    total = sum(counts)
    order = np.argsort(-np.array(expected, float), kind="stable")
    probabilities = np.array(expected, float)[order]
    observed = np.array(counts, float)[order]
    if probabilities.sum() > 0:
        probabilities = probabilities / probabilities.sum()
    num_own = int((probabilities * total >= LEAST_EXPECTED).sum())
    merged = [_merged(values, num_own) for values in (observed, probabilities)]
    if merged[1][-1] * total < LEAST_EXPECTED and len(merged[1]) > 1 and num_own:
        merged = [_merged(values, num_own - 1) for values in (observed, probabilities)]
    seen, right = merged
    if len(seen) < 2:
        return None
    statistic = float((((seen - total * right) ** 2) / (total * right)).sum())
    random = np.random.default_rng(seed)
    by_chance = _distances(random.multinomial(total, right, NUM_SIMULATED), right)
    again = _distances(random.multinomial(total, seen / total, NUM_SIMULATED), right)
    tail = (1 - LEVEL) / 2
    return CountsTest(
        total,
        len(seen),
        statistic,
        chi_squared_tail(statistic, len(seen) - 1, total * error**2),
        float(np.abs(seen / total - right).sum() / 2),
        (float(np.quantile(again, tail)), float(np.quantile(again, 1 - tail))),
        float(np.quantile(by_chance, LEVEL)),
    )


def _merged(values: Array, num_own: int) -> Array:
    """With all cells after the first `num_own` as one."""
    if num_own >= len(values):
        return values
    return np.append(values[:num_own], values[num_own:].sum())


def _distances(counts: NDArray[Any], right: Array) -> Array:
    shares = counts / counts.sum(axis=1, keepdims=True)
    return np.asarray(np.abs(shares - right).sum(axis=1) / 2)


def rejected(p_values: Sequence[float], alpha: float) -> list[bool]:
    """Which of several tests reject at level `alpha` together (Holm)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    found = [False] * len(p_values)
    for rank, i in enumerate(order):
        if p_values[i] > alpha / (len(p_values) - rank):
            break
        found[i] = True
    return found


def binomial_tail(successes: int, trials: int, chance: float) -> float:
    """The probability of so many successes or more."""
    from scipy.stats import binom

    return float(binom.sf(successes - 1, trials, chance))


def chance_of_mean(values: Sequence[float]) -> float:
    """The probability that the mean of values around 0 is this one or less, by Student's t."""
    from scipy.stats import t

    mean = float(np.mean(values))
    spread = float(np.std(values, ddof=1))
    if spread == 0:
        return 1.0 if mean >= 0 else 0.0
    return float(t.cdf(mean / (spread / math.sqrt(len(values))), len(values) - 1))


def most_undetected(num_judged: int) -> float:
    """The share of wrong tokens that a sample without one excludes, with 95 % certainty."""
    return 1 - (1 - LEVEL) ** (1 / max(1, num_judged))
