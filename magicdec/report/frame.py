"""Records as rows of pandas data frames: the runs of a report with their settings and metrics as
columns, a row for each pass; and every kind of record as flat rows for other programs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd

from magicdec.names import BASELINE
from magicdec.records.fields import Part
from magicdec.records.performance import SUFFIX, Metrics
from magicdec.records.record import Record, RunRecord
from magicdec.records.samples import SamplesRecord
from magicdec.records.table import method
from magicdec.report.settings import command_of, is_baseline, settings
from magicdec.serving.record import ServingRecord

Row = dict[str, Any]
SUFFIXES = (".csv", ".parquet")  # of the files that `write_frame` writes
ENVIRONMENT = "environment."  # begins the names of its columns
OF_PASSES = ("metrics", "baseline_metrics", "prefill_samples")  # parts of the record of a run


def frame_of(rows: Iterable[Row]) -> pd.DataFrame:
    """The rows as a data frame whose values stay what they are: whole numbers stay whole beside
    None, which also stands for what a row lacks."""
    frame = pd.DataFrame(list(rows), dtype=object)
    return frame.where(frame.notna(), None)


def run_rows(number: int, source: str, record: RunRecord) -> Iterator[Row]:
    """What a report keeps of a run, which is all but most of its samples: a row for the pass of the
    baseline, if it has metrics, and one for the requested strategy, which `is_run`. `number` counts
    the runs of a report from 1. Metrics have the names of their fields, and `_low` and `_high`
    after the names of intervals."""
    values = settings(record)
    theirs = record.baseline_metrics
    head: Row = {"kind": record.kind, "run": number, "file": source, "error": record.error}
    head |= values | {"command": command_of(record.environment)}
    head |= _prefixed(ENVIRONMENT, record.environment)
    head["autoregressive_step_ms"] = None if theirs is None else theirs.mean_step_ms
    drafts = (values["drafter"], values["kv_policy"])
    for name, metrics in _passes(record):
        is_run = name == record.config["decoding"]["strategy"]
        # The times of a run that diverged are no result.
        samples = record.samples.get(name) if record.samples and record.passed else None
        prefill = record.prefill_samples if is_run and record.passed else None
        yield (
            head
            | metric_row(metrics, Metrics)
            | {
                "is_run": is_run,
                "has_result": metrics is not None,
                "method": method(record) if is_run else BASELINE,
                "series": BASELINE
                if not is_run or is_baseline(record)
                else ", ".join(str(part) for part in drafts if part is not None),
                "ttft_ms": list(chain.from_iterable(prefill.ttft_ms)) if prefill else [],
                "tpot_ms": _tpots(samples) if samples else [],
                "accepted": _accepted(samples) if samples else {},
            }
        )


def _passes(record: RunRecord) -> Iterator[tuple[str, Metrics | None]]:
    """The passes of a run: the baseline if it has metrics, and the requested strategy."""
    strategy = str(record.config["decoding"]["strategy"])
    passes = {BASELINE: record.baseline_metrics, strategy: record.metrics}
    return (each for each in passes.items() if each[1] is not None or each[0] == strategy)


def _prefixed(prefix: str, part: Part) -> Row:
    return {f"{prefix}{name}": value for name, value in vars(part).items()}


def metric_row(metrics: Part | None, kind: type[Part] | None = None) -> Row:
    """One column for each metric, two for the ends of an interval, and one for each value of a part
    inside. Without metrics, the columns are those of `kind`, if it is given."""
    row: Row = {}
    values = {} if metrics is None else vars(metrics)
    columns: Any = kind or type(metrics)
    for name, has_ends in _columns(columns):
        value = values.get(name)
        if isinstance(value, Part):
            row |= _prefixed(f"{name}.", value)
        elif has_ends:
            row[f"{name}_low"], row[f"{name}_high"] = value or (None, None)
        else:
            row[name] = value
    return row


@cache
def _columns(kind: Any) -> list[tuple[str, bool]]:
    """The metrics of a dataclass, and whether each is an interval; none of another type."""
    return [
        (field.name, field.name.endswith(SUFFIX) and "list[list" not in str(field.type))
        for field in (fields(kind) if is_dataclass(kind) else ())
    ]


def _tpots(samples: SamplesRecord) -> list[float]:
    """TPOT of each sequence that decoded a token after its first, in ms."""
    times = chain.from_iterable(samples.sequence_ms)
    tokens = chain.from_iterable(samples.sequence_tokens)
    return [ms / count for ms, count in zip(times, tokens, strict=True) if count]


def _accepted(samples: SamplesRecord) -> dict[int, int]:
    """How many verifications accepted 0, 1, ... drafts; empty if nothing was drafted."""
    steps = zip(
        chain.from_iterable(samples.num_drafted or ()),
        chain.from_iterable(samples.num_accepted or ()),
        strict=True,
    )
    return Counter(count for drafted, counts in steps if drafted for count in counts)


def flat_rows(number: int, source: str, record: Record) -> Iterator[Row]:
    """The rows of one record of any kind: of a run the baseline first, if it has metrics, and then
    the requested strategy; of others their one pass, or each forward or prediction. There is a
    column for each plain value; samples and single requests are left out. `number` counts the
    records and is the same in all rows of one."""
    head: Row = {"kind": record.kind, "record": number, "file": source, "status": record.status}
    environment = getattr(record, "environment", None)
    head |= {"error": None, "command": environment and command_of(environment)}
    for section, values in record.config.items():
        if isinstance(values, dict):
            head |= {f"{section}.{key}": value for key, value in values.items()}
    for name, value in vars(record).items():
        if isinstance(value, Part) and name not in OF_PASSES:
            head = head | _prefixed(f"{name}.", value) | head  # the config has more of a draft
        elif name in ("error", "threads", "reference", "num_differing"):
            head[name] = value
    if isinstance(record, RunRecord):
        for name, metrics in _passes(record):
            yield head | {"pass": name} | metric_row(metrics, Metrics)
        return
    values = vars(record)
    for part in values.get("rows") or values.get("cells") or [values["metrics"]]:
        yield head | {"pass": values.get("name")} | metric_row(part)


def served_row(number: int, source: str, record: ServingRecord) -> Row:
    """What a report keeps of a pass that served requests: its flat row, the names that a run has
    for its settings, and the record itself."""
    (row,) = flat_rows(number, source, record)
    e = record.environment
    return row | {
        "run": number,
        "model": row["model.model"],
        "dtype": row["model.dtype"],
        "device": e.gpu or e.cpu or row["parallel.device"],
        "arrival": row.get("workload.arrival"),
        "series": f"{record.kind}: {row['pass']}",
        "has_result": row["status"] != "diverged",
        "object": record,
    }


def write_frame(path: Path, frame: pd.DataFrame) -> None:
    """Write flat rows as CSV or Parquet, by the suffix of the file. Raises OSError."""
    frame = frame.map(flat)
    if path.suffix == ".csv":
        frame.to_csv(path, index=False, lineterminator="\n")
        return
    for name in frame:
        # Parquet wants one type in a column: a gamma of 4 and one of `auto` become text.
        if pd.api.types.infer_dtype(frame[name]) in ("mixed", "mixed-integer"):
            frame[name] = frame[name].map(str, na_action="ignore")
    frame.infer_objects().to_parquet(path, index=False)


def flat(value: Any) -> str | int | float | bool | None:
    """A plain value as it is, a list as its values with spaces between, a dictionary with its keys
    before them, and the name of a model."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, dict):
        return " ".join(f"{key}:{flat(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return " ".join(str(flat(item)) for item in value)
    return str(getattr(value, "model", value))
