"""`magicdec table FILE...`: prints records as tables. Owns the command line;
`report/listing.py` makes the table of runs, and the other commands have tables of their own."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from magicdec.cli.flags import LoneCommand
from magicdec.cli.parsing.parser import Values
from magicdec.cli.parsing.record_files import TABLES, FilesSection, commands_of
from magicdec.config.setting import setting
from magicdec.names import RECORDS, load_named
from magicdec.records.reading import read_records
from magicdec.records.record import Record, RunRecord
from magicdec.report.listing import NARROW, list_records
from magicdec.tables import FORMATS, print_tables


@dataclass(frozen=True)
class TableSection(FilesSection):
    """Which records are printed, and how."""

    kind: str | None = setting(
        None, "Only records of this kind.", choices=tuple(RECORDS), other_defaults="run in config"
    )
    format: str = setting(
        "text",
        "text fits the terminal; latex needs the package booktabs; csv has unrounded numbers, of "
        "runs every column, and where there are runs no other kind without --kind.",
        choices=("text", *FORMATS),
    )


def show(values: Values) -> int:
    """Print the runs as one table, and then the records of each other command as the command itself
    did."""
    args = values[TableSection]
    others: list[Record] = []
    kinds = (args.kind,) if args.kind else tuple(RECORDS)
    listing = list_records(runs_of(args, kinds, others))
    others.sort(key=lambda record: kinds.index(record.kind))
    commands = list(commands_of(others))
    tables = [load_named(TABLES, command[0].kind)(command) for command in commands]
    if listing.rows or not commands:
        print_tables([listing.table(args.format)], args.format, NARROW)
        if tables and args.format == "csv":
            counts = Counter(record.kind for record in others)
            text = " and ".join(f"{count} of kind {kind}" for kind, count in counts.items())
            print(f"other records are left out, {text}; see --kind", file=sys.stderr)
            return 0
    for number, of_command in enumerate(tables):
        if number or listing.rows:
            print()
        print_tables(of_command, args.format)
    return 0


def runs_of(args: FilesSection, kinds: Sequence[str], others: list[Record]) -> Iterator[RunRecord]:
    """The records of runs in the files, one after the other. Those of other kinds are added to
    `others` meanwhile."""
    for path in args.files:
        for record in read_records(path, Record, args.strict):
            if record.kind in kinds and isinstance(record, RunRecord):
                yield record
            elif record.kind in kinds:
                others.append(record)


main = LoneCommand(
    show,
    "Print records as tables: runs in one, with a line for each, and those of each other command "
    "as the command itself did.",
    {"table": TableSection},
)
