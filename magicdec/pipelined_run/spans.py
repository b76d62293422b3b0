"""What a rank did when: the spans from which busy times, skipped layers and traces are computed,
and how those of every rank reach the first rank, by the first rank's clock.

Must not know what is computed from them. Imports torch only to gather.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from magicdec.distributed.groups import Launch
from magicdec.pipeline.tracing import clocks_of, gather_rows


class What(IntEnum):
    STAGE = 1  # a stage computed a run or skipped it; `value` is the number of layers it computed
    DRAFT = 2  # a step of the drafter
    LAUNCH = 3  # the head launched a run; `value` is its number of rows, begin equals end
    PROMPT = 4  # the same for a run of a prompt
    RESULT = 5  # the head took the result of a run; `value` is 1 for a void one


@dataclass(frozen=True)
class Span:
    """Seconds of `time.perf_counter`, which is the same clock in all processes of a host. Those of
    other hosts are converted to the first rank's clock when they are gathered."""

    what: What
    run: int  # or the number of the draft
    begin_s: float
    end_s: float
    value: int = 0

    def counts_from(self, first_run: int, first_draft: int) -> bool:
        """Whether it belongs to one of these runs or drafts, or to a later one."""
        return self.run >= (first_draft if self.what is What.DRAFT else first_run)


@dataclass
class Spans:
    """Those of one rank, in order."""

    found: list[Span] = field(default_factory=list)

    def add(self, what: What, run: int, begin_s: float, value: int = 0) -> None:
        """A span that ends now."""
        self.found.append(Span(what, run, begin_s, time.perf_counter(), value))

    def moment(self, what: What, run: int, value: int = 0) -> None:
        now = time.perf_counter()
        self.found.append(Span(what, run, now, now, value))

    @contextmanager
    def during(self, what: What, run: int) -> Iterator[None]:
        begin_s = time.perf_counter()
        yield
        self.add(what, run, begin_s)


def trace_events(
    traces: Mapping[str, Sequence[Sequence[Span]]], names: Sequence[str]
) -> list[dict[str, object]]:
    """The spans of each rank as events of the Chrome trace format; `names` are those of the ranks.
    Passes follow each other, so each rank is one process."""
    begins = [s.begin_s for by_rank in traces.values() for spans in by_rank for s in spans]
    origin_s = min(begins, default=0.0)
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}}
        for rank, name in enumerate(names)
    ]
    for mode, by_rank in traces.items():
        for rank, spans in enumerate(by_rank):
            events += [_event(span, mode, rank, origin_s) for span in spans]
    return events


def _event(span: Span, mode: str, rank: int, origin_s: float) -> dict[str, object]:
    return {
        "name": f"{span.what.name.lower()} {span.run}",
        "cat": mode,
        "ph": "X",
        "pid": rank,
        "tid": int(span.what),
        "ts": 1e6 * (span.begin_s - origin_s),
        "dur": 1e6 * (span.end_s - span.begin_s),
        "args": {"value": span.value},
    }


def gather_spans(found: Sequence[Span], launch: Launch) -> list[list[Span]]:
    """The spans of every rank. All ranks must call it; the times are right on rank 0 alone."""
    rows = [(s.what, s.run, s.begin_s, s.end_s, s.value) for s in found]
    ours = torch.tensor(rows, dtype=torch.float64).view(-1, 5)
    by_rank = gather_rows(ours, launch.world_size)
    clocks = clocks_of(launch, range(launch.world_size))
    return [from_tensor(rows, clock.ahead_s) for rows, clock in zip(by_rank, clocks, strict=True)]


def from_tensor(rows: Tensor, ahead_s: float) -> list[Span]:
    """`rows` [N, 5] by a clock that is ahead of the first rank's by so much."""
    return [
        Span(What(int(what)), int(run), begin_s - ahead_s, end_s - ahead_s, int(value))
        for what, run, begin_s, end_s, value in rows.tolist()
    ]
