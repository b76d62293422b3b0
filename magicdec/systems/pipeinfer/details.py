"""PipeInferDetails: the use of the ranks of pipelined speculation, from their spans. Imports no
torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar, Literal

from magicdec.distributed.layout import PipelineLayout
from magicdec.records.fields import recorded
from magicdec.runner.request import Request
from magicdec.systems.details import StageOccupancy
from magicdec.systems.pipeinfer.scheduler import Counts
from magicdec.systems.stages.details import StagedDetails, averaged, occupancy_of
from magicdec.systems.stages.spans import Span, SpanKind, link_times


@dataclass(frozen=True, kw_only=True)
class PipeInferDetails(StagedDetails):
    """The metrics of a pipeline over all requests. Shares are of the time between the first and the
    last token."""

    heading: ClassVar[str] = "Pipelined speculation"
    notes: ClassVar[tuple[str, ...]] = (
        "a run: tokens of one request that pass the stages together, such as a token and its "
        "drafts; cancelled: the token that it was drafted after has turned out to be another one",
    )
    stages_title: ClassVar[str] = "Ranks of pipelined speculation over time"

    kind: Literal["pipeinfer"] = recorded("`pipeinfer`", default="pipeinfer")
    runs: int = recorded("runs that were launched, prompts included", label="runs", over_groups=sum)
    speculative_runs: int = recorded("those with drafted tokens", over_groups=sum)
    invalid_runs: int = recorded(
        "cancelled, because none of their rows could be right any more",
        label="cancelled runs",
        over_groups=sum,
    )
    skipped_before: int = recorded(
        "runs that a stage skipped before its first layer; summed over the stages", over_groups=sum
    )
    skipped_inside: int = recorded(
        "runs that a stage stopped between its layers; summed over the stages", over_groups=sum
    )
    layers_computed: int = recorded("layers that stages computed for runs", over_groups=sum)
    layers_skipped: int = recorded("layers that they skipped", over_groups=sum)
    failed_attempts: int = recorded(
        "attempts to draft whose candidate was less probable than the threshold", over_groups=sum
    )
    least_margin: float | None = recorded(
        "by how much the largest of the logits by which a token is chosen exceeds the second, at "
        "the committed token where this is least; rounding can change a token with a small one",
        null="of stages that sleep",
        over_groups=min,
    )
    mean_in_flight: float = averaged(
        "runs that are under way; mean over the time",
        label="runs in flight, mean",
        digits=2,
    )
    most_in_flight: int = recorded("the most of them at one time", over_groups=max)
    num_layers: list[int] = recorded("layers of the target on each rank")
    draft_rank: int | None = recorded("the rank that drafts", null="if no mode drafts")
    busy: list[float] = averaged(
        "share of the time in which a rank computes layers or drafts; the rest is idle",
        label="busy by rank, %",
        scale=100,
    )
    idle_s: list[float] = recorded("the rest in seconds, of each rank", "s", over_groups=sum)
    stage_ms: list[float] | None = averaged(
        "mean time of a stage for a run of decoded tokens that it did not skip",
        "ms",
        label="stages, ms",
        digits=2,
        null="if a stage had no such run",
    )
    draft_ms: float | None = averaged(
        "mean time of a step of the drafter",
        "ms",
        label="draft step, ms",
        digits=2,
        null="if nothing was drafted",
    )
    draft_busy: float = averaged(
        "share of the time in which the drafter drafts",
        label="drafting, %",
        scale=100,
    )
    link_ms: float | None = averaged(
        "mean time from the end of a run of decoded tokens at a stage to its begin at the next, "
        "which was idle",
        "ms",
        label="link, ms",
        digits=2,
        null="with one stage",
    )

    def stages(self) -> list[StageOccupancy]:
        names = [
            f"rank {rank}{' (drafts)' * (rank == self.draft_rank)}"
            for rank in range(len(self.busy))
        ]
        return self.stages_of(names, self.busy)


@dataclass(frozen=True)
class Observed:
    """The spans of each rank, and the time that counts: from the first token of all requests to the
    last."""

    layout: PipelineLayout
    by_rank: Sequence[Sequence[Span]]
    begin_s: float
    end_s: float

    @classmethod
    def from_requests(
        cls, layout: PipelineLayout, by_rank: Sequence[Sequence[Span]], requests: Sequence[Request]
    ) -> Observed:
        begin_s = min(request.token_times_s[0] for request in requests)
        end_s = max(request.token_times_s[-1] for request in requests)
        return cls(layout, by_rank, begin_s, end_s)

    def of(self, rank: int, what: SpanKind) -> list[Span]:
        return [span for span in self.by_rank[rank] if span.what is what]

    @property
    def rows(self) -> dict[int, int]:
        """The number of rows of each run that is not of a prompt."""
        return {span.run: span.value for span in self.of(0, SpanKind.LAUNCH)}

    def within(self, spans: Sequence[Span]) -> float:
        """Seconds of the time that counts that the spans cover."""
        total = 0.0
        until = self.begin_s
        for span in sorted(spans, key=lambda span: span.begin_s):
            begin = max(span.begin_s, until)
            end = min(span.end_s, self.end_s)
            total = total + max(0.0, end - begin)
            until = max(until, end)
        return total


def speculation_metrics(observed: Observed, counts: Counts, has_drafts: bool) -> PipeInferDetails:
    layout = observed.layout
    rows = observed.rows
    seconds = observed.end_s - observed.begin_s
    drafts = observed.of(layout.draft_rank, SpanKind.DRAFT)
    busy_s = [
        observed.within([*observed.of(rank, SpanKind.STAGE), *observed.of(rank, SpanKind.DRAFT)])
        for rank in range(layout.world_size)
    ]
    stages = [
        (observed.of(rank, SpanKind.STAGE), len(layout.layers[rank])) for rank in layout.stages
    ]
    layers = [(span.value, size) for spans, size in stages for span in spans]
    mean_in_flight, most = _in_flight(observed)
    decoded_s = [
        [span.seconds for span in spans if span.run in rows and span.value == size]
        for spans, size in stages
    ]
    least_margin = counts.least_margin if math.isfinite(counts.least_margin) else None
    return PipeInferDetails(
        runs=counts.runs,
        speculative_runs=counts.speculative_runs,
        invalid_runs=counts.invalid_runs,
        failed_attempts=counts.failed_attempts,
        least_margin=least_margin,
        skipped_before=sum(computed == 0 for computed, _ in layers),
        skipped_inside=sum(0 < computed < size for computed, size in layers),
        layers_computed=sum(computed for computed, _ in layers),
        layers_skipped=sum(size - computed for computed, size in layers),
        mean_in_flight=mean_in_flight,
        most_in_flight=most,
        occupancy=occupancy_of(observed.by_rank),
        num_layers=[len(layer) for layer in layout.layers],
        draft_rank=layout.draft_rank if has_drafts else None,
        busy=[busy / seconds if seconds else 0.0 for busy in busy_s],
        idle_s=[seconds - busy for busy in busy_s],
        stage_ms=[1e3 * statistics.fmean(times) for times in decoded_s] if all(decoded_s) else None,
        draft_ms=_mean_ms([span.seconds for span in drafts]),
        draft_busy=observed.within(drafts) / seconds if seconds else 0.0,
        link_ms=_mean_ms(
            [
                link_s
                for (sent, _), (taken, _) in pairwise(stages)
                for link_s in link_times(sent, taken, rows)
            ]
        ),
    )


def _in_flight(observed: Observed) -> tuple[float, int]:
    home = {span.run: span.begin_s for span in observed.of(0, SpanKind.RESULT)}
    flights = [
        Span(SpanKind.LAUNCH, span.run, span.begin_s, home[span.run])
        for span in (*observed.of(0, SpanKind.PROMPT), *observed.of(0, SpanKind.LAUNCH))
    ]
    seconds = observed.end_s - observed.begin_s
    total = sum(observed.within([flight]) for flight in flights)
    changes = sorted([(f.begin_s, 1) for f in flights] + [(f.end_s, -1) for f in flights])
    most = max(accumulate(change for _, change in changes), default=0)
    return (total / seconds if seconds else 0.0), most


def _mean_ms(seconds: Sequence[float]) -> float | None:
    return 1e3 * statistics.fmean(seconds) if seconds else None
