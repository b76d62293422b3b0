"""`magicdec table FILE...`: prints records as a table, or checks their metrics. Owns the command
line; `report/listing.py` makes the table of runs, the other commands have tables of their own, and
`records/metrics.py` checks."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from magicdec.cli.parsing.parser import Parser, Values
from magicdec.cli.parsing.record_files import RUN, TABLES, FilesSection, read_commands, read_kind
from magicdec.config.sections import PictureSection
from magicdec.config.setting import same, setting
from magicdec.figures import check_picture
from magicdec.names import RECORDS, load_named
from magicdec.records.comparison.conditions import describe
from magicdec.records.metrics import check_metrics
from magicdec.records.reading import load_records
from magicdec.records.record import RunRecord
from magicdec.records.writing import check_writable
from magicdec.report.listing import MOST_RECORDS, NARROW, SORT_KEYS, list_records, noise_lines
from magicdec.report.settings import SETTINGS
from magicdec.tables import FORMATS, print_tables

DRAWN = "serving"  # the kind of record that --plot draws
RUN_FLAGS = ("group_by", "sort", "reverse")


@dataclass(frozen=True)
class TableSection(FilesSection):
    """Which records are printed, and how."""

    kind: str | None = setting(
        None, "Only records of this kind.", choices=tuple(RECORDS), other_defaults="run in config"
    )
    group_by: tuple[str, ...] = setting(
        (),
        "One line for each combination of these settings, such as B or kv_policy, with the number "
        "of runs and the median of each metric.",
        metavar="KEY",
        choices=tuple(SETTINGS),
    )
    sort: str | None = setting(
        None,
        "Sort by a metric, the largest first, or by a setting, the smallest first. Default: the "
        "order of the files.",
        metavar="KEY",
        choices=tuple(SORT_KEYS),
    )
    reverse: bool = setting(False, "The opposite order of --sort.")
    format: str = setting(
        "text",
        "text fits the terminal; latex needs the package booktabs; csv has unrounded numbers, of "
        "runs every column, and where there are runs no other kind without --kind.",
        choices=("text", *FORMATS),
    )
    check: bool = setting(
        False,
        "Compute every metric again from the samples in its record, in place of the table. The "
        "exit code is 1 if one differs or a record has no samples.",
    )
    plot: Path | None = same(PictureSection, "plot")

    def __post_init__(self) -> None:
        """Raises ValueError for a key that a grouped table does not have."""
        if self.group_by and self.sort in SETTINGS and self.sort not in self.group_by:
            raise ValueError(f"--sort {self.sort} is not in the table; add it to --group_by")


def build_parser() -> Parser:
    return Parser(
        "Print records as tables: runs in one, with a line for each, and those of each other "
        "command as the command itself did.",
        {"table": TableSection},
        prog="magicdec table",
    )


def main() -> None:
    """`magicdec table FILE...`"""
    try:
        values = build_parser().read(sys.argv[1:])
        args = values[TableSection]
        if args.check:
            sys.exit(check({path: load_records(path, is_strict=True) for path in args.files}))
        show(args, values)
    except ValueError as error:
        print(f"magicdec table: {error}", file=sys.stderr)
        sys.exit(2)


def show(args: TableSection, values: Values) -> None:
    """Print the runs as one table, and then the records of each other command as the command itself
    did. Raises ValueError for a flag that has nothing to work on."""
    others = Counter[str]()
    runs = read_kind(args, RUN, others)
    records = (record for _, record in runs if args.kind in (None, RUN))
    first = list(islice(records, MOST_RECORDS + 1))
    is_ascending = None if not args.reverse else args.sort not in SETTINGS
    listing = list_records(chain(first, records), args.group_by, args.sort, is_ascending)
    kinds = [kind for kind in others if args.kind in (None, kind)]
    if kinds and not listing.rows:
        reason = "it is for records of runs, and there are none"
        values.refuse_given([f"table.{name}" for name in RUN_FLAGS], reason)
    if args.plot is not None:
        check_picture("--plot", args.plot)
        check_writable("--plot", args.plot)
        if DRAWN not in kinds:
            raise ValueError(f"--plot {args.plot} draws passes of `magicdec serve` alone")
    commands = [
        (kind, command)
        for kind in kinds
        for command in read_commands(kind, args.files, args.strict)
    ]
    if listing.rows or not commands:
        is_noted = args.format == "text" and not args.group_by
        table = listing.table(args.format, noise_lines(first) if is_noted else ())
        print_tables([table], args.format, NARROW)
    if listing.rows and commands and args.format == "csv":
        counts = " and ".join(f"{others[kind]} of kind {kind}" for kind in kinds)
        print(f"other records are left out, {counts}; see --kind", file=sys.stderr)
        return
    for number, (kind, command) in enumerate(commands):
        if number or listing.rows:
            print()
        print_tables(load_named(TABLES, kind)(command), args.format)
    if args.plot is not None:
        from magicdec.serving.bars import draw_bars

        draw_bars("--plot", args.plot, [command for kind, command in commands if kind == DRAWN])


def check(files: dict[Path, list[RunRecord]]) -> int:
    """Check the metrics of all records. Returns the exit code."""
    num_records = num_wrong = 0
    for path, records in files.items():
        for number, record in enumerate(records, 1):
            try:
                problems = [f"{name} differs from its samples" for name in check_metrics(record)]
            except ValueError as error:
                problems = [f"its metrics cannot be computed again, {error}"]
            for problem in problems:
                print(f"{path}: record {number} ({describe(record)}): {problem}")
            num_records, num_wrong = num_records + 1, num_wrong + bool(problems)
    print(f"{num_records - num_wrong} of {num_records} records have the metrics of their samples")
    return int(num_wrong > 0)
