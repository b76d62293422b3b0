"""Records of every kind as flat rows for data frames and other programs: a row for each pass, with
settings and metrics as columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import pandas as pd

from magicdec.bench.report.listing import command_of, settings
from magicdec.hardware.other_load import is_busy
from magicdec.names import BASELINE
from magicdec.output.tables import write_csv_columns
from magicdec.records.describe import method
from magicdec.records.environment import Environment
from magicdec.records.fields import RecordPart
from magicdec.records.metrics import SUFFIX, PassMetrics
from magicdec.records.pass_record import GroupRecord, PassRecord, RequestRecord
from magicdec.records.record import Record

FrameRow = dict[str, Any]
ROWS_AT_ONCE = 1000  # that are held before they become columns
SUFFIXES = (".csv", ".parquet")  # of the files that `write_columns` writes
ENVIRONMENT = "environment."  # begins the names of its columns
ALWAYS = ("environment", "error")
GROUPED_METRICS = ("acceptance_by_category",)  # metrics that are parts by the names of groups

Columns = dict[str, list[Any]]


def columns_of(rows: Iterable[FrameRow]) -> Columns:
    """The values of rows by column, with None where a row lacks one. Few rows are held at once, so
    that a large table fits in memory."""
    columns = Columns()
    length = 0
    for names, alike_rows in groupby(rows, tuple):
        while block := [*islice(alike_rows, ROWS_AT_ONCE)]:
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
    """The rows of one record: one of a pass, or one for each forward or prediction. Single requests
    and groups are left out. Metrics have their fields' names, and ends of intervals `_low` and
    `_high` after them. Without settings, the environment is the only part. `number` is the
    record's."""
    values = vars(record)
    environment = values.get("environment")
    head: FrameRow = {
        "kind": record.kind,
        "record": number,
        "file": source,
        "status": record.status,
        "error": None,
        "command": None if environment is None else command_of(environment),
    }
    for section, settings_of in record.config.items() if has_settings else ():
        if isinstance(settings_of, dict):
            head.update(_prefixed(f"{section}.", settings_of))
    for name, value in values.items():
        if name == "metrics" or not (has_settings or name in ALWAYS):
            continue
        if isinstance(value, RecordPart):
            part_fields = _prefixed(f"{name}.", vars(value))
            if name not in record.config:
                head.update(part_fields)
                continue
            for key, inner in part_fields:
                head.setdefault(key, inner)  # the config has more of a draft
        elif name in ("error", "reference", "num_differing"):
            head[name] = value
    head |= {"pass": values.get("name")}
    for part in values.get("rows") or values.get("cells") or [values["metrics"]]:
        kind = PassMetrics if part is None else type(part)
        yield head | metric_row(part, kind)
    for category, parts in (values.get("rows_by_category") or {}).items():
        for part in parts:
            yield head | {"category": category} | metric_row(part, type(part))


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


def report_row(
    number: int, source: str, record: PassRecord, reference: PassRecord | None
) -> FrameRow:
    """The flat row of a pass with what figures are about. `number` counts the commands of the
    report from 1, as `run`; `reference` is the pass that this one was compared with. Labels:
    `method` says how it drafts, `series` what shares a look in figures of every pass, and `about`
    what its command served. The record is in the column `object`."""
    (row,) = flat_rows(number, source, record, has_settings=False)
    environment = record.environment
    metrics = record.metrics
    values = settings(record)
    drafts = ", ".join(str(values[key]) for key in SERIES_KEYS if values[key] is not None)
    series = drafts if record.is_drafting else BASELINE
    is_served = bool(record.groups) and not record.shares_prefill
    return {
        **row,
        **values,
        "run": number,
        "machine": machine_of(environment),
        "ranks x threads": f"{environment.world_size} x {environment.threads}",
        "is_busy": is_busy(environment.cores_taken),
        "has_result": metrics is not None,
        "is_served": is_served,
        "mode": record.mode,
        "arrival": record.arrival,
        "concurrency": record.concurrency,
        "by_category": None if metrics is None else metrics.acceptance_by_category,
        "request_step_ms": request_step_ms(record),
        "autoregressive_step_ms": autoregressive_step_ms(record, reference),
        "method": method(record),
        "series": f"served: {record.mode}" if is_served else series,
        "about": f"{number}: {load_words(record)}",
        "object": record,
    }


SERIES_KEYS = ("drafter", "kv_policy")


def load_words(record: PassRecord) -> str:
    """What the command of a pass served, such as `demo, 8 requests, burst, ngram, 3,3`."""
    load: Mapping[str, Any] = record.config["workload"]
    words = (
        record.config["model"]["model"],
        f"{load.get('num_requests', len(record.requests))} requests",
        record.arrival,
        load.get("draft"),
        load.get("layer_split"),
    )
    return ", ".join(word for word in words if isinstance(word, str))


def autoregressive_step_ms(record: PassRecord, reference: PassRecord | None) -> float | None:
    """The mean step of the reference, where its steps are those of the same rows without drafts."""
    if reference is None or reference.metrics is None or not record.shares_prefill:
        return None
    return reference.metrics.mean_step_ms


def request_step_ms(record: PassRecord) -> float | None:
    """The time that a token after the first takes a request in decode steps; mean over requests.
    It is TPOT, without the prefill of others and what comes before the first step where passes
    share a prefill. None without TPOT."""
    if record.metrics is None or record.metrics.mean_tpot_ms is None:
        return None
    times_ms = [
        (request.finished_ms - decoding_from_ms(group, request)) / (request.output_len - 1)
        for group, requests in record.groups_of_requests
        for request in requests
        if request.output_len > 1
    ]
    return sum(times_ms) / len(times_ms)


def decoding_from_ms(group: GroupRecord, request: RequestRecord) -> float:
    """When a request begins to decode."""
    if group.prefill_ms is None:
        return request.first_token_ms
    return group.prefill_ms + (group.begin_ms or 0.0) + (group.calibration_ms or 0.0)


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
        elif name in GROUPED_METRICS:
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
