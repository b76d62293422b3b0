"""Prints the published tables: the list of them, and one with its numbers beside each other.

A column whose value is the same in every line is said once above the table. Must not know any
system.
"""

from __future__ import annotations

from pathlib import Path

from magicdec.reproduce.published_table import Line, PublishedTable, row_of
from magicdec.reproduce.setting import TABLES
from magicdec.tables import Column, Table

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
        if lines := table.part(is_demo):
            print()
            table_of("the packaged models" if is_demo else "published size", lines).print()


def table_of(what: str, lines: list[Line]) -> Table:
    """The settings that differ between the lines, and the numbers; the settings that have one value
    in all lines stand in the title, such as `: ranks 8`."""
    rows = [row_of(line) for line in lines]
    settings = list(lines[0].setting.COLUMNS)
    shared = [name for name in settings if len({row[name] for row in rows}) == 1]
    settings_of_all = ", ".join(f"{name} {rows[0][name]}" for name in shared if rows[0][name])
    numbers = [name for name in (*FOUND, "interval") if any(row[name] for row in rows)]
    names = [*(name for name in settings if name not in shared), *numbers]
    return Table(
        [Column(SHORT.get(name, name), name in ("model", "draft"), name) for name in names],
        [[row[name] for name in names] for row in rows],
        above=[f"{what}: {settings_of_all}" if settings_of_all else what],
        is_framed=False,
    )
