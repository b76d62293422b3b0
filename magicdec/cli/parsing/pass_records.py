"""The records of commands that serve requests in several passes, one line of JSON for each pass:
which kinds there are, and how a file of them is read. A new kind is a line in `KINDS`. Imports no
torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from magicdec.names import RECORDS, load_named
from magicdec.records.reading import read_records


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
        "magicdec.pipelined_run.measured.table:print_table",
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
