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
    """The interval of the geometric mean of ratios, which are paired: one of each batch. None for
    fewer than `FEWEST_BATCHES` batches, or if all ratios are equal."""
    if len(ratios) < FEWEST_BATCHES or min(ratios) <= 0:
        return None
    logs = np.log(ratios)
    error = float(logs.std(ddof=1)) / math.sqrt(len(logs))
    if error <= 1e-12:
        return None
    middle = float(logs.mean())
    reach = quantile(len(logs) - 1, level) * error
    return [math.exp(middle - reach), math.exp(middle + reach)]


def speed_interval(tokens: Sequence[int], times_ms: Sequence[float]) -> list[float] | None:
    """The interval of the tokens/s over all batches, in which a batch without steps has no part.
    None for fewer than `FEWEST_BATCHES` batches."""
    batches = [(count, ms / 1e3) for count, ms in zip(tokens, times_ms, strict=True) if ms]
    if len(batches) < FEWEST_BATCHES:
        return None
    amounts, seconds = with_each_left_out(np.array(batches, float)).T
    return interval(amounts / seconds, 0, math.inf, FEWEST_BATCHES)
