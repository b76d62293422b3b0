"""ExportFormat: a format in which another program keeps its results, and what all of them share. A
new format is a file here and a line in `names.EXPORTS`. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magicdec.bench.serving.record import ServingRecord
from magicdec.records.record import MeasuredRecord, RunRecord

Row = dict[str, Any]


def keep_rows(rows: Iterable[Row]) -> Any:
    return list(rows)


@dataclass(frozen=True)
class ExportFormat:
    """`kinds` are those of the records that the format can hold, and `holds` says in half a
    sentence what it holds of them."""

    kinds: tuple[str, ...]
    holds: str
    suffixes: tuple[str, ...]  # of the files that `write` writes
    # The rows of a record of `kinds`, from its number, its file and itself; none if it has nothing
    # that the format can hold.
    rows: Callable[[int, str, Any], Iterable[Row]]
    write: Callable[[Path, Any], None]  # writes what `collect` has made of the rows; raises OSError
    collect: Callable[[Iterable[Row]], Any] = keep_rows


def outcome(record: MeasuredRecord) -> Row:
    """What the record says of its tokens, for the key `correctness` of a row: the status, what they
    were compared with (None: with nothing), and the number of requests or sequences that differ.
    A serving pass also says whether something of it was emulated."""
    if isinstance(record, ServingRecord):
        found = _outcome(record.status, record.reference, record.num_differing)
        return found | {"emulated": bool(record.emulated_by)}
    correctness = record.correctness if isinstance(record, RunRecord) else None
    if correctness is None or correctness.reference is None:
        return _outcome(record.status, None, None)
    counts = (correctness.num_excused or 0) + (correctness.num_diverged or 0)
    return _outcome(record.status, correctness.reference, counts)


def _outcome(status: str, reference: str | None, num_differing: int | None) -> Row:
    return {"status": status, "reference": reference, "num_differing": num_differing}


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
