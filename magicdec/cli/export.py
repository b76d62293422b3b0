"""`magicdec export FILE... --out TABLE`: records as one flat table for other programs. Owns the
command line; `report/flat.py` makes the rows."""

from __future__ import annotations

import sys
from pathlib import Path

from magicdec.cli.parsing.parser import Parser
from magicdec.cli.parsing.record_files import add_record_files, read_files
from magicdec.files import complete_file
from magicdec.report.flat import SUFFIXES, Row, flat_rows, write_rows


def main() -> None:
    """`magicdec export FILE... --out TABLE`"""
    try:
        args, _ = make_parser().read(sys.argv[1:])
        if args.out.suffix not in SUFFIXES:
            raise ValueError(f"--out {args.out} must end in {' or '.join(SUFFIXES)}")
        rows = [
            row
            for number, (path, record) in enumerate(read_files(args), 1)
            for row in flat_rows(number, str(path), record)
        ]
        write(args.out, rows)
    except ValueError as error:
        print(f"magicdec export: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{len(rows)} rows written to {args.out}", file=sys.stderr)


def write(out: Path, rows: list[Row]) -> None:
    """Raises ValueError if the table cannot be written."""
    with complete_file("--out", out) as partial:
        write_rows(partial, rows)


def make_parser() -> Parser:
    parser = Parser(
        prog="magicdec export",
        description="Write records as one flat table, with one row for each pass of a run. pandas "
        "reads it in one line: pandas.read_csv(FILE) or pandas.read_parquet(FILE).",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="TABLE",
        help="the file to write; its name ends in .csv or .parquet",
    )  # fmt: skip
    add_record_files(parser)
    return parser
