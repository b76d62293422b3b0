"""`magicdec table FILE...`: prints records as a table. Owns the command line; `records/table.py`
prints."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from magicdec.records.reading import load_records
from magicdec.records.table import print_records


def main() -> None:
    """`magicdec table FILE...`"""
    parser = argparse.ArgumentParser(
        prog="magicdec table", description="Print records as a table, with one line for each run."
    )
    parser.add_argument("files", nargs="+", type=Path, help="files of records, as JSON lines")
    args = parser.parse_args()
    try:
        print_records([record for path in args.files for record in load_records(path)])
    except ValueError as error:
        print(f"magicdec table: {error}", file=sys.stderr)
        sys.exit(2)
