"""The saturation rate: the largest rate of arrivals that is sustained, with requests that arrive
whether earlier ones have ended or not (open loop).

Owns which rate is measured next, and what sustained means. With bounds (`--goodput`), a rate is
sustained if 90 % of the requests keep all of them, as in DistServe (Zhong et al. 2024, section 2).
Without bounds, it is sustained if requests are served at 90 % of the rate at which they arrive:
faster arrivals make the queue grow as long as requests arrive. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from magicdec.serving.metrics import ServingMetrics

SUSTAINED = 0.9
PRECISION = 1.1  # the search ends when two neighbouring rates differ by less than this factor
FACTOR = 2.0  # between rates until one is sustained and another is not
MOST_RATES = 24
END = 0.0  # in place of a rate: no other is measured


def share_sustained(metrics: ServingMetrics) -> float:
    """The share of requests that keep the bounds or, without bounds, the served rate as a share of
    the arrival rate, at most 1."""
    if metrics.request_goodput is not None:
        return metrics.request_goodput / metrics.request_throughput
    if metrics.served_rate is None or metrics.arrival_rate is None:
        return 1.0
    return min(1.0, metrics.served_rate / metrics.arrival_rate)


def is_sustained(metrics: ServingMetrics) -> bool:
    return share_sustained(metrics) >= SUSTAINED


def next_rate(measured: Sequence[tuple[float, bool]], start: float) -> float:
    """The rate to measure after those that were `measured`, each with whether it was sustained;
    `END` if the saturation rate is known as well as `PRECISION` says."""
    sustained = [rate for rate, is_good in measured if is_good]
    # A rate below one that was sustained may fail by chance; it does not bound the search.
    others = [rate for rate, is_good in measured if not is_good]
    others = [rate for rate in others if rate > max(sustained, default=0.0)]
    if len(measured) == MOST_RATES:
        return END
    if not measured:
        return start
    if not others:
        return max(sustained) * FACTOR
    if not sustained:
        return min(others) / FACTOR
    low, high = max(sustained), min(others)
    return math.sqrt(low * high) if high / low > PRECISION else END


def saturation_rate(measured: Sequence[tuple[float, bool]]) -> float | None:
    """The largest rate that was sustained; None if none was."""
    return max((rate for rate, is_good in measured if is_good), default=None)
