"""`magicdec export FILE... --out TABLE`: records as one flat table for other programs. Owns the
command line; `report/flat.py` makes the rows."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from magicdec.records.reading import read_records
from magicdec.report.flat import SUFFIXES, flat_rows, write_rows


def main() -> None:
    """`magicdec export FILE... --out TABLE`"""
    args = make_parser().parse_args()
    try:
        if args.out.suffix not in SUFFIXES:
            raise ValueError(f"--out {args.out} must end in {' or '.join(SUFFIXES)}")
        records = ((path, r) for path in args.files for r in read_records(path, args.strict))
        rows = [
            row
            for number, (path, record) in enumerate(records, 1)
            for row in flat_rows(number, str(path), record)
        ]
        if not rows:
            raise ValueError(f"{', '.join(map(str, args.files))}: there are no records")
        write_rows(args.out, rows)
    except ValueError as error:
        print(f"magicdec export: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"magicdec export: --out {args.out}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    print(f"{len(rows)} rows written to {args.out}", file=sys.stderr)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="magicdec export",
        description="Write records as one flat table, with one row for each pass of a run. pandas "
        "reads it in one line: pandas.read_csv(FILE) or pandas.read_parquet(FILE).",
    )
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="files of records, as JSON lines")
    add("--out", type=Path, required=True, metavar="TABLE",
        help="the file to write; its name ends in .csv or .parquet")  # fmt: skip
    add("--strict", action="store_true",
        help="refuse a file with a line that is not a record; otherwise the line is skipped with a "
        "warning")  # fmt: skip
    return parser
