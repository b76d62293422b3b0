"""WaitingQueue: the requests that wait for a row, in the order of admission.

Owns this order. Adding and removing a request takes the logarithm of the queue's length. Must not
know whether a request has room. Imports no torch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from itertools import count

from magicdec.request import Request
from magicdec.scheduling.orders import Order

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
