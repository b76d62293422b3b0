"""Prints the records of one command: a column for each pass. Must not know how a metric is
computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from magicdec.console import make_console
from magicdec.pipeline.record import UNCHECKED
from magicdec.pipelined_run.measured.metrics import SpeculationMetrics
from magicdec.pipelined_run.measured.record import SpeculationRecord
from magicdec.pipelined_run.measured.use import PipelineUse
from magicdec.records.fields import described_fields


def print_table(records: Sequence[SpeculationRecord]) -> None:
    from rich.table import Table

    console = make_console()
    for record in records:
        style = "bold red" if record.status == "diverged" else "bold"
        console.print(verdict(record), style=style)
    table = Table(title=title(records[-1]), title_justify="left")
    table.add_column("")
    for record in records:
        table.add_column(record.name, justify="right")
    metrics = [record.metrics for record in records]
    uses = [None if m is None else m.use for m in metrics]
    for kind, found in ((SpeculationMetrics, metrics), (PipelineUse, uses)):
        for label, cells in rows(kind, found):
            table.add_row(label, *cells)
    console.print(table)


def rows(kind: type, found: Sequence[Any]) -> list[tuple[str, list[str]]]:
    """A row for each field that has a label, and a value in any record."""
    made = []
    for key, _, described in described_fields(kind):
        values = [None if each is None else getattr(each, key) for each in found]
        if described.label and any(value is not None for value in values):
            cells = ["" if value is None else described.show(value) for value in values]
            made.append((described.label, cells))
    return made


def title(record: SpeculationRecord) -> str:
    model, w = record.config["model"], record.config["workload"]
    return (
        f"{model['model']} ({model['dtype']}), {record.workload.dataset}: {w['num_requests']} "
        f"request{'s' * (w['num_requests'] != 1)}, {w['lanes']} at a time"
    )


def verdict(record: SpeculationRecord) -> str:
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
