"""The metrics of passes in two files of records, beside each other, for `magicdec compare`. Imports
no torch. Must not know which metrics there are.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from magicdec.pipelined_speculation.metrics import SpeculationMetrics
from magicdec.records.metric_tables import metric_rows
from magicdec.records.reading import read_records
from magicdec.serving.metrics import ServingMetrics
from magicdec.serving.record import ServingRecord
from magicdec.tables import Column, Shown, Table

PARTS = ((ServingMetrics, "metrics"), (SpeculationMetrics, "speculation"))
Passes = dict[tuple[str, ...], ServingRecord]


def read_passes(path: Path, is_strict: bool) -> Passes:
    """The newest record of each pass in a file: of each mode, model, dtype, number of ranks and
    workload. Raises ValueError as `read_records` does."""
    passes: Passes = {}
    for record in read_records(path, ServingRecord, is_strict, Counter()):
        model, workload = record.config["model"], record.config["workload"]
        ranks = str(record.environment.world_size)
        place = record.name, model["model"], model["dtype"], ranks
        passes[(*place, json.dumps(workload, sort_keys=True))] = record
    return passes


def tables(new: Passes, old: Passes) -> list[Table]:
    """A table for each pass that both have, with the labelled metrics of the old record, of the new
    one, and the change."""
    return [_table(old[key], record) for key, record in new.items() if key in old]


def _table(old: ServingRecord, new: ServingRecord) -> Table:
    rows: list[list[object]] = []
    for kind, name in PARTS:
        parts = [getattr(old, name), getattr(new, name)]
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


def _change(old: object, new: object) -> Shown | None:
    if not isinstance(old, int | float) or not isinstance(new, int | float) or not old:
        return None
    return Shown(f"{100 * (new / old - 1):+.1f} %", new / old - 1)
