"""The metrics of a simulated run. Names and definitions are those of the records of real runs where
there is such a metric. Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from magicdec.pipelined_speculation.options import Counts
from magicdec.records.metrics import mean, percentile
from magicdec.simulator.machine import Machine
from magicdec.simulator.simulation import Trace


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Of all requests together. Shares are of the time between the first token and the last."""

    tokens_per_s: float  # sum over requests: tokens after the first, over the time they took
    ttft_ms: float  # mean over requests
    mean_itl_ms: float | None  # None if no request has a token after its first
    p99_itl_ms: float | None
    busy: float  # mean over stages of the share of time in which they compute
    useful: float  # the same, without runs that were cancelled
    draft_busy: float  # share of time in which the drafter computes
    mean_in_flight: float  # runs that are under way
    acceptance_rate: float | None  # accepted / launched draft tokens; None without drafts
    runs: int
    invalid_runs: int
    superfluous_runs: int
    layers_computed: int
    layers_skipped: int


def measure(machine: Machine, trace: Trace, counts: Counts) -> Measured:
    times: dict[int, list[float]] = {}
    for at, commit in trace.commits:
        times.setdefault(commit.request, []).extend([at] * len(commit.tokens))
    first, last = min(t[0] for t in times.values()), max(t[-1] for t in times.values())
    itl_ms = [1e3 * (b - a) for each in times.values() for a, b in pairwise(each)]
    window = (last - first) or math.inf
    rates = [(len(t) - 1) / (t[-1] - t[0]) if t[-1] > t[0] else 0.0 for t in times.values()]
    in_flight = sum(_within(f.launched_s, f.home_s, first, last) for f in trace.flights)
    drafting = sum(_within(begin, end, first, last) for begin, end in trace.drafts)
    busy, useful = _busy(trace, first, last, machine.num_stages)
    computed = sum(sum(flight.layers) for flight in trace.flights)
    total = len(trace.flights) * machine.num_stages * machine.layers
    return Measured(
        tokens_per_s=sum(rates),
        ttft_ms=1e3 * sum(each[0] for each in times.values()) / len(times),
        mean_itl_ms=mean(itl_ms),
        p99_itl_ms=percentile(itl_ms, 99),
        busy=busy / window,
        useful=useful / window,
        draft_busy=drafting / window,
        mean_in_flight=in_flight / window,
        acceptance_rate=counts.accepted / counts.drafted if counts.drafted else None,
        runs=counts.runs,
        invalid_runs=counts.invalid_runs,
        superfluous_runs=counts.superfluous_runs,
        layers_computed=computed,
        layers_skipped=total - computed,
    )


def _busy(trace: Trace, first: float, last: float, num_stages: int) -> tuple[float, float]:
    """Seconds that a stage computes, mean over stages: in all, and for runs that were needed."""
    busy = useful = 0.0
    for flight in trace.flights:
        spans = zip(flight.start_s, flight.end_s, strict=True)
        seconds = sum(_within(begin, end, first, last) for begin, end in spans)
        busy += seconds
        if flight.launch.run not in trace.cancelled:
            useful += seconds
    return busy / num_stages, useful / num_stages


def _within(begin: float, end: float, first: float, last: float) -> float:
    return max(0.0, min(end, last) - max(begin, first))
