"""The arguments that name files of records, and the records of these files: for commands that read
what runs left behind. A new kind of record is a line in `KINDS`. Imports no torch.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from magicdec.names import RECORDS, load_named
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


@dataclass(frozen=True)
class Kind:
    """What prints the records of one command, and what draws those of several. They are imported
    when they are needed."""

    show: str
    draw: str | None = None


KINDS = {  # by the key `kind` of a record
    "serving": Kind("magicdec.serving.showing.rates:print_records"),
    "pipeline": Kind("magicdec.pipeline.showing.table:print_table"),
    "speculation": Kind(
        "magicdec.pipelined_run.measured.bars:print_table",
        "magicdec.pipelined_run.measured.bars:draw_bars",
    ),
}


def read_commands(kind: str, paths: Sequence[Path], is_strict: bool) -> Iterator[list[Any]]:
    """The records of each command of this kind: those that follow each other in a file and have one
    command line and one start. Records of other kinds are left out. Raises ValueError as
    `read_records` does."""
    others = Counter[str]()
    for path in paths:
        records = read_records(path, load(RECORDS[kind]), is_strict, others)
        for _, group in groupby(records, lambda r: (r.environment.time_utc, r.environment.argv)):
            yield list(group)


def load(place: str) -> Any:
    """What stands behind `module:name`."""
    return load_named({place: place}, place)
