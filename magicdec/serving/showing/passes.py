"""What the tables of all commands that serve requests have in common: a line for each pass, which
says whether its tokens are right, and a table with a column for each pass.

Must not know what any pass does, nor how a metric is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from magicdec.console import make_console
from magicdec.records.fields import described_fields
from magicdec.serving.record import PassRecord


def verdict(record: PassRecord) -> str:
    """Whether the tokens are those of the reference, in a line."""
    name, total = record.name, len(record.requests)
    if record.reference is None:
        return f"{name}: its tokens are not checked, because there is no other pass"
    if name == record.reference:
        return f"{name}: the reference of the others"
    if record.num_differing is None:
        return f"{name}: sampled, so the tokens of drafts are not compared"
    if record.num_differing == 0:
        return f"{name}: all {total} requests have the tokens of {record.reference}"
    text = f"{record.num_differing} of {total} requests differ from {record.reference}"
    why = "; rounding may be the reason" if record.status == "differs" else ""
    return f"{name}: {record.status.upper()}, {text}{why}"


def rows_of(
    kind: type, metrics: Sequence[Any], only: Sequence[str] | None = None
) -> list[tuple[str, list[str]]]:
    """The label and the cells of each field of the dataclass `kind` that has a label, and a value
    in at least one pass. `metrics` has that dataclass of each pass, or None. `only` names the
    fields that may have a row; None stands for all."""
    rows = []
    for key, _, described in described_fields(kind):
        values = [None if each is None else getattr(each, key) for each in metrics]
        is_wanted = described.label and (only is None or key in only)
        if is_wanted and any(value is not None for value in values):
            cells = ["" if value is None else described.show(value) for value in values]
            rows.append((described.label, cells))
    return rows


def print_passes(
    title: str, records: Sequence[PassRecord], rows: Sequence[tuple[str, list[str]]]
) -> None:
    """Print whether the tokens of each pass are right, and the table."""
    from rich.table import Table

    console = make_console()
    for record in records:
        style = "bold red" if record.status == "diverged" else "bold"
        console.print(verdict(record), style=style)
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for record in records:
        table.add_column(record.name, justify="right")
    for label, cells in rows:
        table.add_row(label, *cells)
    console.print(table)
