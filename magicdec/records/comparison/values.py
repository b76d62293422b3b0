"""What two files hold of records without a verdict: predictions, which are the same each time
unless the code has changed, and what was measured of requests and of single forwards, whose times
are shown beside each other without a verdict. Must not know which values there are. Imports no
torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from magicdec.output.tables import Column, Shown, Table
from magicdec.records.comparison.compare import MISSING, REGRESSION, SAME, Comparison
from magicdec.records.comparison.conditions import is_judged
from magicdec.records.pass_record import PassRecord
from magicdec.records.record import MeasuredRecord, Record

# The parts of records that hold what came out.
PARTS = ("status", "metrics", "details", "rows", "cells", "break_even_prefix_len")
# What a forward or a prediction is of, by the kind of its record; of others, their place in a list.
PLACES = {
    "latency": ("phase", "B", "context", "T", "budget", "kv_policy", "draft_weights"),
    "plan": ("batch_size", "prefix_len"),
}


# What of an environment times depend on.
MACHINE_KEYS = ("cpu", "gpu", "threads", "torch", "revision")


@dataclass
class RecordedValues:
    """What a file says of one thing: each value by its place, of the newest record, and on which
    machine that was measured."""

    name: str
    machine: dict[str, object] | None  # None: it was predicted
    by_place: dict[str, object] = field(default_factory=dict)


def values_of(records: Iterable[Record]) -> dict[str, RecordedValues]:
    """The values of all records that are not judged, nor are in the prefill of what is, by what
    they are of: predictions of the same inputs, or measurements of the same model and workload with
    as many ranks."""
    found: dict[str, RecordedValues] = {}
    for record in records:
        if is_judged(record) or (isinstance(record, PassRecord) and record.shares_prefill):
            continue
        model = record.config.get("model", {})
        fields = asdict(record)
        machine = None
        name = f"{record.kind} of {record.config.get('mode') or model.get('model')}"
        if isinstance(record, MeasuredRecord):
            mode = fields.get("name")
            workload = record.config.get("workload")
            parts = [model["model"], model["dtype"], model.get("target_dtype"), mode, workload]
            parts.append(record.environment.world_size)
            machine = {key: getattr(record.environment, key) for key in MACHINE_KEYS}
            name = f"{mode or record.kind}: {model['model']} ({model['dtype']})"
        else:
            parts = [{key: value for key, value in record.config.items() if key != "flags"}]
        key = json.dumps([record.kind, *parts], sort_keys=True)
        values = found.setdefault(key, RecordedValues(name, machine))
        values.machine = machine
        for part in PARTS:
            value = fields.get(part)
            if part == "details":
                value = without_series(value)
            places = leaves(part, value, PLACES.get(record.kind, ()))
            values.by_place.update(places)
    return found


def without_series(details: dict[str, Any] | None) -> dict[str, Any]:
    """The details of a pass without what they say of each part of its time."""
    return {
        key: value
        for key, value in (details or {}).items()
        if not (isinstance(value, list) and any(isinstance(item, list) for item in value))
    }


def leaves(name: str, value: object, places: Iterable[str]) -> Iterator[tuple[str, object]]:
    """The values inside a value, by where they are, such as `cells[batch_size 1, prefix_len
    4096].speedup`."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(f"{name}.{key}", inner, places)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            values = {key: inner.get(key) for key in places} if isinstance(inner, dict) else {}
            words = (
                v if isinstance(v, str) else f"{k} {v}" for k, v in values.items() if v is not None
            )
            yield from leaves(f"{name}[{', '.join(words) or number}]", inner, places)
    else:
        yield name, value


def compare_predictions(new: Iterable[Record], old: Iterable[Record]) -> Iterator[Comparison]:
    """A regression for each predicted value that is another one, beyond rounding."""
    before = values_of(old)
    after = values_of(new)
    for key, values in after.items():
        if values.machine is not None:
            continue
        if key not in before:
            yield Comparison(values.name, MISSING, "the baseline has no prediction of these inputs")
            continue
        pairs = in_both(values, before[key])
        changed = [pair for pair in pairs if not is_close(*pair[1:])]
        for place, was, now in changed:
            yield Comparison(f"{values.name} {place}", REGRESSION, f"predicted {now}, was {was}")
        if not changed:
            yield Comparison(values.name, SAME, f"all {len(pairs)} predicted values as before")


def tables_of_measured(new: Iterable[Record], old: Iterable[Record]) -> list[Table]:
    """A table for each measured thing that both files have, with a row for each number that is
    another one."""
    before = values_of(old)
    tables = []
    for key, values in values_of(new).items():
        if values.machine is None or key not in before:
            continue
        theirs = before[key].machine or {}
        pairs = in_both(values, before[key])
        rows = [
            [place.removeprefix("metrics."), number(was), number(now), change(was, now)]
            for place, was, now in pairs
            if was != now
        ]
        below = [f"{len(pairs) - len(rows)} of {len(pairs)} values are the same"]
        below += [
            f"{about}: old {theirs[about]}, new {ours}"
            for about, ours in values.machine.items()
            if ours != theirs[about]
        ]
        label = Column("", is_text=True, key="metric")
        tables.append(Table([label, "old", "new", "change"], rows, values.name, below=below))
    return tables


def in_both(new: RecordedValues, old: RecordedValues) -> list[tuple[str, object, object]]:
    """The place, the old and the new value of what both have."""
    return [
        (place, old.by_place[place], value)
        for place, value in new.by_place.items()
        if place in old.by_place
    ]


def number(value: object) -> Shown | None:
    """The cell of a value, which is empty if there is none."""
    if value is None:
        return None
    return Shown(f"{value:,.6g}" if isinstance(value, float) else str(value), value)


def change(old: object, new: object) -> Shown | None:
    """The relative change, of numbers that have one."""
    if not isinstance(old, int | float) or not isinstance(new, int | float) or not old:
        return None
    return Shown(f"{100 * (new / old - 1):+.1f} %", new / old - 1)


def is_close(one: Any, other: Any) -> bool:
    """Whether two numbers, lists of numbers or Nones are equal, except for the rounding of sums."""
    if not isinstance(one, float | list) or other is None:
        return bool(one == other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(is_close, one, other))
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)
