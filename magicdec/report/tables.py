"""The tables of a report: the runs, their environments and their commands. Imports no torch."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from magicdec.records.performance import Metrics
from magicdec.report.listing import LABELS, METRICS
from magicdec.report.panels import group
from magicdec.report.point import SETTINGS, Point, Setting

MOST_ROWS = 1000  # on the page; the CSV files have all
SHOWN_SETTINGS = ("model", "draft_model", "drafter", "kv_policy", "budget", "gamma", "B",
                  "prefix_len", "gen_len", "ranks", "threads", "dataset", "dtype")  # fmt: skip
# (metric, label, digits, factor)
SHOWN_METRICS = (
    ("decode_tokens_per_s", "decode, tokens/s", 1, 1),
    ("speedup", "speedup of steps, x", 2, 1),
    ("net_speedup", "net speedup, x", 2, 1),
    ("acceptance_rate", "acceptance rate", 3, 1),
    ("acceptance_length", "acceptance length, tokens", 2, 1),
    ("p50_tpot_ms", "TPOT p50, ms", 1, 1),
    ("mean_ttft_ms", "TTFT mean, ms", 0, 1),
    ("roofline_fraction", "of roofline, %", 0, 100),
)
PER_RUN = ("time_utc", "argv", "host_load", "read_bandwidth_bytes_per_s", "gpu_sm_mhz",
           "gpu_most_sm_mhz", "gpu_slowed_by")  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A cell of a table on the page. `order` is what it is sorted by."""

    text: str
    order: float | str
    is_number: bool = False


@dataclass(frozen=True)
class Table:
    """A table on the page. `note` is printed above it."""

    name: str
    title: str
    note: str
    columns: list[str]
    rows: list[list[Cell]]
    numbered: bool = False  # the first column is the number of a run


def runs_table(points: Sequence[Point]) -> Table:
    """One row for each run. Settings that are the same in all runs are said in the note."""
    values = {key: {point.settings[key] for point in points} for key in SHOWN_SETTINGS}
    same = [key for key in SHOWN_SETTINGS if len(values[key]) == 1 and len(points) > 1]
    keys = [key for key in SHOWN_SETTINGS if key not in same and values[key] != {None}]
    said = [f"{LABELS.get(key, key)} {points[0].settings[key]}" for key in same
            if points[0].settings[key] is not None]  # fmt: skip
    known = [m for m in SHOWN_METRICS if any(_metric(p, m[0]) is not None for p in points)]
    rows = [
        [number(point.number), *(cell(point.settings[key]) for key in keys),
         *(metric_cell(point, *shown) for shown in known), cell(point.status)]
        for point in points[:MOST_ROWS]
    ]  # fmt: skip
    labels = ["run", *(LABELS.get(key, key) for key in keys), *(m[1] for m in known), "status"]
    notes = ["In brackets: 95 % intervals"] if any(has_interval(p) for p in points) else []
    notes += [f"In every run: {', '.join(said)}"] if said else []
    return Table("runs", "Runs", _note(notes, len(points)), labels, rows, numbered=True)


def failures_table(points: Sequence[Point]) -> Table:
    """The runs without a result."""
    bad = [point for point in points if point.status in ("failed", "diverged")]
    rows = [
        [number(p.number), cell(p.method), cell(p.status), cell(p.error or "outputs differ")]
        for p in bad[:MOST_ROWS]
    ]
    columns = ["run", "method", "status", "reason"]
    return Table("failures", "Runs without a result", _note([], len(bad)), columns, rows, True)


def environments_table(points: Sequence[Point]) -> Table:
    """One row for each machine, software and launch."""
    names = [field.name for field in fields(points[0].environment) if field.name not in PER_RUN]
    found = group(points, lambda p: tuple(getattr(p.environment, name) for name in names))
    rows = []
    for values, of in found.items():
        loads = [p.environment.host_load for p in of if p.environment.host_load is not None]
        reads = [r / 1e9 for p in of if (r := p.environment.read_bandwidth_bytes_per_s)]
        times = sorted(p.environment.time_utc for p in of)
        rows.append([
            cell(ranges([p.number for p in of])), *map(cell, values), cell(extent(loads, 1)),
            cell(extent(reads, 1)), cell(times[0]), cell(times[-1]),
        ])  # fmt: skip
    labels = [name.replace("_", " ") for name in names]
    columns = ["runs", *labels, "host load", "read, GB/s", "first start", "last start"]
    return Table("environments", "Environments", "", columns, rows)


def commands_table(points: Sequence[Point]) -> Table:
    """The exact command of every run, with its commit and start."""
    rows = [
        [number(p.number), cell(p.environment.time_utc), cell(p.environment.revision or "unknown"),
         cell(p.command), cell(Path(p.source).name)]
        for p in points[:MOST_ROWS]
    ]  # fmt: skip
    columns = ["run", "start", "commit", "command", "file"]
    return Table("commands", "Commands", _note([], len(points)), columns, rows, numbered=True)


def write_runs(path: Path, points: Sequence[Point]) -> None:
    """Every setting, every metric that is a number, with its interval, and the command of every
    run. Raises OSError."""
    intervals = [f.name for f in fields(Metrics) if f.name.endswith("_interval")
                 and "list[list" not in str(f.type)]  # fmt: skip
    ends = [f"{name}_{end}" for name in intervals for end in ("low", "high")]
    head = ["run", *SETTINGS, *METRICS, *ends, "time_utc", "revision", "command", "error", "file"]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(head)
        for p in points:
            spans = [(getattr(p.metrics, name, None) or (None, None)) for name in intervals]
            writer.writerow([
                p.number, *p.settings.values(), *(_metric(p, name) for name in METRICS),
                *(end for span in spans for end in span), p.environment.time_utc,
                p.environment.revision, p.command, p.error, p.source,
            ])  # fmt: skip


def write_table(path: Path, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """Raises OSError."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)


def metric_cell(point: Point, name: str, label: str, digits: int, factor: float) -> Cell:
    value = _metric(point, name)
    if value is None:
        return Cell("", -1e300, is_number=True)
    text = f"{value * factor:,.{digits}f}"
    ends = getattr(point.metrics, f"{name}_interval", None)
    if ends:
        low, high = (f"{end * factor:,.{digits}f}" for end in ends)
        text = f"{text} [{low}, {high}]"
    return Cell(text, value, is_number=True)


def cell(value: Setting | list[str]) -> Cell:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Cell(f"{value:g}" if isinstance(value, float) else str(value), value, True)
    text = "" if value is None else str(value)
    return Cell(text, text)


def number(value: int) -> Cell:
    return Cell(str(value), value, is_number=True)


def has_interval(point: Point) -> bool:
    return any(getattr(point.metrics, f"{name}_interval", None) for name, *_ in SHOWN_METRICS)


def ranges(numbers: Sequence[int]) -> str:
    """Rising numbers in short, such as `1-3, 7`."""
    spans: list[list[int]] = []
    for found in sorted(numbers):
        if spans and found == spans[-1][1] + 1:
            spans[-1][1] = found
        else:
            spans.append([found, found])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def extent(values: Sequence[float], digits: int) -> str:
    """The smallest and the largest value; empty without values."""
    if not values:
        return ""
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} to {high}"


def _metric(point: Point, name: str) -> float | None:
    value: float | None = getattr(point.metrics, name, None)
    return value


def _note(parts: Sequence[str], total: int) -> str:
    cut = f"The first {MOST_ROWS:,} of {total:,}; the CSV file has all"
    return " ".join(f"{part}." for part in (*parts, *([cut] if total > MOST_ROWS else [])))
