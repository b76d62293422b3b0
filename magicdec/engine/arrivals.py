"""Arrivals: when requests arrive, at times of their own (open loop), or as earlier ones end (closed
loop). Every system takes its requests from it. Imports no torch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile

from magicdec.runner.request import Request


class Arrivals:
    """Requests that have not been taken yet, in the order of arrival.

    Without `concurrency` each arrives at its `arrived_s`. With it, so many arrive at theirs, and
    each later one when an earlier one ends, so that never more are in flight. What has arrived then
    follows from what has ended, and from no clock: ranks with the same requests decide alike.
    """

    def __init__(self, requests: Sequence[Request], concurrency: int | None = None) -> None:
        self.requests = sorted(requests, key=lambda r: (r.arrived_s, r.request_id))
        self.concurrency = concurrency
        self._coming = deque(self.requests)
        self._in_flight: list[Request] = []  # of a closed loop: taken, and not known to have ended
        # How many of those that come have an arrival that is known.
        self._num_known = len(self.requests if concurrency is None else requests[:concurrency])

    @classmethod
    def of(cls, requests: Sequence[Request] | Arrivals) -> Arrivals:
        return requests if isinstance(requests, Arrivals) else cls(requests)

    def __iter__(self) -> Iterator[Request]:
        """All requests, also those that were taken."""
        return iter(self.requests)

    def __len__(self) -> int:
        """The number of requests that are still to be taken."""
        return len(self._coming)

    @property
    def known_s(self) -> list[float]:
        """The known arrivals of requests that are still to be taken."""
        self._note_ends()
        return [request.arrived_s for request in islice(self._coming, self._num_known)]

    @property
    def next_s(self) -> float:
        """When the next request arrives; infinite as long as another must end before."""
        self._note_ends()
        return self._coming[0].arrived_s if self._num_known else math.inf

    def count(self, now: float) -> int:
        """The number of requests to take that have arrived at `now`."""
        self._note_ends()
        if self.concurrency is not None:
            return self._num_known
        return len(list(takewhile(lambda request: request.arrived_s <= now, self._coming)))

    def take(self, most: int) -> list[Request]:
        """The next requests, at most so many, whose arrival is known."""
        self._note_ends()
        taken = [self._coming.popleft() for _ in range(min(most, self._num_known))]
        self._num_known -= len(taken)
        if self.concurrency is not None:
            self._in_flight += taken
        return taken

    def _note_ends(self) -> None:
        """Let another request of a closed loop arrive at the end of each that has ended."""
        ends_s = sorted(r.finished_s for r in self._in_flight if r.finished_s is not None)
        if not ends_s:
            return
        self._in_flight = [r for r in self._in_flight if r.finished_s is None]
        following = islice(self._coming, self._num_known, self._num_known + len(ends_s))
        for request, end_s in zip(following, ends_s, strict=False):  # the last have no follower
            request.arrived_s = end_s
            self._num_known += 1
