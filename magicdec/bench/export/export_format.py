"""ExportFormat: a format in which another program keeps its results, and what all of them share. A
new format is a file here and a line in `names.EXPORTS`. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magicdec.records.pass_record import PassRecord

Row = dict[str, Any]


def keep_rows(rows: Iterable[Row]) -> Any:
    return list(rows)


@dataclass(frozen=True)
class ExportFormat:
    """`holds` says in half a sentence what the format holds of records."""

    # For each kind of record that it can hold: the rows of a record, from its number, its file and
    # itself; none if it has nothing that the format can hold.
    rows: Mapping[str, Callable[[int, str, Any], Iterable[Row]]]
    holds: str
    suffixes: tuple[str, ...]  # of the files that `write` writes
    write: Callable[[Path, Any], None]  # writes what `collect` has made of the rows; raises OSError
    collect: Callable[[Iterable[Row]], Any] = keep_rows


def correctness_of(record: PassRecord) -> Row:
    """What a pass says of its tokens, for the key `correctness` of a row: the status, the pass that
    they were compared with (None: with nothing), the number of requests that differ, and whether
    something of it was emulated."""
    return {
        "status": record.status,
        "reference": record.reference,
        "num_differing": record.num_differing,
        "emulated": bool(record.emulated_by),
    }


def known(values: Mapping[str, Any]) -> Row:
    """The values without those that are None: a key whose value is not known is left out."""
    return {name: value for name, value in values.items() if value is not None}


def write_lines(path: Path, rows: Iterable[Row]) -> None:
    """Writes JSON objects, one a line."""
    text = "".join(f"{json.dumps(row, allow_nan=False)}\n" for row in rows)
    path.write_text(text, encoding="utf-8")


def write_array(path: Path, rows: list[Row]) -> None:
    """Writes one JSON array."""
    path.write_text(f"{json.dumps(rows, allow_nan=False, indent=2)}\n", encoding="utf-8")
