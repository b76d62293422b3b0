"""Orders of admission (`names.ADMISSION_ORDERS`): which of the requests that wait gets a row first.

An order is a function of a request that begins to wait; the request with the smallest value is
admitted first. The value does not depend on the time, so that waiting requests stay sorted.
"""

from __future__ import annotations

from collections.abc import Callable

from magicdec.request import Request

Order = Callable[[Request], float]

AGING_S = 1.0  # seconds of waiting that count as much as one level of priority


def fcfs(request: Request) -> float:
    """First come, first served."""
    return request.arrived_s


def shortest_remaining(request: Request) -> float:
    """The request with the fewest tokens left to emit."""
    return request.sampling.max_new_tokens - len(request.output_ids)


def priority(request: Request) -> float:
    """The request with the highest `Request.priority`. Waiting raises it by one level every
    AGING_S seconds, so that no request waits for ever. Waiting raises all requests alike, so only
    the times of arrival count."""
    return request.arrived_s / AGING_S - request.priority
