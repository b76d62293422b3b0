"""RingMetrics: how the stages of a ring spent their time, and the time of a round as it is
predicted from that of the stages and links. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from magicdec.distributed.layer_split import round_seconds
from magicdec.records.fields import Part, recorded

NO_DRAFTS = "without drafts"


@dataclass(frozen=True)
class StageUse:
    """What the first rank of a stage counted while the requests were served."""

    total_s: float
    waiting_s: float
    decode_s: float  # median of messages of rows that decode
    num_bytes: int
    num_sent: int  # messages
    queued_s: float  # summed over the messages to the stage, from their sending until it took them

    @property
    def busy(self) -> float:
        return 1 - self.waiting_s / self.total_s if self.total_s else 0.0

    @property
    def queue_depth(self) -> float:
        """The mean number of messages that are sent and not taken, which is their rate times the
        time that each is (Little 1961)."""
        return self.queued_s / self.total_s if self.total_s else 0.0


@dataclass
class DraftCounts:
    """What the first rank counted of the drafts in the messages. `num_verified`: rows of messages
    that carried drafts."""

    num_verified: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_messages: int = 0
    draft_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RingMetrics(Part):
    """Lists have an entry for each stage."""

    num_layers: list[int] = recorded("layers of each stage")
    tensor_parallel: int = recorded("ranks of a stage, which share its layers")
    num_lanes: int = recorded("lanes: messages that circulate while all samples decode")
    lane_size: int = recorded("samples of a lane, which travel in one message")
    busy: list[float] = recorded(
        "share of the time that a stage did not wait for a message; the rest is idle"
    )
    decode_ms: list[float] = recorded(
        "median time of a stage for a message of samples that decode, from its arrival until its "
        "result is sent; of the first stage with the head, sampling, scheduling and drafting, "
        "where no prompt is prefilled with it",
        "ms",
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
        "time of such a message from one stage to the next, where stages only pass it on: median "
        "of rounds without other messages, divided by the number of stages",
        "ms", null="with one stage",
    )  # fmt: skip
    predicted_round_ms: float = recorded(
        "`max(num_lanes * largest decode_ms, sum of decode_ms + stages * link_ms)`: the time in "
        "which every sample gains a token, or `tokens_per_round` with drafts",
        "ms",
    )
    measured_round_ms: float | None = recorded(
        "the same as measured: the median time between two tokens of a sample",
        "ms", null="if every request has a single output token",
    )  # fmt: skip
    num_drafted: int | None = recorded("draft tokens of all samples", null=NO_DRAFTS)
    num_accepted: int | None = recorded(
        "draft tokens that were accepted, also past the end of a sample", null=NO_DRAFTS
    )
    acceptance_rate: float | None = recorded(
        "accepted tokens divided by draft tokens", null=NO_DRAFTS
    )
    tokens_per_round: float | None = recorded(
        "output tokens that a sample gains in a round: those of all samples after their first, "
        "divided by the rounds of all samples",
        null=NO_DRAFTS,
    )
    draft_ms: float | None = recorded(
        "mean time of the first stage for drafting for such a message, the drafter's part of "
        "admitting samples included",
        "ms", null=NO_DRAFTS,
    )  # fmt: skip


def ring_metrics(
    num_layers: Sequence[int],
    tensor_parallel: int,
    lanes: tuple[int, int],
    uses: Sequence[StageUse],
    hop_bytes: int,
    link_s: float | None,
    measured_round_ms: float | None,
    drafts: DraftCounts | None = None,
    num_later: int = 0,
) -> RingMetrics:
    """`lanes` are their number and their size; `uses` are those of the stages in order.
    `num_later` are the output tokens of all samples without the first of each."""
    stage_s = [use.decode_s for use in uses]
    return RingMetrics(
        num_layers=list(num_layers),
        tensor_parallel=tensor_parallel,
        num_lanes=lanes[0],
        lane_size=lanes[1],
        busy=[use.busy for use in uses],
        decode_ms=[1e3 * seconds for seconds in stage_s],
        queue_depth=[use.queue_depth for use in uses],
        sent_messages=[use.num_sent for use in uses],
        sent_bytes=[use.num_bytes for use in uses],
        decode_hop_bytes=hop_bytes,
        link_ms=None if link_s is None else 1e3 * link_s,
        predicted_round_ms=1e3 * predict_round(stage_s, link_s or 0.0, lanes[0]),
        measured_round_ms=measured_round_ms,
        **describe_drafts(drafts, num_later),
    )


def describe_drafts(drafts: DraftCounts | None, num_later: int) -> dict[str, Any]:
    """The fields of `RingMetrics` about drafts."""
    names = ("num_drafted", "num_accepted", "acceptance_rate", "tokens_per_round", "draft_ms")
    if drafts is None or drafts.num_verified == 0:
        return dict.fromkeys(names)
    rate, tokens = drafts.num_accepted / drafts.num_drafted, num_later / drafts.num_verified
    each_ms = 1e3 * drafts.draft_s / drafts.num_messages
    values = drafts.num_drafted, drafts.num_accepted, rate, tokens, each_ms
    return dict(zip(names, values, strict=True))


def predict_round(stage_s: Sequence[float], link_s: float, num_lanes: int) -> float:
    """Seconds until every lane has gained a token, with equal links."""
    return round_seconds(stage_s, [link_s] * len(stage_s), num_lanes)
