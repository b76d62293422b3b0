"""WaitingQueue: the requests that wait for a row, in the order of admission
(`names.ADMISSION_ORDERS`).

An order is a function of a request that begins to wait; the request with the smallest value is
admitted first. The value does not depend on the time, so that the queue stays sorted. Adding and
removing a request takes the logarithm of the queue's length. Imports no torch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from itertools import count

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


Entry = tuple[float, int, int, Request]
"""The request's value in the order, its id, and a number that differs between all entries."""


class WaitingQueue:
    """Requests with equal values in the order are sorted by their ids."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self._sorted: list[Entry] = []
        self._entries: dict[Request, Entry] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._sorted)

    def __contains__(self, request: Request) -> bool:
        return request in self._entries

    def add(self, requests: Iterable[Request]) -> None:
        for request in requests:
            entry = self.order(request), request.request_id, next(self._numbers), request
            self._entries[request] = entry
            insort(self._sorted, entry)

    def remove(self, request: Request) -> None:
        """Raises KeyError if the request does not wait."""
        entry = self._entries.pop(request)
        del self._sorted[bisect_left(self._sorted, entry)]

    def first(self, most: int) -> list[Request]:
        """Up to `most` requests, the one that is admitted first before the others."""
        return [entry[3] for entry in self._sorted[:most]]

    def clear(self) -> None:
        self._sorted.clear()
        self._entries.clear()
