"""Rows and columns of a table from recorded dataclasses: the descriptions of their fields have the
labels, the units and the digits. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from magicdec.output.tables import Column, Shown
from magicdec.records.fields import Recorded, described_fields
from magicdec.records.performance import SUFFIX

# The sequences that a percentile needs: with fewer, it would be the largest value or the next one.
MANY = 100
LEAST = {"p90_": 10, "p99_": MANY}


def has_enough(key: str, count: int) -> bool:
    """Whether so many sequences are enough for this metric to be shown."""
    return count >= LEAST.get(key[:4], 0)


def cell(metrics: Any, key: str, description: Recorded) -> object:
    """The cell of a field: empty if it is None, a name as it is, and a number with its interval, if
    it has one."""
    value = getattr(metrics, key)
    ends = getattr(metrics, f"{key}{SUFFIX}", None)
    if value is None or isinstance(value, str):
        return value
    return Shown(description.show_between(value, ends), value)


def fixed(value: float | None, digits: int, suffix: str = "", scale: float = 1.0) -> Shown | None:
    """The cell of a number that is no field: as `cell`."""
    described = Recorded("", digits=digits, suffix=suffix, scale=scale)
    return None if value is None else Shown(described.show(value), value)


def metric_rows(
    kind: type, metrics: Sequence[Any], only: Sequence[str] | None = None
) -> list[list[Any]]:
    """A row for each field of the dataclass `kind` that has a label, and a value in any of
    `metrics`, which are of that kind, or None: the label, and a cell for each of `metrics`. `only`
    names the fields that may have a row, in order; None stands for all."""
    return [
        [Shown(described.label, key)]
        + [None if each is None else cell(each, key, described) for each in metrics]
        for key, described in _labelled(kind, metrics, only)
    ]


def metric_columns(kind: type, metrics: Sequence[Any]) -> tuple[list[Column], list[list[Any]]]:
    """The same the other way round: a column for each field that has a label and a value, and a row
    for each of `metrics`, of which none is None."""
    fields = _labelled(kind, metrics)
    columns = [Column(described.label, key=key) for key, described in fields]
    rows = [[cell(each, key, about) for key, about in fields] for each in metrics]
    return columns, rows


def _labelled(
    kind: type, metrics: Sequence[Any], only: Sequence[str] | None = None
) -> list[tuple[str, Recorded]]:
    fields = {key: described for key, _, described in described_fields(kind)}
    return [
        (key, fields[key])
        for key in only or fields
        if fields[key].label and any(getattr(each, key, None) is not None for each in metrics)
    ]
