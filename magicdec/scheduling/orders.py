"""The orders in which waiting requests are admitted; the name table is `names.ADMISSION_ORDERS`.

An order is a function of a request and the time; the smallest value is admitted first. Imports no
torch.
"""

from __future__ import annotations

from magicdec.request import Request

AGING_S = 1.0  # seconds of waiting that count as much as one level of priority


def fcfs(request: Request, now: float) -> float:
    """First come, first served."""
    return request.arrived_s


def shortest_remaining(request: Request, now: float) -> float:
    """The request with the fewest tokens left to emit."""
    return request.sampling.max_new_tokens - len(request.output_ids)


def priority(request: Request, now: float) -> float:
    """The request with the highest `Request.priority`. Waiting raises it by one level every
    AGING_S seconds, so that no request waits for ever."""
    return -request.priority - (now - request.arrived_s) / AGING_S
