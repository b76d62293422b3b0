"""The arguments that name files of records, and the records of these files: for commands that read
what runs left behind. Imports no torch."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from magicdec.records.reading import read_records
from magicdec.records.record import RunRecord


def add_record_files(parser: argparse.ArgumentParser, also: str = "") -> None:
    """Add FILE... and --strict. `also` names another flag that implies --strict."""
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="files of records, as JSON lines"
    )
    implied = f", as {also} does" if also else ""
    parser.add_argument(
        "--strict",
        action="store_true",
        help=f"refuse a file with a line that is not a record{implied}; otherwise the line is "
        "skipped with a warning",
    )


def read_files(
    args: argparse.Namespace, can_be_empty: bool = False, others: Counter[str] | None = None
) -> Iterator[tuple[Path, RunRecord]]:
    """Each record of a run in the files with its file, one after the other. Records of other kinds
    are counted in `others`, as by `read_records`. Raises ValueError, one line, if a file cannot be
    read or holds something else, and if there is no record, unless `can_be_empty`."""
    is_empty = not can_be_empty
    for path in args.files:
        for record in read_records(path, RunRecord, args.strict, others):
            is_empty = False
            yield path, record
    if is_empty:
        raise ValueError(f"{', '.join(map(str, args.files))}: there are no records")
