"""Intervals of 95 % by the jackknife: the spread of the values computed without each prompt (or
batch) gives the standard error.

An interval is symmetric on a scale without bounds: logit between two bounds, log above one. Its
width comes from Student's t with one degree of freedom fewer than prompts. docs/results.md gives
reasons and compares the coverage of other methods.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
LEVEL = 0.95
FEWEST_PROMPTS = 4
FEWEST_BATCHES = 3


def with_each_left_out(values: Array) -> Array:
    """[1 + N, ...]: the sum of values [N, ...] over the N groups, then without each group."""
    total = values.sum(axis=0, keepdims=True)
    return np.concatenate((total, total - values))


def jackknife_error(values: Array) -> float:
    """The standard error of `values[0]`, the value of all groups; the later values leave out one
    group each."""
    left_out = values[1:]
    n = len(left_out)
    return math.sqrt((n - 1) / n * float(((left_out - left_out.mean()) ** 2).sum()))


def quantile(freedom: int, level: float = LEVEL) -> float:
    """Half the width of an interval in standard errors, by Student's t."""
    from scipy.special import stdtrit  # here, because it takes a second to import

    return float(stdtrit(freedom, (1 + level) / 2))


def interval(
    values: Array, low: float, high: float, fewest: int = FEWEST_PROMPTS
) -> list[float] | None:
    """The interval of `values[0]` between the bounds `low` and `high` (may be infinite). None for
    fewer than `fewest` groups, for a value on a bound, and if all groups agree, so that the spread
    cannot be estimated."""
    num_groups = len(values) - 1
    if num_groups < fewest or not np.isfinite(values).all() or not low < values[0] < high:
        return None
    error = jackknife_error(values)
    value = float(values[0])
    if error <= 1e-12 * abs(value):
        return None
    below = value - low
    above = high - value
    # By how much the value changes with its place on the scale without bounds.
    slope = below if math.isinf(high) else below * above / (high - low)
    reach = quantile(num_groups - 1) * error / slope
    factor = math.exp(min(reach, 300.0))
    if math.isinf(high):
        return [low + below / factor, low + below * factor]
    return [low + (high - low) / (1 + above / below * ratio) for ratio in (factor, 1 / factor)]


def ratio_interval(ratios: Sequence[float], level: float = LEVEL) -> list[float] | None:
    """The interval of the geometric mean of ratios, one a batch, widened to their median, beside
    which it stands: of many batches that are of two kinds, it would not hold that. None for fewer
    than `FEWEST_BATCHES`, or if all are equal."""
    if len(ratios) < FEWEST_BATCHES or min(ratios) <= 0:
        return None
    logs = np.log(ratios)
    error = float(logs.std(ddof=1)) / math.sqrt(len(logs))
    if error <= 1e-12:
        return None
    middle = float(logs.mean())
    reach = quantile(len(logs) - 1, level) * error
    median = statistics.median(ratios)
    return [min(math.exp(middle - reach), median), max(math.exp(middle + reach), median)]


def speed_interval(tokens: Sequence[int], times_ms: Sequence[float]) -> list[float] | None:
    """The interval of tokens/s over the batches that have steps. None for fewer than
    `FEWEST_BATCHES`."""
    batches = [(count, ms / 1e3) for count, ms in zip(tokens, times_ms, strict=True) if ms]
    if len(batches) < FEWEST_BATCHES:
        return None
    amounts, seconds = with_each_left_out(np.array(batches, float)).T
    return interval(amounts / seconds, 0, math.inf, FEWEST_BATCHES)
