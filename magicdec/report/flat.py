"""Records as flat rows for other programs: one row for each pass of a run, and one column for each
plain value of the record. Samples are left out; lists are joined with spaces. Imports no torch."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from magicdec.names import BASELINE
from magicdec.records.performance import Metrics
from magicdec.records.record import RunRecord
from magicdec.records.statistics.uncertainty import SUFFIX
from magicdec.report.point import command_of

Cell = str | int | float | bool | None
Row = dict[str, Cell]
SUFFIXES = (".csv", ".parquet")


def flat_rows(number: int, source: str, record: RunRecord) -> Iterator[Row]:
    """The rows of one record: the baseline of its run first, if it has metrics, and then the
    requested strategy. `number` counts the records and is the same in both rows."""
    strategy = str(record.config["decoding"]["strategy"])
    head: Row = {"record": number, "file": source, "status": record.status, "error": record.error}
    head["command"] = command_of(record.environment)
    for section, values in record.config.items():
        if isinstance(values, dict):
            head |= {f"{section}.{key}": flat(value) for key, value in values.items()}
    parts: dict[str, Any] = {"environment": record.environment, "workload": record.workload}
    parts |= {"correctness": record.correctness, "memory": record.memory}
    for name, part in parts.items():
        if part is not None:
            head |= {f"{name}.{f.name}": flat(getattr(part, f.name)) for f in fields(part)}
    passes = {BASELINE: record.baseline_metrics, strategy: record.metrics}
    for name, metrics in passes.items():
        if metrics is not None or name == strategy:
            yield head | {"pass": name} | _metrics(metrics)


def _metrics(metrics: Metrics | None) -> Row:
    """One column for each metric, and two for the ends of an interval."""
    found: Row = {}
    for field in fields(Metrics):
        name, value = field.name, None if metrics is None else getattr(metrics, field.name)
        if name.endswith(SUFFIX) and "list[list" not in str(field.type):
            found[f"{name}_low"], found[f"{name}_high"] = value or (None, None)
        else:
            found[name] = flat(value)
    return found


def flat(value: Any) -> Cell:
    """A plain value as it is, a list as its values with spaces between, and the name of a model."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, list | tuple):
        return " ".join(str(flat(item)) for item in value)
    return str(getattr(value, "model", value))


def columns_of(rows: Iterable[Row]) -> list[str]:
    """The keys of all rows, in the order in which they appear: older records lack some."""
    return list(dict.fromkeys(key for row in rows for key in row))


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write rows as CSV or Parquet, by the suffix of the file. Raises OSError."""
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        table = {key: column(rows, key) for key in columns_of(rows)}
        pyarrow.parquet.write_table(pyarrow.table(table), path)
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns_of(rows), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def column(rows: list[Row], key: str) -> list[Cell]:
    """The values of a column in one type, as Parquet wants it: numbers stay numbers, and mixed
    values, such as a gamma of 4 and of `auto`, become text."""
    values = [row.get(key) for row in rows]
    kinds = {type(value) for value in values} - {type(None)}
    if kinds == {int, float}:
        return [None if v is None else float(v) for v in values]
    return values if len(kinds) <= 1 else [None if v is None else str(v) for v in values]
