"""Intervals of 95 % by the jackknife: the number is computed again without each prompt (or batch),
and the spread of these values gives its standard error. Imports no torch.

The interval is symmetric on a scale without bounds (logit for a number between two bounds, log for
one above a bound), and its width comes from Student's t with one degree of freedom fewer than there
are prompts. docs/statistics.md says why, and what other methods cover with as few prompts as runs
have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from magicdec.records.statistics.by_prompt import Array

LEVEL = 0.95
FEWEST_PROMPTS = 4
FEWEST_BATCHES = 3


def jackknife_error(values: Array) -> float:
    """The standard error of `values[0]`, computed from all groups; the others are computed with one
    of the groups left out."""
    each = values[1:]
    n = len(each)
    return math.sqrt((n - 1) / n * float(((each - each.mean()) ** 2).sum()))


def quantile(freedom: int, level: float = LEVEL) -> float:
    """How many standard errors an interval of that level reaches to each side: Student's t, with
    `freedom` degrees of freedom."""
    from scipy.special import stdtrit  # here, because it takes a second to import

    return float(stdtrit(freedom, (1 + level) / 2))


def interval(
    values: Array, low: float, high: float, fewest: int = FEWEST_PROMPTS
) -> list[float] | None:
    """The interval of `values[0]`, which lies between the bounds `low` and `high` (infinite: no
    upper bound). None if there are fewer than `fewest` groups, if the number lies on a bound, or if
    it does not differ from group to group: then its spread cannot be estimated."""
    num_groups = len(values) - 1
    if num_groups < fewest or not np.isfinite(values).all() or not low < values[0] < high:
        return None
    error = jackknife_error(values)
    if error <= 1e-12 * abs(float(values[0])):
        return None
    reach = quantile(num_groups - 1) * error / _slope(float(values[0]), low, high)
    middle = _unbounded(float(values[0]), low, high)
    return [_bounded(middle - reach, low, high), _bounded(middle + reach, low, high)]


def ratio_interval(ratios: Sequence[float], fewest: int = FEWEST_BATCHES) -> list[float] | None:
    """The interval of the geometric mean of ratios, which are paired: one of each batch. None for
    fewer than `fewest` batches, or if all ratios are equal."""
    if len(ratios) < fewest or min(ratios) <= 0:
        return None
    logs = np.log(ratios)
    error = float(logs.std(ddof=1)) / math.sqrt(len(logs))
    if error <= 1e-12:
        return None
    middle, reach = float(logs.mean()), quantile(len(logs) - 1) * error
    return [math.exp(middle - reach), math.exp(middle + reach)]


def without_each(amounts: Sequence[float], times: Sequence[float]) -> Array:
    """The rate amount / time over all batches, then without each batch: [1 + batches]."""
    amount, time = np.asarray(amounts, float), np.asarray(times, float)
    sums = np.concatenate(([amount.sum()], amount.sum() - amount))
    over = np.concatenate(([time.sum()], time.sum() - time))
    with np.errstate(divide="ignore", invalid="ignore"):
        return sums / over


def _unbounded(value: float, low: float, high: float) -> float:
    if math.isinf(high):
        return math.log(value - low)
    return math.log((value - low) / (high - value))


def _slope(value: float, low: float, high: float) -> float:
    """By how much `value` changes with its place on the scale without bounds."""
    return value - low if math.isinf(high) else (value - low) * (high - value) / (high - low)


def _bounded(place: float, low: float, high: float) -> float:
    if math.isinf(high):
        return low + math.exp(min(place, 700.0))
    return low + (high - low) / (1 + math.exp(min(-place, 700.0)))
