"""Prints the records of one command as a table with a column for each batching and a row for each
metric. Must not know how a metric is computed."""

from __future__ import annotations

from collections.abc import Sequence

from magicdec.console import make_console
from magicdec.records.fields import described_fields
from magicdec.serving.metrics import ServingMetrics
from magicdec.serving.record import ServingRecord


def print_table(records: Sequence[ServingRecord]) -> None:
    """Print the records, with the comparison of the tokens above them."""
    from rich.table import Table

    console = make_console()
    for record in records:
        console.print(verdict(record), style="bold" if record.status == "ok" else "bold red")
    table = Table(title=title(records[0]), title_justify="left")
    table.add_column("")
    for record in records:
        table.add_column(record.name, justify="right")
    for label, cells in table_rows(records):
        table.add_row(label, *cells)
    console.print(table)


def verdict(record: ServingRecord) -> str:
    """Whether the tokens are those of the reference, in a line."""
    total = len(record.requests)
    if record.name == record.reference:
        return f"{record.name}: the reference of the others"
    if record.num_differing is None:
        return f"{record.name}: sampled, so the tokens of drafts are not compared"
    if record.num_differing == 0:
        return f"{record.name}: all {total} requests have the tokens of {record.reference}"
    text = f"{record.num_differing} of {total} requests differ from {record.reference}"
    return f"{record.name}: {record.status.upper()}, {text}"


def title(record: ServingRecord) -> str:
    model, w = record.config["model"], record.config["workload"]
    output = "" if w["output_len"] is None else f", output length {w['output_len']}"
    return (
        f"{model['model']} ({model['dtype']}), {record.workload.dataset}: {w['num_requests']} "
        f"requests, arrival {w['arrival']}{output}, max concurrency {w['max_concurrency']}"
    )


def table_rows(records: Sequence[ServingRecord]) -> list[tuple[str, list[str]]]:
    """The label and the cells of each metric that at least one record has."""
    rows = []
    for key, _, description in described_fields(ServingMetrics):
        values = [None if r.metrics is None else getattr(r.metrics, key) for r in records]
        if any(value is not None for value in values):
            cells = ["" if value is None else description.show(value) for value in values]
            rows.append((description.label, cells))
    return rows
