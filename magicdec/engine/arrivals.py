"""Arrivals: when requests arrive, at times of their own (open loop), or as earlier ones end (closed
loop), and in a conversation after those that they follow. Every system takes its requests from it.
Imports no torch."""

from __future__ import annotations

import math
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from itertools import takewhile

from magicdec.runner.request import Request


class Arrivals:
    """Requests that have not been taken yet, in the order of arrival.

    Without `concurrency` conversations begin at times of their own, and a request that is asked
    alone is one of its own. With it, so many begin at theirs, and each later one when all requests
    of an earlier one have ended, so that never more are in flight. In a conversation a request
    arrives after the ends of those that it follows. What has arrived in a closed loop then follows
    from what has ended, and from no clock, unless a request waits longer (`is_timed`): ranks with
    the same requests decide alike. Where clocks decide, ranks must know the same ends.
    """

    def __init__(self, requests: Sequence[Request], concurrency: int | None = None) -> None:
        self._all = list(requests)
        self.concurrency = concurrency
        self.is_timed = any(request.is_timed for request in requests)
        # Of each request that follows others, how many of these have not ended.
        self._unmet = dict[Request, int]()
        self._followers = defaultdict[Request, list[Request]](list)
        for request in requests:
            after = () if request.turn is None else request.turn.after
            missing = [before for before in after if before.finished_s is None]
            for before in missing:
                self._followers[before].append(request)
            if missing:
                self._unmet[request] = len(missing)
        assert self._followers.keys() <= set(requests), "who follows comes after one of these"
        first = [request for request in requests if request not in self._unmet]
        first.sort(key=lambda r: (r.arrived_s, r.request_id))
        self._num_left = defaultdict[Hashable, int](int)  # of conversations: that have not ended
        begins = dict[Hashable, list[Request]]()  # the first requests of each conversation
        for request in first:
            begins.setdefault(_conversation_of(request), []).append(request)
        for request in requests:
            self._num_left[_conversation_of(request)] += 1
        in_order = list(begins.values())
        self._known = deque[Request]()  # whose arrival is known, in its order
        self._later = deque(in_order[len(in_order) if concurrency is None else concurrency :])
        for beginning in in_order[: len(in_order) - len(self._later)]:
            for request in beginning:
                insort(self._known, request, key=_arrival_of)
        self._in_flight: list[Request] = []  # taken, not known to have ended, and waited for

    @classmethod
    def of(cls, requests: Sequence[Request] | Arrivals) -> Arrivals:
        return requests if isinstance(requests, Arrivals) else cls(requests)

    def __iter__(self) -> Iterator[Request]:
        """All requests, also those that were taken."""
        return iter(self._all)

    def __len__(self) -> int:
        """The number of requests that are still to be taken."""
        return len(self._known) + sum(map(len, self._later)) + len(self._unmet)

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
        if self.concurrency is not None and not self.is_timed:
            return len(self._known)
        return len(list(takewhile(lambda request: request.arrived_s <= now, self._known)))

    def take(self, most: int) -> list[Request]:
        """The next requests, at most so many, whose arrival is known."""
        self._note_ends()
        taken = [self._known.popleft() for _ in range(min(most, len(self._known)))]
        if self.concurrency is not None:
            self._in_flight += taken
        else:
            self._in_flight += [request for request in taken if request in self._followers]
        return taken

    def _note_ends(self) -> None:
        """Let those arrive that follow on requests that have ended, and in a closed loop another
        conversation at the end of each."""
        ended = [r for r in self._in_flight if r.finished_s is not None]
        if not ended:
            return
        self._in_flight = [r for r in self._in_flight if r.finished_s is None]
        for request in sorted(ended, key=lambda r: (r.finished_s or 0.0, r.request_id)):
            end_s = request.finished_s
            assert end_s is not None, "it has ended"
            for follower in self._followers.pop(request, ()):
                self._unmet[follower] -= 1
                if not self._unmet[follower]:
                    del self._unmet[follower]
                    follower.follow(end_s)
                    insort(self._known, follower, key=_arrival_of)
            conversation = _conversation_of(request)
            self._num_left[conversation] -= 1
            if self._later and not self._num_left[conversation]:
                for first in self._later.popleft():
                    first.arrived_s = end_s + first.offset_s
                    insort(self._known, first, key=_arrival_of)


def _conversation_of(request: Request) -> Hashable:
    return request if request.turn is None else request.turn.conversation


def _arrival_of(request: Request) -> float:
    return request.arrived_s
