"""MDILLMDetails: the use of the stages of a ring, from their spans, and counts of its drafts.

Imports no torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, ClassVar, Literal

from magicdec.distributed.layer_split import round_seconds
from magicdec.output.tables import Table
from magicdec.records.fields import recorded
from magicdec.records.metric_tables import fixed
from magicdec.systems.details import StageOccupancy
from magicdec.systems.stages.details import StagedDetails, averaged, occupancy_of
from magicdec.systems.stages.spans import Span, SpanKind, Spans, link_times

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
class MDILLMDetails(StagedDetails):
    """The metrics of a ring. Lists have an entry for each stage."""

    stages_title: ClassVar[str] = "Stages of rings over time"

    kind: Literal["mdi_llm"] = recorded("`mdi_llm`", default="mdi_llm")
    num_layers: list[int] = recorded("layers of each stage")
    tensor_parallel: int = recorded("ranks of a stage, which share its layers")
    num_lanes: int = recorded("lanes: messages that circulate while all samples decode")
    lane_size: int = recorded("samples of a lane, which travel in one message")
    busy: list[float] = averaged(
        "share of the time that a stage did not wait for a message; the rest is idle",
    )
    decode_ms: list[float] | None = averaged(
        "median time of a stage for a message of samples that decode, from its arrival until its "
        "result is sent; of the first stage with the head, sampling, scheduling and drafting, "
        "where no prompt is prefilled with it",
        "ms",
        null=NO_DECODES,
    )
    queue_depth: list[float] = averaged(
        "messages that were sent to a stage and that it had not taken yet, on the link or waiting; "
        "mean over the time",
        "messages",
    )
    sent_messages: list[int] = recorded(
        "messages that each rank of a stage sent to the next", over_groups=sum
    )
    sent_bytes: list[int] = recorded("bytes of these, headers included", "bytes", over_groups=sum)
    decode_hop_bytes: int = recorded(
        "bytes of a message of a whole lane that decodes: its header and hidden states", "bytes"
    )
    link_ms: float | None = averaged(
        "median time of messages that decode from one stage to the next, which was idle",
        "ms",
        null="with one stage, or if no stage was idle",
    )
    predicted_round_ms: float | None = averaged(
        "`max(num_lanes * largest decode_ms, sum of decode_ms + stages * link_ms)`: the time in "
        "which every sample gains a token, or `tokens_per_round` with drafts",
        "ms",
        null=NO_DECODES,
    )
    measured_round_ms: float | None = averaged(
        "the same as measured: the median time between two tokens of a sample",
        "ms",
        null="if every request has a single output token",
    )
    tokens_per_round: float | None = averaged(
        "output tokens that a sample gains in a round: those of all samples after their first, "
        "divided by the rounds of all samples",
        null=NO_DRAFTS,
    )
    draft_ms: float | None = averaged(
        "mean time of the first stage for drafting for such a message, the drafter's part of "
        "admitting samples included",
        "ms",
        null=NO_DRAFTS,
    )

    def stages(self) -> list[StageOccupancy]:
        return self.stages_of([f"stage {n}" for n in range(len(self.busy))], self.busy)

    def tables(self, name: str) -> list[Table]:
        return [stage_table(name, self)]


def ring_metrics(
    num_layers: Sequence[int],
    tensor_parallel: int,
    lanes: tuple[int, int],
    uses: Sequence[StageUse],
    hop_bytes: int,
    measured_round_ms: float | None,
    drafts: DraftCounts | None = None,
    num_later: int = 0,
    spans: Sequence[Sequence[Span]] | None = None,
) -> MDILLMDetails:
    """The metrics from number and size of the lanes and the uses of the stages. `num_later` counts
    output tokens after the first of each sample. `spans` are what each stage did."""
    stage_s = [use.decode_s for use in uses if use.decode_s is not None]
    has_decodes = len(stage_s) == len(uses)
    links_s = [link_s for use in uses for link_s in use.links_s] if len(uses) > 1 else []
    link_s = statistics.median(links_s) if links_s else None
    links = [link_s or 0.0] * len(uses)
    return MDILLMDetails(
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
        occupancy=None if spans is None else occupancy_of(spans),
        **describe_drafts(drafts, num_later),
    )


def describe_drafts(drafts: DraftCounts | None, num_later: int) -> dict[str, Any]:
    if drafts is None or drafts.num_rounds == 0:
        return {"tokens_per_round": None, "draft_ms": None}
    return {
        "tokens_per_round": num_later / drafts.num_rounds,
        "draft_ms": 1e3 * drafts.draft_s / drafts.num_messages,
    }


def stage_table(name: str, ring: MDILLMDetails) -> Table:
    """A row for each stage, and the round as predicted and as measured."""
    decode_ms: Sequence[float | None] = ring.decode_ms or [None] * len(ring.busy)
    numbers = zip(
        *(ring.num_layers, ring.busy, decode_ms, ring.queue_depth),
        *(ring.sent_messages, ring.sent_bytes),
        strict=True,
    )
    labels = "stage", "layers", "busy", "idle", "ms a message", "queue depth", "messages"
    return Table(
        [*labels, "bytes a message"],
        [
            (
                stage,
                layers,
                fixed(busy, 0, "%", 100),
                fixed(1 - busy, 0, "%", 100),
                fixed(ms, 2),
                fixed(depth, 2),
                fixed(messages, 0),
                fixed(num_bytes / messages, 0),
            )
            for stage, (layers, busy, ms, depth, messages, num_bytes) in enumerate(numbers)
        ],
        title=name,
        below=describe_round(ring),
    )


def describe_round(ring: MDILLMDetails) -> list[str]:
    """The link, and the round as predicted and as measured."""
    lines = []
    if ring.link_ms is not None:
        lines.append(f"link: {1e3 * ring.link_ms:.0f} us for {ring.decode_hop_bytes:,} bytes")
    if ring.tokens_per_round is not None:
        lines.append(
            f"drafts: {ring.tokens_per_round:.2f} tokens a round, drafted in "
            f"{ring.draft_ms:.2f} ms a message"
        )
    if ring.measured_round_ms is not None and ring.predicted_round_ms is not None:
        lines.append(
            f"round of {ring.num_lanes} lane{'s' * (ring.num_lanes != 1)}: predicted "
            f"{ring.predicted_round_ms:.2f} ms, measured {ring.measured_round_ms:.2f} ms"
        )
    return lines
