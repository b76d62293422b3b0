"""SpeculationRecord, the JSON line of each pass of `magicdec pipeline`, and its metrics: how fast
the requests were served by pipelined speculation (`SpeculationMetrics`), what was launched and
skipped, and how the ranks spent their time (`PipelineUse`). docs/pipelined_speculation.md is made
from these classes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Literal

from magicdec.pipeline.tracing import Span, What
from magicdec.pipelined_run.layout import Layout
from magicdec.pipelined_speculation.options import Counts
from magicdec.records.fields import Part, recorded
from magicdec.request import Request
from magicdec.serving.metrics import ONE_TOKEN, Moves, gaps_ms, request_ms, summary
from magicdec.serving.record import PassRecord


@dataclass(frozen=True, kw_only=True)
class SpeculationMetrics(Part):
    """Shares of time are of the time between the first token and the last. Percentiles are
    interpolated linearly, as in numpy."""

    request_tokens_per_s: float = recorded(
        "tokens of a request after its first, divided by the time from the first to the last; "
        "mean over the requests", "tokens/s", label="tokens/s of a request", digits=2,
    )  # fmt: skip
    predicted_request_tokens_per_s: float | None = recorded(
        "the same as simulated, with the measured times of the stages, links and drafts, and with "
        "the candidates that the drafter gave", "tokens/s", label="predicted", digits=2,
        null="of the baseline, and where requests have several output lengths",
    )  # fmt: skip
    output_throughput: float = recorded(
        "output tokens of all requests divided by the makespan", "tokens/s",
        label="output tokens/s", digits=2,
    )  # fmt: skip
    makespan_s: float = recorded(
        "time from the arrival of the requests to the last token", "s", label="makespan, s",
        digits=2,
    )  # fmt: skip
    prefill_tokens_per_s: float = recorded(
        "prompt tokens of a request divided by the time from the launch of its first run, or the "
        "begin of its first step in one process, to its first token; the time that it waits for a "
        "lane does not count; mean over the requests", "tokens/s",
        label="prefill, tokens/s", digits=1,
    )  # fmt: skip
    mean_ttft_ms: float = recorded(
        "time to first token; mean over the requests", "ms", label="TTFT mean, ms", digits=1
    )
    p50_ttft_ms: float = recorded("median of the same", "ms")
    p90_ttft_ms: float = recorded("its 90th percentile", "ms")
    p99_ttft_ms: float = recorded("its 99th percentile", "ms")
    mean_itl_ms: float | None = recorded(
        "time between two commits of tokens of the same request; mean over all of them", "ms",
        label="ITL mean, ms", digits=2, null=ONE_TOKEN,
    )  # fmt: skip
    p50_itl_ms: float | None = recorded(
        "median of the same", "ms", label="ITL p50, ms", digits=2, null=ONE_TOKEN
    )
    p90_itl_ms: float | None = recorded("its 90th percentile", "ms", null=ONE_TOKEN)
    p99_itl_ms: float | None = recorded(
        "its 99th percentile", "ms", label="ITL p99, ms", digits=2, null=ONE_TOKEN
    )
    use: PipelineUse | None = recorded(
        "what was launched and skipped, and how the ranks spent their time", null="of the baseline"
    )


def speculation_metrics(
    requests: Sequence[Request],
    moves: Mapping[int, Moves],
    use: PipelineUse | None,
    predicted: float | None,
) -> SpeculationMetrics:
    """The metrics of finished requests, which arrived together. `moves` says by the id of a request
    when it got its lane. `predicted` are the tokens/s of a request as simulated."""
    times = [request_ms(request) for request in requests]
    ends = [request.token_times_s[-1] for request in requests]
    makespan_s = max(ends) - min(request.arrived_s for request in requests)
    speeds = [prefill_speed(request, moves[request.request_id]) for request in requests]
    rates = [1e3 / of["tpot"] for of in times if of.get("tpot")]
    return SpeculationMetrics(
        request_tokens_per_s=sum(rates) / len(times),
        predicted_request_tokens_per_s=predicted,
        output_throughput=sum(len(request.output_ids) for request in requests) / makespan_s,
        makespan_s=makespan_s,
        prefill_tokens_per_s=statistics.fmean(speeds),
        use=use,
        **summary("ttft", [of["ttft"] for of in times]),
        **summary("itl", [gap for request in requests for gap in gaps_ms(request)]),
    )


def prefill_speed(request: Request, moves: Moves) -> float:
    """The prompt tokens of a finished request, divided by the seconds from when it got its lane to
    its first token."""
    assert request.first_token_s is not None, "what has ended has a first token"
    (joined_s,) = moves.joined_s  # nothing is preempted here
    return len(request.prompt_ids) / (request.first_token_s - joined_s)


@dataclass(frozen=True, kw_only=True)
class SpeculationRecord(PassRecord):
    """A pass of `magicdec pipeline`: a name of `--modes`."""

    kind: Literal["speculation"] = recorded("`speculation`", default="speculation")
    metrics: SpeculationMetrics | None = recorded("its metrics", null="if `diverged`")


@dataclass(frozen=True, kw_only=True)
class PipelineUse(Part):
    """Numbers of all requests together. Shares of time are of the time between the first token and
    the last."""

    runs: int = recorded("runs that were launched, prompts included", label="runs")
    speculative_runs: int = recorded("those with drafted tokens", label="with drafts")
    invalid_runs: int = recorded(
        "cancelled, because none of their rows could be right any more", label="invalid"
    )
    skipped_before: int = recorded(
        "runs that a stage skipped before its first layer; summed over the stages",
        label="skipped before a stage",
    )  # fmt: skip
    skipped_inside: int = recorded(
        "runs that a stage stopped between its layers; summed over the stages",
        label="skipped inside",
    )  # fmt: skip
    layers_computed: int = recorded("layers that stages computed for runs", label="layers computed")
    layers_skipped: int = recorded("layers that they skipped", label="layers skipped")
    drafted: int = recorded("tokens that were launched as drafts", label="drafted")
    accepted: int = recorded("committed tokens that had been launched as drafts", label="accepted")
    acceptance_rate: float | None = recorded(
        "`accepted / drafted`", label="acceptance, %", digits=1, scale=100,
        null="if nothing was drafted",
    )  # fmt: skip
    failed_attempts: int = recorded(
        "attempts to draft whose first candidate was less probable than the threshold",
        label="failed attempts",
    )  # fmt: skip
    least_margin: float | None = recorded(
        "by how much the largest of the logits by which a token is chosen exceeds the second, at "
        "the committed token where this is least; rounding can change a token with a small one",
        null="of stages that sleep",
    )  # fmt: skip
    mean_in_flight: float = recorded(
        "runs that are under way; mean over the time", label="in flight, mean", digits=2
    )
    most_in_flight: int = recorded("the most of them at one time", label="in flight, most")
    num_layers: list[int] = recorded("layers of the target on each rank")
    draft_rank: int | None = recorded(
        "the rank that drafts; of several, the first", null="if no mode drafts"
    )
    draft_ranks: list[int] | None = recorded(
        "all ranks that draft, which share each layer", null="if no mode drafts"
    )
    busy: list[float] = recorded(
        "share of the time in which a rank computes layers or drafts; the rest is idle",
        label="busy by rank, %", scale=100,
    )  # fmt: skip
    idle_s: list[float] = recorded("the rest in seconds, of each rank", "s")
    stage_ms: list[float] = recorded(
        "mean time of a stage for a run of decoded tokens that it did not skip", "ms",
        label="stages, ms", digits=2,
    )  # fmt: skip
    draft_ms: float | None = recorded(
        "mean time of a step of the drafter, on the first of its ranks", "ms",
        label="draft step, ms", digits=2,
        null="if nothing was drafted",
    )  # fmt: skip
    draft_busy: float = recorded(
        "share of the time in which the drafter drafts", label="drafting, %", scale=100
    )
    link_ms: float | None = recorded(
        "mean time from the end of a run of decoded tokens at a stage to its begin at the next, "
        "which was idle",
        "ms", label="link, ms", digits=2, null="with one stage",
    )  # fmt: skip


@dataclass(frozen=True)
class Observed:
    """The spans of each rank, of the runs and drafts that count, and the time that counts."""

    layout: Layout
    by_rank: Sequence[Sequence[Span]]
    begin_s: float
    end_s: float

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


def pipeline_use(observed: Observed, counts: Counts, has_drafts: bool) -> PipelineUse:
    layout, ranks = observed.layout, range(observed.layout.world_size)
    drafts = observed.of(layout.draft_rank, What.DRAFT)
    work = [[*observed.of(r, What.STAGE), *observed.of(r, What.DRAFT)] for r in ranks]
    computed, before, inside = _layers(observed)
    total = sum(len(observed.of(r, What.STAGE)) * len(layout.layers[r]) for r in layout.stages)
    mean_in_flight, most = _in_flight(observed)
    seconds = observed.end_s - observed.begin_s
    busy_s = [observed.within(spans) for spans in work]
    return PipelineUse(
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
