"""Prints the records of one command: a column for each pass, then the stages of the ring. Must not
know how a metric is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from magicdec.console import make_console
from magicdec.pipeline.metrics import RingMetrics
from magicdec.pipeline.options import RING, SPECULATIVE_RING
from magicdec.pipeline.record import PipelineRecord
from magicdec.serving.metrics import ServingMetrics
from magicdec.serving.showing.passes import print_passes, rows_of

if TYPE_CHECKING:
    from rich.table import Table

ROWS = (
    *("makespan_s", "output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms"),
    *("p50_itl_ms", "p99_itl_ms", "mean_e2el_ms"),
)
STAGE_COLUMNS = (
    *("layers", "busy", "idle", "ms a message", "queue depth", "messages", "bytes a message"),
)


def print_table(records: Sequence[PipelineRecord]) -> None:
    """Print the records, with the comparison of the tokens above them."""
    rows = rows_of(ServingMetrics, [record.metrics for record in records], ROWS)
    print_passes(title(records[-1]), records, rows)
    console = make_console()
    for record in records:
        if record.ring is None:
            continue
        console.print(record.name, style="bold")
        console.print(stage_table(record.ring))
        for line in describe_round(record.ring):
            console.print(line)
    for line in describe_speedup(records):
        console.print(line)


def title(record: PipelineRecord) -> str:
    model, w = record.config["model"], record.config["workload"]
    return (
        f"{model['model']} ({model['dtype']}), {record.workload.dataset}: {w['num_requests']} "
        f"requests, {w['n_samples']} in flight"
    )


def stage_table(ring: RingMetrics) -> Table:
    """A row for each stage."""
    from rich.table import Table

    table = Table("stage")
    for column in STAGE_COLUMNS:
        table.add_column(column, justify="right")
    columns = (ring.num_layers, ring.busy, ring.decode_ms, ring.queue_depth, ring.sent_messages)
    for stage, cells in enumerate(zip(*columns, ring.sent_bytes, strict=True)):
        layers, busy, ms, depth, messages, num_bytes = cells
        table.add_row(
            str(stage), str(layers), f"{busy:.0%}", f"{1 - busy:.0%}", f"{ms:.2f}", f"{depth:.2f}",
            f"{messages:,}", f"{num_bytes / messages:,.0f}",
        )  # fmt: skip
    return table


def describe_round(ring: RingMetrics) -> list[str]:
    """The link, and the round as predicted and as measured."""
    lines = []
    if ring.link_ms is not None:
        lines.append(f"link: {1e3 * ring.link_ms:.0f} us for {ring.decode_hop_bytes:,} bytes")
    if ring.acceptance_rate is not None:
        lines.append(
            f"drafts: {ring.num_accepted:,} of {ring.num_drafted:,} accepted "
            f"({ring.acceptance_rate:.0%}), {ring.tokens_per_round:.2f} tokens a round, drafted in "
            f"{ring.draft_ms:.2f} ms a message"
        )
    if ring.measured_round_ms is not None:
        lines.append(
            f"round of {ring.num_lanes} lanes: predicted {ring.predicted_round_ms:.2f} ms, "
            f"measured {ring.measured_round_ms:.2f} ms"
        )
    return lines


def describe_speedup(records: Sequence[PipelineRecord]) -> list[str]:
    """What drafts gain over the ring without them, in a line."""
    metrics = {record.name: record.metrics for record in records}
    plain, drafted = metrics.get(RING), metrics.get(SPECULATIVE_RING)
    if plain is None or drafted is None:
        return []
    times = drafted.output_throughput / plain.output_throughput
    return [f"with drafts, the ring has {times:.2f}x the output tokens/s"]
