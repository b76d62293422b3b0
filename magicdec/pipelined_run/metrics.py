"""Computes the `SpeculationMetrics` of a pass from the spans of its ranks and the counts of its
scheduler.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

from magicdec.pipeline.tracing import Span, What
from magicdec.pipelined_run.layout import Layout
from magicdec.pipelined_speculation.metrics import SpeculationMetrics
from magicdec.pipelined_speculation.options import Counts
from magicdec.request import Request


@dataclass(frozen=True)
class Observed:
    """The spans of each rank, of the runs and drafts that count, and the time that counts."""

    layout: Layout
    by_rank: Sequence[Sequence[Span]]
    begin_s: float
    end_s: float

    @classmethod
    def of_requests(
        cls, layout: Layout, by_rank: Sequence[Sequence[Span]], requests: Sequence[Request]
    ) -> Observed:
        """What counts is the time between the first token of all requests and the last."""
        begin_s = min(request.token_times_s[0] for request in requests)
        end_s = max(request.token_times_s[-1] for request in requests)
        return cls(layout, by_rank, begin_s, end_s)

    def of(self, rank: int, what: What) -> list[Span]:
        return [span for span in self.by_rank[rank] if span.what is what]

    @property
    def rows(self) -> dict[int, int]:
        """The number of rows of each run that is not of a prompt."""
        return {span.run: span.value for span in self.of(0, What.LAUNCH)}

    def within(self, spans: Sequence[Span]) -> float:
        """Seconds of the time that counts in which at least one of the spans is."""
        total, until = 0.0, self.begin_s
        for span in sorted(spans, key=lambda span: span.begin_s):
            begin, end = max(span.begin_s, until), min(span.end_s, self.end_s)
            total, until = total + max(0.0, end - begin), max(until, end)
        return total


def speculation_metrics(observed: Observed, counts: Counts, has_drafts: bool) -> SpeculationMetrics:
    layout, ranks = observed.layout, range(observed.layout.world_size)
    drafts = observed.of(layout.draft_rank, What.DRAFT)
    work = [[*observed.of(r, What.STAGE), *observed.of(r, What.DRAFT)] for r in ranks]
    computed, before, inside = _layers(observed)
    total = sum(len(observed.of(r, What.STAGE)) * len(layout.layers[r]) for r in layout.stages)
    mean_in_flight, most = _in_flight(observed)
    seconds = observed.end_s - observed.begin_s
    busy_s = [observed.within(spans) for spans in work]
    return SpeculationMetrics(
        runs=counts.runs,
        speculative_runs=counts.speculative_runs,
        invalid_runs=counts.invalid_runs,
        skipped_before=before,
        skipped_inside=inside,
        layers_computed=computed,
        layers_skipped=total - computed,
        drafted=counts.drafted,
        accepted=counts.accepted,
        acceptance_rate=counts.accepted / counts.drafted if counts.drafted else None,
        failed_attempts=counts.failed_attempts,
        least_margin=counts.least_margin if math.isfinite(counts.least_margin) else None,
        mean_in_flight=mean_in_flight,
        most_in_flight=most,
        num_layers=[len(layers) for layers in layout.layers],
        draft_rank=layout.draft_rank if has_drafts else None,
        draft_ranks=list(layout.draft_ranks) if has_drafts else None,
        busy=[each / seconds if seconds else 0.0 for each in busy_s],
        idle_s=[seconds - each for each in busy_s],
        stage_ms=[_ms([*chain(*stage_times(observed, r).values())]) for r in layout.stages],
        draft_ms=_ms([span.end_s - span.begin_s for span in drafts]) if drafts else None,
        draft_busy=observed.within(drafts) / seconds if seconds else 0.0,
        link_ms=None if (link_s := link_time(observed)) is None else 1e3 * link_s,
    )


def stage_times(observed: Observed, rank: int) -> dict[int, list[float]]:
    """Seconds of a stage for each run that it did not skip, by the number of rows; no prompts."""
    rows, layers = observed.rows, len(observed.layout.layers[rank])
    times: dict[int, list[float]] = {}
    for span in observed.of(rank, What.STAGE):
        if span.run in rows and span.value == layers:
            times.setdefault(rows[span.run], []).append(span.end_s - span.begin_s)
    return times


def link_time(observed: Observed) -> float | None:
    """The mean time from the end of a run at a stage until the next stage, on another rank and
    idle, begins it; no prompts."""
    links_s, rows = list[float](), observed.rows
    stages = observed.layout.stages
    for here, there in pairwise(stages):
        ends = {span.run: span.end_s for span in observed.of(here, What.STAGE)}
        free_s = 0.0
        for span in observed.of(there, What.STAGE):
            if free_s < ends[span.run] and span.run in rows:
                links_s.append(span.begin_s - ends[span.run])
            free_s = span.end_s
    return statistics.fmean(links_s) if links_s else None


def _layers(observed: Observed) -> tuple[int, int, int]:
    """Layers that were computed, and how many times a stage skipped a run before its first layer
    and between its layers."""
    computed = before = inside = 0
    for rank in observed.layout.stages:
        for span in observed.of(rank, What.STAGE):
            computed += span.value
            before += span.value == 0
            inside += 0 < span.value < len(observed.layout.layers[rank])
    return computed, before, inside


def _in_flight(observed: Observed) -> tuple[float, int]:
    """The mean number of runs in flight in the time that counts, and the most of them ever."""
    home = {span.run: span.begin_s for span in observed.of(0, What.RESULT)}
    flights = [
        Span(What.LAUNCH, span.run, span.begin_s, home[span.run])
        for span in (*observed.of(0, What.PROMPT), *observed.of(0, What.LAUNCH))
    ]
    seconds = observed.end_s - observed.begin_s
    total = sum(observed.within([flight]) for flight in flights)
    changes = sorted([(f.begin_s, 1) for f in flights] + [(f.end_s, -1) for f in flights])
    most = max(accumulate(change for _, change in changes), default=0)
    return (total / seconds if seconds else 0.0), most


def _ms(seconds: Sequence[float]) -> float:
    """Their mean; 0 if there are none."""
    return 1e3 * statistics.fmean(seconds) if seconds else 0.0
