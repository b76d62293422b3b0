"""The arguments that name files of records, and the records of these files: for commands that read
what runs left behind. A new kind of record is a line in `TABLES`. Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from magicdec.config.setting import setting
from magicdec.names import RECORDS, load_named
from magicdec.records.reading import read_records
from magicdec.records.record import MeasuredRecord, Record

RUN = "run"  # the kind of record that most files have


@dataclass(frozen=True)
class FilesSection:
    """The files, and what is done with lines that are no records."""

    files: tuple[Path, ...] = setting(
        ..., "Files of records, as JSON lines.", "files", metavar="FILE"
    )
    strict: bool = setting(
        False,
        "Refuse a file with a line that is not a record; otherwise the line is skipped with a "
        "warning. `table --check` always does.",
    )


def read_kind(args: FilesSection, kind: str, others: Counter[str]) -> Iterator[tuple[Path, Any]]:
    """Each record of this kind in the files with its file, one after the other. Records of other
    kinds are counted in `others`. Raises ValueError as `read_records` does."""
    for path in args.files:
        for record in read_records(path, load_named(RECORDS, kind), args.strict, others):
            yield path, record


def read_every_kind(
    args: FilesSection, kinds: Sequence[str] = tuple(RECORDS)
) -> Iterator[tuple[Path, Record]]:
    """Each record of these kinds in the files with its file: first those of runs, then one kind
    after the other. Raises ValueError as `read_records` does, and if there is no record."""
    others = Counter[str]()
    num_runs = 0
    for each in read_kind(args, RUN, others):
        num_runs += 1
        yield each
    present = [kind for kind in kinds if kind in others]
    for kind in present:
        yield from read_kind(args, kind, Counter())
    if not num_runs and not present:
        files = ", ".join(map(str, args.files))
        raise ValueError(f"{files}: there are no records of kind {', '.join(kinds)}")


# What makes the tables of the records of one command, by the key `kind`; it is imported when it is
# needed. Runs are listed together (`report/listing.py`).
TABLES = {
    "serving": "magicdec.serving.showing:tables",
    "latency": "magicdec.latency.record:tables",
    "plan": "magicdec.cost_model.plan:tables",
    "stage_plan": "magicdec.cost_model.stage_plan:tables",
    "simulation": "magicdec.simulator.showing:tables",
}


def read_commands(kind: str, paths: Sequence[Path], is_strict: bool) -> Iterator[list[Any]]:
    """The records of each command of this kind: those that follow each other in a file and have one
    command line and one start or, of simulations, the same options and work. Records of other kinds
    are left out. Raises ValueError as `read_records` does."""
    others = Counter[str]()
    for path in paths:
        records = read_records(path, load_named(RECORDS, kind), is_strict, others)
        for _, group in groupby(records, _command_of):
            yield list(group)


def _command_of(record: Any) -> tuple[object, object]:
    """What is the same in all records of one command, and in no other's that follows it."""
    if isinstance(record, MeasuredRecord):
        return record.environment.time_utc, record.environment.argv
    return record.config.get("options"), record.config.get("work")
