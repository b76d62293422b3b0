"""The metrics of passes in two files of records, beside each other, for `magicdec compare`. Imports
no torch. Must not know which metrics there are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from magicdec.names import RECORDS, load_named
from magicdec.records.fields import described_fields
from magicdec.records.metric_tables import metric_rows
from magicdec.records.reading import read_records
from magicdec.serving.record import PassRecord
from magicdec.tables import Column, Shown, Table

PASSES = ("serving", "pipeline", "speculation")  # kinds of records
Passes = dict[tuple[str, ...], PassRecord]


def read_passes(path: Path, is_strict: bool) -> Passes:
    """The newest record of each pass in a file: of each kind, name, model, dtype, number of ranks
    and workload. Raises ValueError as `read_records` does."""
    passes: Passes = {}
    for kind in PASSES:
        for record in read_records(path, load_named(RECORDS, kind), is_strict, Counter()):
            model, workload = record.config["model"], record.config["workload"]
            place = kind, record.name, model["model"], model["dtype"]
            ranks = str(record.environment.world_size)
            passes[(*place, ranks, json.dumps(workload, sort_keys=True))] = record
    return passes


def tables(new: Passes, old: Passes) -> list[Table]:
    """A table for each pass that both have, with the labelled metrics of the old record, of the new
    one, and the change."""
    return [_table(old[key], record) for key, record in new.items() if key in old]


def _table(old: PassRecord, new: PassRecord) -> Table:
    rows: list[list[object]] = []
    for kind, parts in _parts(old, new):
        for label, *cells in metric_rows(kind, parts):
            rows.append([label, *cells, _change(*(getattr(cell, "value", None) for cell in cells))])
    workload = new.config["workload"]
    return Table(
        [Column("", is_text=True, key="metric"), "old", "new", "change"],
        rows,
        f"{new.name}: {new.config['model']['model']} ({new.config['model']['dtype']}), "
        f"{workload['num_requests']} requests",
        below=[
            f"{which}: {record.status}, and has no metrics"
            for which, record in (("old", old), ("new", new))
            if record.metrics is None
        ],
    )


def _parts(old: Any, new: Any) -> Iterator[tuple[type, list[Any]]]:
    """The metrics of both records, and then the parts of these that are metrics themselves."""
    both = [getattr(old, "metrics", None), getattr(new, "metrics", None)]
    kind: Any = type(both[0] or both[1])
    if kind is NoneType:
        return
    yield kind, both
    for key, hint, _ in described_fields(kind):
        if is_dataclass(hint) and isinstance(hint, type):
            yield hint, [None if part is None else getattr(part, key) for part in both]


def _change(old: object, new: object) -> Shown | None:
    if not isinstance(old, int | float) or not isinstance(new, int | float) or not old:
        return None
    return Shown(f"{100 * (new / old - 1):+.1f} %", new / old - 1)
