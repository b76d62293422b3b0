"""`magicdec export FILE... --out TABLE`: records as one flat table for other programs. Owns the
command line; `report/flat.py` makes the rows."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from magicdec.cli.parsing.record_files import add_record_files, read_files
from magicdec.report.flat import SUFFIXES, flat_rows, write_rows


def main() -> None:
    """`magicdec export FILE... --out TABLE`"""
    args = make_parser().parse_args()
    try:
        if args.out.suffix not in SUFFIXES:
            raise ValueError(f"--out {args.out} must end in {' or '.join(SUFFIXES)}")
        rows = [
            row
            for number, (path, record) in enumerate(read_files(args), 1)
            for row in flat_rows(number, str(path), record)
        ]
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
    parser.add_argument(
        "--out", type=Path, required=True, metavar="TABLE",
        help="the file to write; its name ends in .csv or .parquet",
    )  # fmt: skip
    add_record_files(parser)
    return parser
