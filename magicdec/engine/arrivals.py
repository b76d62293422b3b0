"""Arrivals: when requests arrive, at times of their own (open loop), or as earlier ones end (closed
loop). Every system takes its requests from it. Imports no torch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import takewhile

from magicdec.runner.request import Request


class Arrivals:
    """Requests that have not been taken yet, in the order of arrival.

    Without `concurrency` each arrives at its `arrived_s`. With it, so many arrive at theirs, and
    each later one when an earlier one ends, so that never more are in flight: the next turn of the
    conversation that has ended there, or else the next request. What has arrived then follows from
    what has ended, and from no clock: ranks with the same requests decide alike. Conversations need
    that, because their later turns have no arrival of their own.
    """

    def __init__(self, requests: Sequence[Request], concurrency: int | None = None) -> None:
        self._all = list(requests)
        following = {request for request in requests if request.previous and not request.prompt_ids}
        first = [request for request in requests if request not in following]
        self._following = {request.previous: request for request in following}
        assert concurrency is not None or not self._following, "later turns have no arrival"
        first.sort(key=lambda r: (r.arrived_s, r.request_id))
        self.concurrency = concurrency
        self._known = deque(first[:concurrency])  # that come at a time which is known
        self._later = deque(first[len(self._known) :])  # that come when another has ended
        self._in_flight: list[Request] = []  # of a closed loop: taken, and not known to have ended

    @classmethod
    def of(cls, requests: Sequence[Request] | Arrivals) -> Arrivals:
        return requests if isinstance(requests, Arrivals) else cls(requests)

    def __iter__(self) -> Iterator[Request]:
        """All requests, also those that were taken."""
        return iter(self._all)

    def __len__(self) -> int:
        """The number of requests that are still to be taken."""
        return len(self._known) + len(self._later) + len(self._following)

    @property
    def known_s(self) -> list[float]:
        """The known arrivals of requests that are still to be taken."""
        self._note_ends()
        return [request.arrived_s for request in self._known]

    @property
    def next_s(self) -> float:
        """When the next request arrives; infinite as long as another must end before."""
        self._note_ends()
        return self._known[0].arrived_s if self._known else math.inf

    def count(self, now: float) -> int:
        """The number of requests to take that have arrived at `now`."""
        self._note_ends()
        if self.concurrency is not None:
            return len(self._known)
        return len(list(takewhile(lambda request: request.arrived_s <= now, self._known)))

    def take(self, most: int) -> list[Request]:
        """The next requests, at most so many, whose arrival is known."""
        self._note_ends()
        taken = [self._known.popleft() for _ in range(min(most, len(self._known)))]
        if self.concurrency is not None:
            self._in_flight += taken
        return taken

    def _note_ends(self) -> None:
        """Let another request of a closed loop arrive at the end of each that has ended."""
        ended = [r for r in self._in_flight if r.finished_s is not None]
        if not ended:
            return
        self._in_flight = [r for r in self._in_flight if r.finished_s is None]
        for request in sorted(ended, key=lambda r: (r.finished_s or 0.0, r.request_id)):
            end_s = request.finished_s
            assert end_s is not None, "it has ended"
            following = self._following.pop(request, None)
            if following is not None:
                following.follow(end_s)
            elif self._later:
                following = self._later.popleft()
                following.arrived_s = end_s
            else:  # the last have no follower
                continue
            self._known.append(following)
