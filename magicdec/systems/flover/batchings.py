"""The batchings of Flover, whole batches or a running batch (arXiv 2305.13484).

A batch function decides when arrived requests may join. It gets the function that serves requests
to their end, the arrivals, the clock, the number of rows, and the time window in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from magicdec.engine.arrivals import Arrivals
from magicdec.hardware.timing import Clock
from magicdec.runner.request import Request

Serve = Callable[[Sequence[Request] | Arrivals], None]
BatchFunction = Callable[[Serve, Arrivals, Clock, int, float], None]


def sequential(
    serve: Serve, arrivals: Arrivals, clock: Clock, num_rows: int, window_s: float
) -> None:
    while arrivals:
        serve(arrivals.take(1))


def static(serve: Serve, arrivals: Arrivals, clock: Clock, num_rows: int, window_s: float) -> None:
    """Full batches of `num_rows` requests: a batch begins when all its requests have arrived. In a
    closed loop it is full with those in flight, because no other comes before one of them ends."""
    while arrivals:
        batch = arrivals.take(num_rows)
        clock.wait_until(batch[-1].arrived_s)
        serve(batch)


def dynamic(serve: Serve, arrivals: Arrivals, clock: Clock, num_rows: int, window_s: float) -> None:
    """Batches that begin when they are full, or `window_s` after their first request has
    arrived."""
    if arrivals.concurrency is not None:  # nobody comes while a batch waits
        return static(serve, arrivals, clock, num_rows, window_s)
    while arrivals:
        coming_s = arrivals.known_s
        full_s = coming_s[num_rows - 1] if len(coming_s) >= num_rows else math.inf
        begins_s = max(clock.now(), min(full_s, coming_s[0] + window_s))
        clock.wait_until(begins_s)
        serve(arrivals.take(min(num_rows, max(1, arrivals.count(begins_s)))))


def inflight(
    serve: Serve, arrivals: Arrivals, clock: Clock, num_rows: int, window_s: float
) -> None:
    """A running batch, which a request joins at the first step with a free row and free KV
    blocks."""
    serve(arrivals)


BATCHINGS: Mapping[str, BatchFunction] = {
    "sequential": sequential,
    "static": static,
    "dynamic": dynamic,
    "inflight": inflight,
    "tensor_parallel": inflight,
}
