"""The tables of a report: passes, categories, environments and commands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from io import StringIO
from pathlib import Path

import pandas as pd

from magicdec.bench.report.frame import ENVIRONMENT, FrameRow, frame_of, metric_row
from magicdec.bench.report.listing import DRAFT_KEYS, LABELS, SETTINGS, TAKEN
from magicdec.hardware.other_load import busy_share
from magicdec.output.tables import Shown, Table, write_csv_columns
from magicdec.records.acceptance import GroupAcceptance
from magicdec.records.fields import Recorded, described_fields
from magicdec.records.metric_tables import cell
from magicdec.records.metrics import SUFFIX, PassMetrics

MOST_ROWS = 1000  # on the page; the CSV files have all
SHOWN_METRICS = (
    "net_speedup",
    "speedup",
    "decode_tokens_per_s",
    "draft_acceptance_rate",
    "mean_acceptance_length",
    "p50_tpot_ms",
    "mean_ttft_ms",
    "roofline_fraction",
    "stalled_steps",
)
PLACE = ("B", "prefix_len")  # what says, beside the way to decode, of what a row is
# Metrics that are one number.
METRICS = tuple(
    f.name for f in fields(PassMetrics) if "list" not in str(f.type) and "dict" not in str(f.type)
)
CATEGORY_FIELDS = [field for field in described_fields(GroupAcceptance) if field[2].label]
PER_RUN = (
    "time_utc",
    "argv",
    "host_load",
    "read_bandwidth_bytes_per_s",
    "gpu_sm_mhz",
    "gpu_most_sm_mhz",
    "gpu_slowed_by",
    "cores_others",
    "cores_stolen",
    "cores_waited",
    "cores_taken",
    "instructions",
    "kernels",  # too many for a cell; the file has them
)
MISSING = Shown("", -1e300)  # a metric without a value is sorted before all others
COMMANDS = {
    "run": "run",
    "environment.time_utc": "start",
    "environment.revision": "commit",
    "command": "command",
    "file": "file",
}


@dataclass(frozen=True)
class PageTable(Table):
    """A table on the page, below the list `lines` and `note`. Its CSV file `name` has `frame`, if
    given, or the same rows."""

    name: str = ""
    note: str = ""
    lines: Sequence[str] = ()
    frame: pd.DataFrame | None = None
    anchors: Sequence[Sequence[int]] = ()  # by row: the runs that links to it are about

    def csv(self) -> str:
        if self.frame is None:
            return super().csv()
        return frame_csv(self.frame)

    @classmethod
    def of(cls, title: str, name: str, frame: pd.DataFrame) -> PageTable:
        rows = frame[:MOST_ROWS].to_numpy().tolist()
        note = _note([], len(frame))
        return cls(list(frame), rows, title, name=name, note=note, frame=frame)

    @property
    def cells(self) -> Iterator[list[tuple[str, object]]]:
        for texts, row in zip(self.body, self.rows, strict=True):
            values = [cell.value if isinstance(cell, Shown) else cell for cell in row]
            yield [(t, "" if v is None else v) for t, v in zip(texts, values, strict=True)]


def frame_csv(frame: pd.DataFrame) -> str:
    text = StringIO()
    # What is not equal to itself is NaN.
    columns = [[None if v != v else v for v in frame[name].tolist()] for name in frame]
    write_csv_columns(text, map(str, frame), columns)
    return text.getvalue()


def passes_table(passes: pd.DataFrame) -> PageTable:
    """A row for each pass: its way to decode and its place, its results, then the other settings.
    Settings that all passes share are in the note."""
    counts = passes[list(SETTINGS[:-1])].nunique(dropna=False)
    same = [key for key in SETTINGS[:-1] if counts[key] == 1 and len(passes) > 1]
    draft_counts = passes.loc[passes["draft_model"].notna(), list(DRAFT_KEYS)].nunique(dropna=False)
    keys = [key for key in SETTINGS[:-1] if key not in same and passes[key].notna().any()]
    keys = [key for key in keys if draft_counts.get(key, 2) > 1]
    place = [key for key in PLACE if key in keys]
    keys = [key for key in keys if key not in place]
    first = passes.iloc[0]
    same_values = [f"{LABELS.get(key, key)} {first[key]}" for key in same if first[key] is not None]
    metrics = [
        m
        for m in described_fields(PassMetrics)
        if m[0] in SHOWN_METRICS and passes[m[0]].notna().any()
    ]
    metrics.sort(key=lambda metric: SHOWN_METRICS.index(metric[0]))
    taken = [f"{ENVIRONMENT}{TAKEN}"] if passes["is_busy"].any() else []
    errors = ["error"] if passes["error"].notna().any() else []
    rows = [
        [
            *(row[key] for key in ("run", "pass", "method", *place)),
            *(Shown(busy_share(row[key]), row[key]) for key in taken),
            *(metric_cell(row, name, described) for name, _, described in metrics),
            *(row[key] for key in ("status", *errors, *keys)),
        ]
        for row in passes[:MOST_ROWS].to_dict("records")
    ]
    columns = [
        "run",
        "pass",
        "way",
        *(LABELS.get(key, key) for key in place),
        *(LABELS[TAKEN] for _ in taken),
    ]
    columns += [described.label for _, _, described in metrics]
    columns += ["status", *errors, *(LABELS.get(key, key) for key in keys)]
    ends = [name for name in passes if name.endswith((f"{SUFFIX}_low", f"{SUFFIX}_high"))]
    shown = [name for name in ends if name.startswith(SHOWN_METRICS)]
    notes = ["In brackets: 95 % intervals"] if passes[shown].notna().any(axis=None) else []
    notes += ["Busy: the share of the cores that another load took"] if taken else []
    notes += [f"In every pass: {', '.join(same_values)}"] if same_values else []
    last = ["environment.time_utc", "environment.revision", f"{ENVIRONMENT}{TAKEN}"]
    frame = passes[["run", "pass", *SETTINGS, *METRICS, *ends, *last, "command", "error", "file"]]
    frame = frame.rename(columns=lambda name: name.removeprefix(ENVIRONMENT))
    note = _note(notes, len(passes))
    return PageTable(columns, rows, "Passes", name="passes", note=note, frame=frame)


def categories_table(passes: pd.DataFrame) -> PageTable:
    """A row for each category of the prompts of each pass that has some."""
    found = [
        ({key: row[key] for key in ("run", "pass", "method")} | {"category": category}, part)
        for row in passes.to_dict("records")
        for category, part in (row["by_category"] or {}).items()
    ]
    rows = [
        [*about.values(), *(cell(part, key, described) for key, _, described in CATEGORY_FIELDS)]
        for about, part in found[:MOST_ROWS]
    ]
    frame = frame_of(about | metric_row(part, GroupAcceptance) for about, part in found)
    columns = [
        "run",
        "pass",
        "way",
        "category",
        *(described.label for _, _, described in CATEGORY_FIELDS),
    ]
    note = _note(["In brackets: 95 % intervals over the prompts of the category"], len(found))
    title = "Acceptance by category"
    return PageTable(columns, rows, title, name="categories", note=note, frame=frame)


def environments_table(every: pd.DataFrame) -> PageTable:
    names = [name.removeprefix(ENVIRONMENT) for name in every if name.startswith(ENVIRONMENT)]
    names = [name for name in names if name not in PER_RUN]
    keys = [f"{ENVIRONMENT}{name}" for name in names]
    rows = []
    # Lists, which cannot be grouped by, are shown as text.
    every = every.assign(**{key: every[key].map(_listed) for key in keys})
    for _, alike in every.groupby(keys, dropna=False, sort=False):
        load, read, times = (
            alike[f"{ENVIRONMENT}{name}"].dropna()
            for name in ("host_load", "read_bandwidth_bytes_per_s", "time_utc")
        )
        rows.append(
            [
                ranges(alike["run"].tolist()),
                *alike.iloc[0][keys],
                extent(load),
                extent(read / 1e9),
                times.min(),
                times.max(),
            ]
        )
    labels = [name.replace("_", " ") for name in names]
    columns = ["runs", *labels, "host load", "read, GB/s", "first start", "last start"]
    frame = frame_of(dict(zip(columns, row, strict=True)) for row in rows)
    return PageTable.of("Environments", "environments", frame)


def _listed(value: object) -> object:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else value


def commands_table(every: pd.DataFrame) -> PageTable:
    """The exact command of every run, with commit and start. The page has each command once, and
    files without folders."""
    frame = every.drop_duplicates("run").rename(columns=COMMANDS)[list(COMMANDS.values())]
    rows = list[Sequence[object]]()
    anchors = list[list[int]]()
    for names, alike in frame.groupby(["command", "commit", "file"], dropna=False, sort=False):
        command, commit, file = names
        numbers = alike["run"].unique().tolist()
        anchors.append(numbers)
        revision = commit if isinstance(commit, str) else "unknown"
        rows.append(
            [
                Shown(ranges(numbers), numbers[0]),
                command,
                revision,
                alike["start"].min(),
                alike["start"].max(),
                Path(file).name,
            ]
        )
    note = _note([], len(rows))
    columns = ("runs", "command", "commit", "first start", "last start", "file")
    return PageTable(
        columns,
        rows[:MOST_ROWS],
        "Commands",
        name="commands",
        note=note,
        frame=frame,
        anchors=anchors[:MOST_ROWS],
    )


def metric_cell(run: FrameRow, name: str, described: Recorded) -> Shown:
    value = run[name]
    low = run.get(f"{name}{SUFFIX}_low")
    if value is None:
        return MISSING
    ends = None if low is None else [low, run[f"{name}{SUFFIX}_high"]]
    return Shown(described.show_between(value, ends), value)


def ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers in short, such as `1-3, 7`."""
    ordered = pd.Series(sorted(set(numbers)))
    groups = ordered.groupby(ordered - ordered.index)
    return ", ".join(
        f"{span.min()}-{span.max()}" if len(span) > 1 else f"{span.min()}" for _, span in groups
    )


def extent(values: pd.Series) -> str:
    ends = [f"{value:.1f}" for value in (values.min(), values.max())] if len(values) else []
    return " to ".join(dict.fromkeys(ends))


def _note(parts: Sequence[str], total: int) -> str:
    cut = f"The first {MOST_ROWS:,} of {total:,}; the CSV file has all"
    return " ".join(f"{part}." for part in (*parts, *([cut] if total > MOST_ROWS else [])))
