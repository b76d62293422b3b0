"""Spans: what every rank did when, the source of busy times, queues, charts and traces. Imports no
torch. A run has the same number on every stage."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum


class SpanKind(IntEnum):
    STAGE = 1  # a stage computed a run or skipped it; `value` is the number of layers it computed
    DRAFT = 2  # a step of the drafter
    LAUNCH = 3  # the head launched a run; `value` is its number of rows, begin equals end
    PROMPT = 4  # the same for a run of a prompt
    RESULT = 5  # the head took the result of a run; `value` is 1 for a void one
    # The first stage of a ring between two waits, from the arrival of a run (-1: of requests) on;
    # its layers are a part of it. `value` is 1 if rows decoded in the run, and no prompt followed.
    HEAD = 6


@dataclass(frozen=True, slots=True)
class Span:
    """An interval in seconds of `time.perf_counter`, one clock for all processes of a host. Other
    hosts' times are converted when they are gathered."""

    what: SpanKind
    run: int  # or the number of the draft or of the message
    begin_s: float
    end_s: float
    value: int = 0

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


class Spans(list[Span]):
    """The spans of one rank in the order of their ends. Several threads may add to it."""

    def add(self, what: SpanKind, run: int, begin_s: float, value: int = 0) -> None:
        """Add a span that ends now."""
        self.append(Span(what, run, begin_s, time.perf_counter(), value))

    def moment(self, what: SpanKind, run: int, value: int = 0) -> None:
        now = time.perf_counter()
        self.append(Span(what, run, now, now, value))

    @contextmanager
    def during(self, what: SpanKind, run: int) -> Iterator[None]:
        begin_s = time.perf_counter()
        yield
        self.add(what, run, begin_s)

    def of(self, what: SpanKind) -> list[Span]:
        return [span for span in self if span.what is what]


def link_times(sent: Sequence[Span], taken: Sequence[Span], runs: Collection[int]) -> list[float]:
    """Seconds from the end of each of `runs` at one stage to its begin at the next, where that was
    idle."""
    links_s = list[float]()
    ends = {span.run: span.end_s for span in sent}
    free_s = 0.0
    for span in taken:
        if span.run in runs and free_s < ends[span.run]:
            links_s.append(span.begin_s - ends[span.run])
        free_s = span.end_s
    return links_s
