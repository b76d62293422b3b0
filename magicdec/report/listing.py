"""Many records as one table, with a line for each run or for each group of runs: as text, Markdown,
LaTeX or CSV; and which of them differ in acceptance by no more than the noise: records that decoded
the same prompts of the same model are compared, prompt by prompt, with the one that accepted most.

Owns the choice of rows and columns and their order. Imports no torch.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Literal

from magicdec.console import make_console
from magicdec.records.comparison.change import change_of, pair_of
from magicdec.records.performance import Metrics
from magicdec.records.record import RunRecord
from magicdec.records.table import method
from magicdec.report.point import SETTINGS, Setting, metric, settings

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
        shown = (f"{LABELS.get(key, key)} {_cell(key, v)}" for key, v in self.constants.items())
        return f"in every row: {', '.join(shown)}" if self.constants else ""


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
        settings(r) | {name: metric(r.metrics, name) for name in METRICS} | _halves(r.metrics)
        for r in records
    ]
    for row in rows:
        row["drafter"] = row["drafter"] or "none"
    columns = tuple(key for key in LABELS if key != "runs")
    if group_by:
        rows = _grouped(rows, group_by)
        columns = (*group_by, "runs", *DIGITS)
    if sort is not None:
        rising = sort not in METRICS if is_ascending is None else is_ascending
        rows = _sorted(rows, sort, rising)
    return Listing(columns, rows, {})


def _halves(metrics: Metrics | None) -> Row:
    """Half the width of the 95 % interval of each metric that has one."""
    ends = {name: getattr(metrics, f"{name}_interval", None) for name in DIGITS}
    return {f"{HALF}{name}": (e[1] - e[0]) / 2 for name, e in ends.items() if e}


def without_constants(listing: Listing) -> Listing:
    """The listing without the columns that say nothing: those without a value, and settings that
    are the same in every row of several."""
    values = {key: {row[key] for row in listing.rows} for key in listing.columns}
    kept = [key for key in listing.columns if values[key] != {None}]
    can_go = [key for key in kept if key not in DIGITS and key != "runs"]
    constants: dict[str, Setting] = {}
    if len(listing.rows) > 1:
        constants = {k: listing.rows[0][k] for k in can_go if len(values[k]) == 1}
    columns = tuple(key for key in kept if key not in constants)
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
        named = ("kv_policy", "budget")
        rows = [
            row | {"kv_policy": " ".join(str(row[key]) for key in named if row[key] is not None)}
            for row in rows
        ]
    return Listing(columns, rows, listing.constants)


def _grouped(rows: list[Row], group_by: Sequence[str]) -> list[Row]:
    groups: dict[tuple[Setting, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in group_by), []).append(row)
    return [
        dict(zip(group_by, values, strict=True))
        | {"runs": len(members)}
        | {name: _median(member[name] for member in members) for name in METRICS}
        for values, members in groups.items()
    ]


def _median(values: Iterable[Setting]) -> float | None:
    found = [value for value in values if isinstance(value, int | float)]
    return statistics.median(found) if found else None


def _sorted(rows: list[Row], key: str, is_ascending: bool) -> list[Row]:
    def place(row: Row) -> tuple[bool, float, str]:
        value = row[key]
        is_number = isinstance(value, int | float)
        return is_number, float(value) if is_number else 0.0, str(value)  # type: ignore[arg-type]

    known = sorted((r for r in rows if r.get(key) is not None), key=place, reverse=not is_ascending)
    return [*known, *(row for row in rows if row.get(key) is None)]


def print_text(listing: Listing, notes: Sequence[str] = ()) -> None:
    """Print it for people, in the width of the terminal, and notes below it. In a file or a pipe it
    is 80 columns wide. Names are folded where that is narrow; numbers are never cut."""
    from rich.table import Table

    listing, console = compact(without_constants(listing)), make_console()
    if not console.is_terminal:
        console.width = NARROW
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left")
    for key in listing.columns:
        label, is_text = NARROW_LABELS.get(key, key), key in TEXT_COLUMNS
        justify: Literal["left", "right"] = "left" if is_text else "right"
        table.add_column(label, justify=justify, overflow="fold", no_wrap=not is_text)
    for row in listing.rows:
        table.add_row(*(_cell(key, row[key], row.get(HALF + key)) for key in listing.columns))
    if listing.constants:
        console.print(listing.said(), soft_wrap=False)
    console.print(table)
    for note in notes:
        console.print(note)


def markdown(listing: Listing) -> str:
    listing = without_constants(listing)
    aligned = (":--" if key in TEXT_COLUMNS else "--:" for key in listing.columns)
    lines = [_labels(listing), list(aligned), *_cells(listing)]
    body = "\n".join("| " + " | ".join(_escape_md(c) for c in cells) + " |" for cells in lines)
    said = listing.said()
    return f"{body}\n" + (f"\n{said[0].upper()}{said[1:]}.\n" if said else "")


def latex(listing: Listing) -> str:
    """A `tabular` for the package booktabs."""
    listing = without_constants(listing)
    columns = "".join("l" if key in TEXT_COLUMNS else "r" for key in listing.columns)
    lines = [" & ".join(map(_escape_latex, cells)) + r" \\" for cells in _cells(listing)]
    head = " & ".join(map(_escape_latex, _labels(listing))) + r" \\"
    said = [f"% {listing.said()}"] if listing.constants else []
    begin, end = rf"\begin{{tabular}}{{{columns}}}", r"\end{tabular}"
    return "\n".join(
        [*said, begin, r"\toprule", head, r"\midrule", *lines, r"\bottomrule", end, ""]
    )


def comma_separated(listing: Listing) -> str:
    """Every column, with the keys as labels and the numbers unrounded, for programs."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(listing.columns)
    writer.writerows([row[key] for key in listing.columns] for row in listing.rows)
    return text.getvalue()


FORMATS: Mapping[str, Callable[[Listing], str]] = {
    "md": markdown,
    "latex": latex,
    "csv": comma_separated,
}


def _labels(listing: Listing) -> list[str]:
    return [LABELS.get(key, key) for key in listing.columns]


def _cells(listing: Listing) -> list[list[str]]:
    return [
        [_cell(key, row[key], row.get(HALF + key)) for key in listing.columns]
        for row in listing.rows
    ]


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


def _escape_md(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def _escape_latex(text: str) -> str:
    named = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(named.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in text)


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
