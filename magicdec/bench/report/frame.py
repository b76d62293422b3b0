"""Records of every kind as flat rows for data frames and other programs: a row for each pass, with
settings and metrics as columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import pandas as pd

from magicdec.bench.report.listing import TAKEN, command_of, is_baseline, settings
from magicdec.bench.serving.record import ServingRecord
from magicdec.hardware.other_load import is_busy
from magicdec.names import BASELINE
from magicdec.output.tables import write_csv_columns
from magicdec.records.environment import Environment
from magicdec.records.fields import RecordPart
from magicdec.records.performance import SUFFIX, Metrics
from magicdec.records.record import MeasuredRecord, Record, RunRecord
from magicdec.records.table import method

FrameRow = dict[str, Any]
ROWS_AT_ONCE = 1000  # that are held before they become columns
SUFFIXES = (".csv", ".parquet")  # of the files that `write_columns` writes
ENVIRONMENT = "environment."  # begins the names of its columns
ALWAYS = ("environment", "error")
OF_GROUPS = ("acceptance_by_category",)  # metrics that are parts by the names of groups
OF_PASSES = ("metrics", "baseline_metrics", "prefill_samples")  # parts of the record of a run


Columns = dict[str, list[Any]]


def columns_of(rows: Iterable[FrameRow]) -> Columns:
    """The values of rows by column, with None where a row lacks one. Few rows are held at once, so
    that a large table fits in memory."""
    columns = Columns()
    length = 0
    for names, of_names in groupby(rows, tuple):
        while block := [*islice(of_names, ROWS_AT_ONCE)]:
            for name, values in zip(names, zip(*map(dict.values, block), strict=True), strict=True):
                column = columns.setdefault(name, [])
                column += [None] * (length - len(column))
                column += values
            length += len(block)
    for column in columns.values():
        column += [None] * (length - len(column))
    return columns


def frame_of(rows: Iterable[FrameRow]) -> pd.DataFrame:
    """A data frame of rows in which whole numbers stay whole beside None."""
    frame = pd.DataFrame(columns_of(rows), dtype=object)
    return frame.where(frame.notna(), None)


def flat_rows(
    number: int, source: str, record: Record, has_settings: bool = True
) -> Iterator[FrameRow]:
    """The rows of one record: of a run the baseline, if it has metrics, then the requested
    strategy; of other kinds one pass, or each forward or prediction. Samples and single requests
    are left out. Metrics have their fields' names, and ends of intervals `_low` and `_high` after
    them. Without settings, the environment is the only part. `number` is the record's."""
    head: FrameRow = {
        "kind": record.kind,
        "record": number,
        "file": source,
        "status": record.status,
    }
    head |= {"error": None, "command": None}
    if isinstance(record, MeasuredRecord):
        head["command"] = command_of(record.environment)
    for section, values in record.config.items() if has_settings else ():
        if isinstance(values, dict):
            head.update(_prefixed(f"{section}.", values))
    for name, value in vars(record).items():
        if name in OF_PASSES or not (has_settings or name in ALWAYS):
            continue
        if isinstance(value, RecordPart):
            of_part = _prefixed(f"{name}.", vars(value))
            if name not in record.config:
                head.update(of_part)
                continue
            for key, inner in of_part:
                head.setdefault(key, inner)  # the config has more of a draft
        elif name in ("error", "threads", "reference", "num_differing"):
            head[name] = value
    if isinstance(record, RunRecord):
        strategy = str(record.config["decoding"]["strategy"])
        for name, metrics in {BASELINE: record.baseline_metrics, strategy: record.metrics}.items():
            if metrics is not None or name == strategy:
                yield {**head, "pass": name, **metric_row(metrics, Metrics)}
        return
    values = vars(record)
    for part in values.get("rows") or values.get("cells") or [values["metrics"]]:
        yield head | {"pass": values.get("name")} | metric_row(part, type(part))


# The instructions that decide how fast the CPU kernels are, the fastest first.
FAST = ("AMX_BF16", "AVX512BF16")
MARKS = re.compile(r"\((?:R|TM)\)|\b(?:CPU|Processor)\b")  # of the name of a CPU, which say nothing


def machine_of(environment: Environment) -> str:
    """The GPU, or the CPU with the instructions that decide its speed."""
    if environment.gpu:
        return environment.gpu
    known = [name for name in FAST if name in (environment.instructions or ())]
    name = " ".join(MARKS.sub("", environment.cpu).split()) or "unknown CPU"
    return f"{name}, {(known or [environment.cpu_capability])[0]}"


def report_rows(number: int, source: str, record: Record) -> Iterator[FrameRow]:
    """The flat rows of a record with the settings of a run that figures are about, and whether
    another load took cores. `number` counts the report's records from 1. A serving pass has its
    record in the column `object`."""
    assert isinstance(record, MeasuredRecord), "predictions have rows of other reports"
    environment = record.environment
    if isinstance(record, RunRecord):
        rows = flat_rows(number, source, record, has_settings=False)  # `_about_run` has them
    else:
        rows = flat_rows(number, source, record)
    for row in rows:
        more = (
            _about_run(record, row["pass"])
            if isinstance(record, RunRecord)
            else _about_service(record, row)
        )
        row["run"] = number
        row["machine"] = machine_of(environment)
        row["ranks x threads"] = f"{environment.world_size} x {environment.threads}"
        row["is_busy"] = is_busy(row.get(f"{ENVIRONMENT}{TAKEN}"))
        row.update(more)
        yield row


def _about_run(record: RunRecord, name: str) -> FrameRow:
    """The settings of a run and its methods. `is_run` marks the requested strategy."""
    values = settings(record)
    baseline = record.baseline_metrics
    drafts = (values["drafter"], values["kv_policy"])
    is_run = name == record.config["decoding"]["strategy"]
    return values | {
        "by_category": record.metrics.acceptance_by_category
        if is_run and record.metrics is not None
        else None,
        "autoregressive_step_ms": None if baseline is None else baseline.mean_step_ms,
        "is_run": is_run,
        "has_result": (record.metrics if is_run else baseline) is not None,
        "method": method(record) if is_run else BASELINE,
        "series": BASELINE
        if not is_run or is_baseline(record)
        else ", ".join(str(part) for part in drafts if part is not None),
    }


def _about_service(record: Record, row: FrameRow) -> FrameRow:
    gpu = row[f"{ENVIRONMENT}gpu"]
    cpu = row[f"{ENVIRONMENT}cpu"]
    mode = row["pass"]
    arrival = row.get("workload.arrival")
    concurrency = None
    if isinstance(record, ServingRecord):
        mode = record.way
        arrival = record.arrival
        concurrency = record.concurrency
    return {
        "model": row["model.model"],
        "dtype": row["model.dtype"],
        "device": gpu or cpu or row["parallel.device"],
        "arrival": arrival,
        "concurrency": concurrency,
        "mode": mode,
        "series": f"{record.kind}: {mode}",
        "has_result": record.status not in ("diverged", "failed"),
        "object": record,
    }


def _prefixed(prefix: str, values: FrameRow) -> Iterable[tuple[str, Any]]:
    return zip(_prefixed_names(prefix, tuple(values)), values.values(), strict=True)


@lru_cache(maxsize=1000)
def _prefixed_names(prefix: str, names: tuple[str, ...]) -> list[str]:
    return [f"{prefix}{name}" for name in names]


def metric_row(metrics: RecordPart | None, kind: Any) -> FrameRow:
    """A column for each metric of `kind`, two for an interval, and one for each value of a part
    inside, or of each of several parts. Without metrics, all are None."""
    row = FrameRow()
    values = {} if metrics is None else vars(metrics)
    for name, ends in _columns(kind):
        value = values.get(name)
        if ends is not None:
            row[ends[0]], row[ends[1]] = value or (None, None)
        elif name in OF_GROUPS:
            for group, part in (value or {}).items():
                row.update(_prefixed(f"{name}.{group}.", metric_row(part, type(part))))
        elif isinstance(value, RecordPart):
            row.update(_prefixed(f"{name}.", vars(value)))
        else:
            row[name] = value
    return row


@cache
def _columns(kind: Any) -> list[tuple[str, tuple[str, str] | None]]:
    names = {field.name: str(field.type) for field in (fields(kind) if is_dataclass(kind) else ())}
    return [
        (name, (f"{name}_low", f"{name}_high") if is_interval else None)
        for name, text in names.items()
        for is_interval in [name.endswith(SUFFIX) and "list[list" not in text]
    ]


def write_columns(path: Path, columns: Columns) -> None:
    """Writes CSV or Parquet, by the suffix of the file. Raises OSError."""
    flat_columns = {name: _flat_column(values) for name, values in columns.items()}
    if path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            # pandas takes three times as long.
            write_csv_columns(file, flat_columns, list(flat_columns.values()))
        return
    frame = pd.DataFrame(flat_columns, dtype=object)
    for name in frame:
        # Parquet wants one type in a column: a gamma of 4 and one of `auto` become text.
        if pd.api.types.infer_dtype(frame[name]) in ("mixed", "mixed-integer"):
            frame[name] = frame[name].map(str, na_action="ignore")
    frame.infer_objects().to_parquet(path, index=False)


PLAIN = {type(None), str, int, float, bool}


def _flat_column(column: list[Any]) -> list[Any]:
    return column if {*map(type, column)} <= PLAIN else [*map(flat, column)]


def flat(value: Any) -> str | int | float | bool | None:
    """A plain value; a list or dictionary as text with spaces; of a model its name."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, dict):
        return " ".join(f"{key}:{flat(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return " ".join(str(flat(item)) for item in value)
    return str(getattr(value, "model", value))
