"""Prints the published tables: the list of them, and one with its numbers beside each other.

A column whose value is the same in every line is said once above the table. Must not know any
system.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from magicdec.console import make_console
from magicdec.reproduce.published_table import Line, PublishedTable, row_of
from magicdec.reproduce.setting import TABLES

FOUND = ("published", "predicted", "measured")
SHORT = {"prefix_len": "prefix", "batch_size": "B"}


def print_tables(folder: Path) -> None:
    """Two lines for each table: what it shows, and how many of its lines have which numbers.
    Raises ValueError if one cannot be read."""
    for name, (about, _) in TABLES.items():
        table = PublishedTable(name, folder)
        lines = table.part(is_demo=False)
        counts = {found: sum(bool(getattr(line, found)) for line in lines) for found in FOUND}
        demo = sum(bool(line.measured) for line in table.part(is_demo=True))
        print(f"{name}: {about}")
        print(
            f"    {', '.join(f'{n} {found}' for found, n in counts.items())}; {demo} at demo size"
        )


def print_table(table: PublishedTable) -> None:
    """What was published, and below it what was measured with the packaged models."""
    print(f"{table.name}: {table.about}")
    for is_demo in (False, True):
        lines = table.part(is_demo)
        if lines:
            print(f"\n{'the packaged models' if is_demo else 'published size'}{said_once(lines)}")
            print_lines(lines)


def said_once(lines: list[Line]) -> str:
    """The columns of the settings that have one value in all lines, such as `: ranks 8`."""
    rows = [row_of(line) for line in lines]
    names = [field.name for field in fields(lines[0].setting)]
    said = [f"{name} {rows[0][name]}" for name in names if rows[0][name] and is_same(rows, name)]
    return f": {', '.join(said)}" if said else ""


def is_same(rows: list[dict[str, Any]], name: str) -> bool:
    return len({row[name] for row in rows}) == 1


def print_lines(lines: list[Line]) -> None:
    """The columns that differ between the lines, and the numbers."""
    rows = [row_of(line) for line in lines]
    own = [field.name for field in fields(lines[0].setting) if not is_same(rows, field.name)]
    numbers = [name for name in (*FOUND, "interval") if any(row[name] for row in rows)]
    grid = make_grid(*(SHORT.get(name, name) for name in [*own, *numbers]))
    for row in rows:
        grid.add_row(*(row[name] for name in [*own, *numbers]))
    make_console().print(grid)


def make_grid(*columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in columns:
        is_text = name in ("model", "draft")
        table.add_column(name, justify="left" if is_text else "right", overflow="fold")
    return table
