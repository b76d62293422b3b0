"""Prints the records of one command: a column for each pass, then the stages of the ring. Must not
know how a metric is computed."""

from __future__ import annotations

from collections.abc import Sequence

from magicdec.console import make_console
from magicdec.pipeline.metrics import RingMetrics
from magicdec.pipeline.record import UNCHECKED, PipelineRecord
from magicdec.records.fields import described_fields
from magicdec.serving.metrics import ServingMetrics

ROWS = (
    *("makespan_s", "output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms"),
    *("p50_itl_ms", "p99_itl_ms", "mean_e2el_ms"),
)


def print_table(records: Sequence[PipelineRecord]) -> None:
    from rich.table import Table

    console = make_console()
    for record in records:
        style = "bold red" if record.status == "diverged" else "bold"
        console.print(verdict(record), style=style)
    table = Table(title=title(records[-1]), title_justify="left")
    table.add_column("")
    for record in records:
        table.add_column(record.name, justify="right")
    for key, _, described in described_fields(ServingMetrics):
        values = [None if r.metrics is None else getattr(r.metrics, key) for r in records]
        if key in ROWS and any(value is not None for value in values):
            cells = ["" if value is None else described.show(value) for value in values]
            table.add_row(described.label, *cells)
    console.print(table)
    if (ring := records[-1].ring) is not None:
        for line in describe_ring(ring):
            console.print(line)


def title(record: PipelineRecord) -> str:
    model, w = record.config["model"], record.config["workload"]
    return (
        f"{model['model']} ({model['dtype']}), {record.workload.dataset}: {w['num_requests']} "
        f"requests, {w['n_samples']} in flight"
    )


def verdict(record: PipelineRecord) -> str:
    """Whether the tokens are those of the reference, in a line."""
    total = len(record.requests)
    if record.status == UNCHECKED:
        return f"{record.name}: its tokens are not checked, because there is no baseline"
    if record.name == record.reference:
        return f"{record.name}: the reference of the others"
    if record.num_differing == 0:
        return f"{record.name}: all {total} requests have the tokens of {record.reference}"
    text = f"{record.num_differing} of {total} requests differ from {record.reference}"
    return f"{record.name}: {record.status.upper()}, {text}"


def describe_ring(ring: RingMetrics) -> list[str]:
    """A line for each stage, and the round as predicted and as measured."""
    stages = zip(ring.num_layers, ring.busy, ring.decode_ms, ring.sent_bytes, strict=True)
    lines = [
        f"stage {i}: {layers} layers, {busy:.0%} busy, {ms:.2f} ms a message, {sent:,} bytes sent"
        for i, (layers, busy, ms, sent) in enumerate(stages)
    ]
    if ring.link_ms is not None:
        lines.append(f"link: {1e3 * ring.link_ms:.0f} us for {ring.decode_hop_bytes:,} bytes")
    if ring.measured_round_ms is not None:
        lines.append(
            f"round of {ring.num_lanes} lanes: predicted {ring.predicted_round_ms:.2f} ms, "
            f"measured {ring.measured_round_ms:.2f} ms"
        )
    return lines
