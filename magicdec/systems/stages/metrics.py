"""RingMetrics and SpeculationMetrics: the use of stages and ranks, from their spans, and counts of
drafts. Imports no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress, pairwise
from typing import Any

from magicdec.distributed.layer_split import round_seconds
from magicdec.distributed.layout import PipelineLayout
from magicdec.records.fields import RecordPart, recorded
from magicdec.runner.request import Request
from magicdec.systems.pipeinfer.scheduler import Counts
from magicdec.systems.stages.spans import Span, SpanKind, Spans

NO_DRAFTS = "without drafts"
NO_DECODES = "if a stage had no such message"


@dataclass(frozen=True)
class StageUse:
    """Counts of the first rank of a stage while the requests were served."""

    total_s: float
    waiting_s: float
    decode_s: float | None  # median of messages of rows that decode, if there were any
    num_bytes: int
    num_sent: int  # messages
    queued_s: float  # summed over the messages to the stage, from their sending until it took them
    links_s: Sequence[float] = ()  # the same of those that decode and found the stage idle

    @property
    def busy(self) -> float:
        return 1 - self.waiting_s / self.total_s if self.total_s else 0.0

    @property
    def queue_depth(self) -> float:
        """The mean number of sent messages that the stage has not taken: rate times waiting time
        (Little 1961)."""
        return self.queued_s / self.total_s if self.total_s else 0.0


def uses_of(
    stages: Sequence[Spans], sent: Sequence[tuple[int, int]], prompts: Collection[int]
) -> list[StageUse]:
    """The use of each stage, from its first run until the last is home. `sent` are messages and
    bytes; `prompts` the runs of prompts."""
    heads = stages[0].of(SpanKind.HEAD)
    computed = [spans.of(SpanKind.STAGE) for spans in stages]
    uses = []
    for stage, runs in enumerate(computed):
        turns = runs if stage else heads
        taken = runs if stage else [span for span in heads if span.run >= 0]
        decodes = [span.run not in prompts if stage else span.value > 0 for span in turns]
        decoded_s = [span.seconds for span in compress(turns, decodes)]
        decoding = {span.run for span in taken if span.run not in prompts}
        total_s = heads[-1].end_s - turns[0].begin_s if turns else 0.0
        uses.append(
            StageUse(
                total_s=total_s,
                waiting_s=total_s - sum(span.seconds for span in turns),
                decode_s=statistics.median(decoded_s) if decoded_s else None,
                num_sent=sent[stage][0],
                num_bytes=sent[stage][1],
                queued_s=sum(
                    after.begin_s - before.end_s
                    for before, after in zip(computed[stage - 1], taken, strict=True)
                ),
                links_s=link_times(computed[stage - 1], turns, decoding),
            )
        )
    return uses


@dataclass
class DraftCounts:
    """Counts of a ring's messages with drafts and of their rows (rounds of samples), and seconds of
    drafting."""

    num_rounds: int = 0
    num_messages: int = 0
    draft_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RingMetrics(RecordPart):
    """The metrics of a ring. Lists have an entry for each stage."""

    num_layers: list[int] = recorded("layers of each stage")
    tensor_parallel: int = recorded("ranks of a stage, which share its layers")
    num_lanes: int = recorded("lanes: messages that circulate while all samples decode")
    lane_size: int = recorded("samples of a lane, which travel in one message")
    busy: list[float] = recorded(
        "share of the time that a stage did not wait for a message; the rest is idle"
    )
    decode_ms: list[float] | None = recorded(
        "median time of a stage for a message of samples that decode, from its arrival until its "
        "result is sent; of the first stage with the head, sampling, scheduling and drafting, "
        "where no prompt is prefilled with it",
        "ms",
        null=NO_DECODES,
    )
    queue_depth: list[float] = recorded(
        "messages that were sent to a stage and that it had not taken yet, on the link or waiting; "
        "mean over the time",
        "messages",
    )
    sent_messages: list[int] = recorded("messages that each rank of a stage sent to the next")
    sent_bytes: list[int] = recorded("bytes of these, headers included", "bytes")
    decode_hop_bytes: int = recorded(
        "bytes of a message of a whole lane that decodes: its header and hidden states", "bytes"
    )
    link_ms: float | None = recorded(
        "median time of messages that decode from one stage to the next, which was idle",
        "ms",
        null="with one stage, or if no stage was idle",
    )
    predicted_round_ms: float | None = recorded(
        "`max(num_lanes * largest decode_ms, sum of decode_ms + stages * link_ms)`: the time in "
        "which every sample gains a token, or `tokens_per_round` with drafts",
        "ms",
        null=NO_DECODES,
    )
    measured_round_ms: float | None = recorded(
        "the same as measured: the median time between two tokens of a sample",
        "ms",
        null="if every request has a single output token",
    )
    tokens_per_round: float | None = recorded(
        "output tokens that a sample gains in a round: those of all samples after their first, "
        "divided by the rounds of all samples",
        null=NO_DRAFTS,
    )
    draft_ms: float | None = recorded(
        "mean time of the first stage for drafting for such a message, the drafter's part of "
        "admitting samples included",
        "ms",
        null=NO_DRAFTS,
    )


def ring_metrics(
    num_layers: Sequence[int],
    tensor_parallel: int,
    lanes: tuple[int, int],
    uses: Sequence[StageUse],
    hop_bytes: int,
    measured_round_ms: float | None,
    drafts: DraftCounts | None = None,
    num_later: int = 0,
) -> RingMetrics:
    """The metrics from number and size of the lanes and the uses of the stages. `num_later` counts
    output tokens after the first of each sample."""
    stage_s = [use.decode_s for use in uses if use.decode_s is not None]
    has_decodes = len(stage_s) == len(uses)
    links_s = [link_s for use in uses for link_s in use.links_s] if len(uses) > 1 else []
    link_s = statistics.median(links_s) if links_s else None
    links = [link_s or 0.0] * len(uses)
    return RingMetrics(
        num_layers=list(num_layers),
        tensor_parallel=tensor_parallel,
        num_lanes=lanes[0],
        lane_size=lanes[1],
        busy=[use.busy for use in uses],
        decode_ms=[1e3 * seconds for seconds in stage_s] if has_decodes else None,
        queue_depth=[use.queue_depth for use in uses],
        sent_messages=[use.num_sent for use in uses],
        sent_bytes=[use.num_bytes for use in uses],
        decode_hop_bytes=hop_bytes,
        link_ms=None if link_s is None else 1e3 * link_s,
        predicted_round_ms=1e3 * round_seconds(stage_s, links, lanes[0]) if has_decodes else None,
        measured_round_ms=measured_round_ms,
        **describe_drafts(drafts, num_later),
    )


def describe_drafts(drafts: DraftCounts | None, num_later: int) -> dict[str, Any]:
    if drafts is None or drafts.num_rounds == 0:
        return {"tokens_per_round": None, "draft_ms": None}
    return {
        "tokens_per_round": num_later / drafts.num_rounds,
        "draft_ms": 1e3 * drafts.draft_s / drafts.num_messages,
    }


@dataclass(frozen=True, kw_only=True)
class SpeculationMetrics(RecordPart):
    """The metrics of a pipeline over all requests. Shares are of the time between the first and the
    last token."""

    runs: int = recorded("runs that were launched, prompts included", label="runs")
    speculative_runs: int = recorded("those with drafted tokens")
    invalid_runs: int = recorded(
        "cancelled, because none of their rows could be right any more", label="cancelled runs"
    )
    skipped_before: int = recorded(
        "runs that a stage skipped before its first layer; summed over the stages"
    )
    skipped_inside: int = recorded(
        "runs that a stage stopped between its layers; summed over the stages"
    )
    layers_computed: int = recorded("layers that stages computed for runs")
    layers_skipped: int = recorded("layers that they skipped")
    failed_attempts: int = recorded(
        "attempts to draft whose candidate was less probable than the threshold"
    )
    least_margin: float | None = recorded(
        "by how much the largest of the logits by which a token is chosen exceeds the second, at "
        "the committed token where this is least; rounding can change a token with a small one",
        null="of stages that sleep",
    )
    mean_in_flight: float = recorded(
        "runs that are under way; mean over the time", label="runs in flight, mean", digits=2
    )
    most_in_flight: int = recorded("the most of them at one time")
    num_layers: list[int] = recorded("layers of the target on each rank")
    draft_rank: int | None = recorded("the rank that drafts", null="if no mode drafts")
    busy: list[float] = recorded(
        "share of the time in which a rank computes layers or drafts; the rest is idle",
        label="busy by rank, %",
        scale=100,
    )
    idle_s: list[float] = recorded("the rest in seconds, of each rank", "s")
    stage_ms: list[float] | None = recorded(
        "mean time of a stage for a run of decoded tokens that it did not skip",
        "ms",
        label="stages, ms",
        digits=2,
        null="if a stage had no such run",
    )
    draft_ms: float | None = recorded(
        "mean time of a step of the drafter",
        "ms",
        label="draft step, ms",
        digits=2,
        null="if nothing was drafted",
    )
    draft_busy: float = recorded(
        "share of the time in which the drafter drafts", label="drafting, %", scale=100
    )
    link_ms: float | None = recorded(
        "mean time from the end of a run of decoded tokens at a stage to its begin at the next, "
        "which was idle",
        "ms",
        label="link, ms",
        digits=2,
        null="with one stage",
    )


@dataclass(frozen=True)
class Observed:
    """The spans of each rank, and the time that counts: from the first token of all requests to the
    last."""

    layout: PipelineLayout
    by_rank: Sequence[Sequence[Span]]
    begin_s: float
    end_s: float

    @classmethod
    def of_requests(
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


def speculation_metrics(observed: Observed, counts: Counts, has_drafts: bool) -> SpeculationMetrics:
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
    return SpeculationMetrics(
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
        num_layers=[len(each) for each in layout.layers],
        draft_rank=layout.draft_rank if has_drafts else None,
        busy=[each / seconds if seconds else 0.0 for each in busy_s],
        idle_s=[seconds - each for each in busy_s],
        stage_ms=[1e3 * statistics.fmean(each) for each in decoded_s] if all(decoded_s) else None,
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
