"""Batchings: when requests that have arrived may join the running batch. The name table is
`names.BATCHINGS`.

Owns which requests are given to the engine together, and when. In every batching the engine, its
limits and its steps are the same, and a request that has ended leaves the batch at once. Imports no
torch.

A batching is a function of the function that serves requests until all have ended, the requests in
the order of arrival, the clock, the number of rows, and the time window in seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from magicdec.hardware.timing import Clock
from magicdec.request import Request

Serve = Callable[[Sequence[Request]], None]
Batching = Callable[[Serve, Sequence[Request], Clock, int, float], None]


def sequential(
    serve: Serve, requests: Sequence[Request], clock: Clock, num_rows: int, window_s: float
) -> None:
    """One request after the other."""
    for request in requests:
        serve([request])


def static(
    serve: Serve, requests: Sequence[Request], clock: Clock, num_rows: int, window_s: float
) -> None:
    """Batches of `num_rows` requests. A batch begins when all of its requests have arrived and the
    batch before it has ended."""
    for first in range(0, len(requests), num_rows):
        batch = requests[first : first + num_rows]
        clock.wait_until(batch[-1].arrived_s)
        serve(batch)


def dynamic(
    serve: Serve, requests: Sequence[Request], clock: Clock, num_rows: int, window_s: float
) -> None:
    """Batches of up to `num_rows` requests. A batch begins when it is full, or `window_s` after its
    first request has arrived, and when the batch before it has ended."""
    coming = deque(requests)
    while coming:
        full_s = coming[num_rows - 1].arrived_s if len(coming) >= num_rows else math.inf
        begins_s = max(clock.now(), min(full_s, coming[0].arrived_s + window_s))
        clock.wait_until(begins_s)
        batch = [coming.popleft()]
        while coming and len(batch) < num_rows and coming[0].arrived_s <= begins_s:
            batch.append(coming.popleft())
        serve(batch)


def inflight(
    serve: Serve, requests: Sequence[Request], clock: Clock, num_rows: int, window_s: float
) -> None:
    """A request joins the running batch at the first step after its arrival for which a row and
    blocks of the KV cache are free."""
    serve(requests)
