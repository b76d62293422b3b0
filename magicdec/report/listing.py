"""Many records as one table, with a line for each run or for each group of runs: as text, Markdown,
LaTeX or CSV; and which of them differ in acceptance by no more than the noise: records that decoded
the same prompts of the same model are compared, prompt by prompt, with the one that accepted most.

Owns the choice of rows and columns and their order. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice

from magicdec.records.comparison.change import change_of, pair_of
from magicdec.records.performance import Metrics
from magicdec.records.record import RunRecord
from magicdec.records.table import method
from magicdec.report.settings import SETTINGS, Setting, settings
from magicdec.tables import Column, Shown, Table

Row = dict[str, Setting]
NARROW = 80  # columns of a text table that is written to a file or a pipe
TEXT_COLUMNS = ("model", "draft_model", "drafter", "kv_policy", "status")
# The columns, their labels, and the digits of those that are metrics.
LABELS = {
    "model": "model", "draft_model": "draft", "drafter": "drafter", "kv_policy": "kv_policy",
    "budget": "budget", "gamma": "gamma", "ranks": "ranks", "B": "B", "prefix_len": "prefix",
    "runs": "runs", "decode_tokens_per_s": "tokens/s", "speedup": "speedup", "net_speedup": "net",
    "acceptance_rate": "accept", "roofline_fraction": "roof", "status": "status",
}  # fmt: skip
GAMMA = "\N{GREEK SMALL LETTER GAMMA}"
NARROW_LABELS = LABELS | {"gamma": GAMMA, "decode_tokens_per_s": "tok/s"}  # of a text table
DIGITS = {
    "decode_tokens_per_s": 1,
    "speedup": 2,
    "net_speedup": 2,
    "acceptance_rate": 3,
    "roofline_fraction": 2,
}
# Metrics that are one number, all of which can be sorted by.
METRICS = tuple(f.name for f in fields(Metrics) if "list" not in str(f.type))
HALF = "half of the interval of "  # before the key of a metric: its key in a row
SORT_KEYS = (*SETTINGS, *METRICS)


@dataclass(frozen=True)
class Listing:
    """The rows of a table. `columns` are keys of the rows, in order. `constants` are left out of
    the columns, because they have the same value in every row."""

    columns: tuple[str, ...]
    rows: list[Row]
    constants: dict[str, Setting]

    def said(self) -> str:
        """What holds for every row, in a line; empty if there is nothing to say."""
        values = (f"{LABELS.get(key, key)} {_cell(key, v)}" for key, v in self.constants.items())
        return f"in every row: {', '.join(values)}" if self.constants else ""


def list_records(
    records: Iterable[RunRecord],
    group_by: Sequence[str] = (),
    sort: str | None = None,
    is_ascending: bool | None = None,
) -> Listing:
    """A row for each record, or for each combination of the settings `group_by`. A row of a group
    has the number of its runs and the median of each metric over those that have it. The order is
    that of the records, or by `sort`: metrics from the largest and settings from the smallest,
    unless `is_ascending` is given. Rows without the value come last."""
    rows = [
        settings(r)
        | {name: getattr(r.metrics, name, None) for name in METRICS}
        | _halves(r.metrics)
        for r in records
    ]
    for row in rows:
        row["drafter"] = row["drafter"] or "none"
    columns = tuple(key for key in LABELS if key != "runs")
    if group_by:
        rows = _grouped(rows, list(group_by))
        columns = (*group_by, "runs", *DIGITS)
    if sort is not None:
        rising = sort not in METRICS if is_ascending is None else is_ascending
        known = [row for row in rows if row[sort] is not None]
        known.sort(key=lambda row: rank(row[sort]), reverse=not rising)
        rows = known + [row for row in rows if row[sort] is None]
    return Listing(columns, rows, {})


def rank(value: Setting) -> tuple[bool, float, str]:
    """Orders text before numbers, and numbers by size."""
    is_number = isinstance(value, int | float)
    return is_number, float(value) if is_number else 0.0, str(value)  # type: ignore[arg-type]


def _grouped(rows: list[Row], group_by: list[str]) -> list[Row]:
    """The number of the runs of each group, and the median of each metric."""
    import pandas as pd

    frame = pd.DataFrame(rows, dtype=object)[[*dict.fromkeys([*group_by, *METRICS])]]
    metrics = frame[list(METRICS)].astype(float)
    keys = [frame[key] for key in group_by]
    groups = metrics.groupby(keys, dropna=False, sort=False)
    medians = groups.median().assign(runs=groups.size()).reset_index().astype(object)
    return medians.where(medians.notna(), None).to_dict("records")


def _halves(metrics: Metrics | None) -> Row:
    """Half the width of the 95 % interval of each metric that has one."""
    ends = {name: getattr(metrics, f"{name}_interval", None) for name in DIGITS}
    return {f"{HALF}{name}": (e[1] - e[0]) / 2 for name, e in ends.items() if e}


def without_constants(listing: Listing) -> Listing:
    """The listing without the columns that say nothing: those without a value, and settings that
    are the same in every row of several."""
    values = {key: {row[key] for row in listing.rows} for key in listing.columns}
    filled = [key for key in listing.columns if values[key] != {None}]
    can_go = [key for key in filled if key not in DIGITS and key != "runs"]
    constants: dict[str, Setting] = {}
    if len(listing.rows) > 1:
        constants = {k: listing.rows[0][k] for k in can_go if len(values[k]) == 1}
    columns = tuple(key for key in filled if key not in constants)
    return Listing(columns, listing.rows, constants)


def compact(listing: Listing) -> Listing:
    """The listing with fewer columns for the same: the draft is a model or what else drafts, and
    the budget stands behind its policy. Columns that are not all there stay as they are."""
    columns, rows = listing.columns, listing.rows
    if {"draft_model", "drafter"} <= {*columns}:
        columns = tuple(key for key in columns if key != "drafter")
        rows = [row | {"draft_model": row["draft_model"] or row["drafter"]} for row in rows]
    if {"kv_policy", "budget"} <= {*columns}:
        columns = tuple(key for key in columns if key != "budget")
        parts = ("kv_policy", "budget")
        rows = [
            row | {"kv_policy": " ".join(str(row[key]) for key in parts if row[key] is not None)}
            for row in rows
        ]
    return Listing(columns, rows, listing.constants)


def make_table(
    listing: Listing, labels: Mapping[str, str] = LABELS, notes: Sequence[str] = ()
) -> Table:
    """The table of a listing, whose constants stand below it unless there are `notes`."""
    return Table(
        [Column(labels.get(key, key), key in TEXT_COLUMNS, key) for key in listing.columns],
        [
            [Shown(_cell(key, row[key], row.get(HALF + key)), row[key]) for key in listing.columns]
            for row in listing.rows
        ],
        below=notes or [listing.said()] if listing.constants else notes,
        is_framed=False,
    )


def print_text(listing: Listing, notes: Sequence[str] = ()) -> None:
    """Print it for people, in the width of the terminal, and notes below it. In a file or a pipe it
    is 80 columns wide. Names are folded where that is narrow; numbers are never cut."""
    listing = compact(without_constants(listing))
    table = make_table(replace(listing, constants={}), NARROW_LABELS, notes)
    replace(table, above=[listing.said()] if listing.constants else []).print(NARROW)


FORMATS: Mapping[str, Callable[[Listing], str]] = {
    "md": lambda listing: make_table(without_constants(listing)).markdown(),
    "latex": lambda listing: make_table(without_constants(listing)).latex(),
    "csv": lambda listing: make_table(listing).csv(),
}


def _cell(key: str, value: Setting, half: Setting = None) -> str:
    if value is None:
        return ""
    if key not in METRICS or not isinstance(value, float):
        return str(value)
    digits = DIGITS.get(key, 2)
    if half is None:
        return f"{value:.{digits}f}"
    digits = min(2, digits)  # no more than the interval says
    return f"{value:.{digits}f}±{half:.{digits}f}"


MOST_RECORDS = 100  # of a table; a longer one is for programs, and is not compared


class Noted:
    """Passes records on, and keeps them if they are few."""

    def __init__(self, records: Iterable[RunRecord]) -> None:
        self._records = iter(records)
        self.few: list[RunRecord] = []

    def __iter__(self) -> Iterator[RunRecord]:
        self.few = list(islice(self._records, MOST_RECORDS + 1))
        yield from self.few
        if len(self.few) > MOST_RECORDS:
            self.few = []
            yield from self._records


def noise_lines(records: Sequence[RunRecord]) -> list[str]:
    """A line for each set of records with the same prompts and gamma in which some differ from the
    best by no more than the noise."""
    sets: dict[object, list[RunRecord]] = {}
    for record in records:
        if record.workload is not None and _rate(record) is not None:
            decoding, dtype = record.config["decoding"], record.config["model"]["dtype"]
            gamma = decoding.get("tree") or decoding["num_draft_tokens"]
            key = record.workload.sha256, record.workload.model_sha256, gamma, dtype
            sets.setdefault(key, []).append(record)
    return [line for same in sets.values() if len(same) > 1 and (line := _line(same))]


def _line(records: list[RunRecord]) -> str:
    best = max(records, key=lambda record: _rate(record) or 0.0)
    alike = [r for r in records if r is not best and _is_noise(r, best)]
    if not alike:
        return ""
    names = "; ".join(dict.fromkeys(method(record) for record in alike))
    assert best.workload is not None
    return (
        f"acceptance inside the noise of the best ({method(best)}: {_rate(best):.3f}), over "
        f"{best.workload.num_prompts} prompts: {names}"
    )


def _is_noise(record: RunRecord, best: RunRecord) -> bool:
    """Whether the interval of the change holds 0. Records without samples are not compared."""
    try:
        return change_of([pair_of(record, best)]).is_noise
    except ValueError:
        return False


def _rate(record: RunRecord) -> float | None:
    return None if record.metrics is None else record.metrics.acceptance_rate
