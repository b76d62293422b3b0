"""`magicdec table FILE...`: prints records as a table, or checks their metrics. Owns the command
line; `report/listing.py` makes the table of runs, the commands that serve requests have tables of
their own, and `records/metrics.py` checks."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from magicdec.cli.parsing.parser import Parser
from magicdec.cli.parsing.record_files import (
    KINDS,
    Kind,
    add_record_files,
    load,
    read_commands,
    read_files,
)
from magicdec.records.comparison.conditions import describe
from magicdec.records.metrics import check_metrics
from magicdec.records.reading import load_records
from magicdec.records.record import RunRecord
from magicdec.records.writing import check_writable
from magicdec.report.figures.style import check_picture
from magicdec.report.listing import FORMATS, SORT_KEYS, Noted, list_records, noise_lines, print_text
from magicdec.report.point import SETTINGS

RUN_FLAGS = {"check": False, "group_by": [], "sort": None, "format": "text"}  # with their defaults


def main() -> None:
    """`magicdec table FILE...`"""
    try:
        args, _ = make_parser().read(sys.argv[1:])
        check_keys(args)
        if args.check:
            sys.exit(check({path: load_records(path, is_strict=True) for path in args.files}))
        others = Counter[str]()
        records = Noted(record for _, record in read_files(args, can_be_empty=True, others=others))
        is_ascending = None if not args.reverse else args.sort not in SETTINGS
        listing = list_records(records, args.group_by, args.sort, is_ascending)
        kinds = {name: KINDS[name] for name in others if name in KINDS}
        if kinds and not listing.rows:
            check_flags_of_runs(args)
        commands = read_passes(kinds, args)
        if args.format != "text":
            print(FORMATS[args.format](listing), end="")
            return
        if listing.rows or not commands:
            print_text(listing, [] if args.group_by else noise_lines(records.few))
        show_passes(commands, is_first=not listing.rows)
        draw_passes(commands, args.plot)
    except ValueError as error:
        print(f"magicdec table: {error}", file=sys.stderr)
        sys.exit(2)


Commands = list[tuple[Kind, list[Any]]]
"""The records of each command that served requests, with their kind."""


def check_flags_of_runs(args: argparse.Namespace) -> None:
    """Raises ValueError for a flag that only records of runs have."""
    for name, default in RUN_FLAGS.items():
        if getattr(args, name) != default:
            raise ValueError(f"--{name} is for records of runs, which have no passes; leave it out")


def read_passes(kinds: Mapping[str, Kind], args: argparse.Namespace) -> Commands:
    """The commands of these kinds in the files. Raises ValueError if --plot has nothing to draw."""
    if args.plot is not None:
        check_picture("--plot", args.plot)
        check_writable("--plot", args.plot)
        if not any(kind.draw for kind in kinds.values()):
            raise ValueError(f"--plot {args.plot} draws passes of `magicdec pipeline` alone")
    return [
        (kind, records)
        for name, kind in kinds.items()
        for records in read_commands(name, args.files, args.strict)
    ]


def show_passes(commands: Commands, is_first: bool) -> None:
    """Print the passes of each command as the command itself did."""
    for number, (kind, records) in enumerate(commands):
        if number or not is_first:
            print()
        load(kind.show)(records)


def draw_passes(commands: Commands, path: Path | None) -> None:
    if path is not None:
        draw = next(kind.draw for kind, _ in commands if kind.draw is not None)
        load(draw)("--plot", path, [records for kind, records in commands if kind.draw == draw])


def check_keys(args: argparse.Namespace) -> None:
    """Raises ValueError for a key that is not known, or that a grouped table does not have."""
    for key in args.group_by:
        if key not in SETTINGS:
            raise ValueError(f"--group_by {key} is not known; choose from {', '.join(SETTINGS)}")
    if args.sort is not None and args.sort not in SORT_KEYS:
        raise ValueError(f"--sort {args.sort} is not known; choose from {', '.join(SORT_KEYS)}")
    if args.group_by and args.sort in SETTINGS and args.sort not in args.group_by:
        raise ValueError(f"--sort {args.sort} is not in the table; add it to --group_by")


def make_parser() -> Parser:
    parser = Parser(
        prog="magicdec table",
        description="Print records as a table, with one line for each run. Of the commands that "
        "serve requests, print a table for each command, with a column for each pass.",
    )
    add = parser.add_argument
    add("--group_by", nargs="+", default=[], metavar="KEY",
        help="one line for each combination of these settings, such as B or kv_policy, with the "
        "number of runs and the median of each metric")  # fmt: skip
    add("--sort", metavar="KEY",
        help="sort by a metric, the largest first, or by a setting, the smallest first; default: "
        "the order of the files")  # fmt: skip
    add("--reverse", action="store_true", help="the opposite order of --sort")
    add("--format", default="text", choices=("text", *FORMATS),
        help="text fits the terminal (80 columns in a file or a pipe); latex needs the package "
        "booktabs; csv has every column and unrounded numbers [text]")  # fmt: skip
    add("--check", action="store_true",
        help="compute every metric again from the samples in its record, in place of the table; "
        "the exit code is 1 if one differs or a record has no samples")  # fmt: skip
    add("--plot", type=Path, metavar="FILE",
        help="draw the records of `magicdec pipeline` as bars, a series for each command; .png, "
        ".svg or .pdf")  # fmt: skip
    add_record_files(parser, also="--check")
    return parser


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
