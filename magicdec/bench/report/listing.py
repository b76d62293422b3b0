"""The settings of passes by the names of their flags, the command that started one, and many
passes as one table. Imports no torch and no pandas.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from magicdec.hardware.other_load import busy_share, is_busy, load_text
from magicdec.names import WITHOUT_BUDGET
from magicdec.output.tables import Column, Shown, Table
from magicdec.records.comparison.conditions import copied_dtype, policy_of
from magicdec.records.describe import WITHOUT_METRICS
from magicdec.records.environment import Environment
from magicdec.records.fields import described_fields
from magicdec.records.metrics import SUFFIX, PassMetrics
from magicdec.records.pass_record import PassRecord
from magicdec.records.workload import format_mark

SettingValue = str | int | float | bool | None


SETTINGS = (
    "model",
    "dtype",
    "target_dtype",
    "draft_model",
    "draft_ranks",
    "draft_dtype",
    "drafter",
    "draft_weights",
    "kv_policy",
    "budget",
    "draft_kv_dtype",
    "reselect_every",
    "gamma",
    "pa",
    "B",
    "prefix_len",
    "gen_len",
    "dataset",
    "ranks",
    "threads",
    "device",
    "attention",
    "temperature",
    "seed",
    "status",
)


def settings(record: PassRecord) -> dict[str, SettingValue]:
    """The settings of a pass in the order of `SETTINGS`; None where they mean nothing. The length
    of prompts is that of the longest one."""
    config = record.config
    environment = record.environment
    model, workload, decoding = (config[name] for name in ("model", "workload", "decoding"))
    draft = config.get("draft") or {}
    drafts = record.is_drafting
    policy = policy_of(config) if drafts else None
    prompts = record.workload
    return {
        "model": model["model"],
        "dtype": model["dtype"],
        "target_dtype": model["target_dtype"],
        "draft_model": draft.get("model"),
        "draft_ranks": len(draft.get("rank_group") or ()) or None,
        "draft_dtype": draft.get("draft_dtype"),
        "drafter": decoding["drafter"] if drafts else None,
        "draft_weights": decoding.get("draft_weights") if drafts else None,
        "kv_policy": policy,
        "budget": None if policy in (None, *WITHOUT_BUDGET) else int(config["kv"]["budget"]),
        "draft_kv_dtype": copied_dtype(config) if drafts else None,
        "reselect_every": (policy and config["kv"].get("reselect_every")) or None,
        "gamma": decoding["gamma"] if drafts else None,
        "pa": decoding.get("pa") if drafts else None,
        "B": workload.get("batch_size"),
        "prefix_len": workload["prefix_len"] if prompts is None else prompts.prefix_len,
        "gen_len": workload["gen_len"],
        "dataset": None if prompts is None else prompts.dataset + format_mark(config),
        "ranks": environment.world_size,
        "threads": environment.threads,
        "device": environment.gpu or environment.cpu or config["parallel"]["device"],
        "attention": (config.get("attention") or {}).get("backend"),
        "temperature": (config.get("sampling") or {}).get("temperature"),
        "seed": workload.get("seed"),
        "status": record.status,
    }


def rank(value: SettingValue) -> tuple[bool, float, str]:
    is_number = isinstance(value, int | float)
    return not is_number, float(value) if is_number else 0.0, str(value)  # type: ignore[arg-type]


LAUNCHER = "torchrun --standalone --nproc_per_node={}"


def command_of(environment: Environment) -> str:
    """The command that makes a record again from the root of the repository, on one host, with
    torchrun for ranks that it did not start itself."""
    return _command(tuple(environment.argv) or ("?",), environment.world_size)


@lru_cache(maxsize=1000)
def _command(argv: tuple[str, ...], world_size: int) -> str:
    program, *flags = argv
    is_script = program.endswith(".py")
    words = shlex.split(program) if not is_script else [f"tests/{program}"]
    starts_ranks = any(flag.partition("=")[0] == "--nproc" for flag in flags)
    if world_size > 1 and not starts_ranks:
        launcher = LAUNCHER.format(world_size)
        command = f"{launcher} {'' if is_script else '--no-python '}{shlex.join(words)}"
    else:
        command = f"{'python ' if is_script else ''}{shlex.join(words)}"
    return f"{command} {shlex.join(flags)}".rstrip()


ListingRow = dict[str, Any]
NARROW = 80  # columns of a text table that is written to a file or a pipe
DRAFT_KEYS = ("draft_ranks", "draft_dtype")
TEXT_COLUMNS = ("model", "draft_model", "drafter", "draft_weights", "kv_policy", "device", "status")
# The metrics that a column can have, as the record describes them.
DESCRIBED = {
    name: about
    for name, kind, about in described_fields(PassMetrics)
    if about.label and kind in (int, float)
}
METRICS = (
    "decode_tokens_per_s",
    "speedup",
    "net_speedup",
    "draft_acceptance_rate",
    "roofline_fraction",
)
TAKEN = "cores_taken"  # of which a cell has the share of a busy host alone
COLUMNS = (*SETTINGS, *DESCRIBED, TAKEN)  # all that a table can have
# The labels of columns that are not those of their keys.
LABELS = {"draft_model": "draft", "draft_weights": "draft weights", "prefix_len": "prefix"}
LABELS |= {name: about.label for name, about in DESCRIBED.items()} | {TAKEN: "busy"}
GAMMA = "\N{GREEK SMALL LETTER GAMMA}"
NARROW_METRICS = {  # their labels in a text table, which says what they stand for
    "decode_tokens_per_s": "tok/s",
    "net_speedup": "net",
    "draft_acceptance_rate": "accept",
    "roofline_fraction": "roof",
}
NARROW_LABELS = LABELS | {"gamma": GAMMA} | NARROW_METRICS
NARROW_SPREAD = ("speedup", "draft_acceptance_rate")  # whose interval has room in a text table
ENDS = (f"{SUFFIX}_low", f"{SUFFIX}_high")  # of an interval, behind the name of its metric


@dataclass(frozen=True)
class Listing:
    """The rows of a table. `columns` are keys of the rows, in order; if chosen by the user, all are
    shown as they are."""

    columns: Sequence[str]
    rows: list[ListingRow]
    is_chosen: bool = False

    def table(self, form: str) -> Table:
        """The table, below a line about busy hosts. CSV has every column; other forms say shared
        settings in a line and omit columns without a value. As text it is narrow, with intervals
        beside metrics; other forms have them in columns."""
        listing, line = (self, "") if form == "csv" or self.is_chosen else self._varying()
        load = load_text([row[TAKEN] for row in self.rows], "runs")
        if form == "text":
            compact = listing if self.is_chosen else listing._compact()
            table = compact._as_text()
            is_left_out = "status" in listing.columns and "status" not in compact.columns
            counts = Counter(row["status"] for row in self.rows)
            texts = [f"{count} {status}" for status, count in counts.items()]
            states = f"status: {', '.join(texts)}" if is_left_out else ""
            return replace(table, above=[*filter(None, (load, line, states)), *table.above])
        keys = listing._with_intervals(form == "csv")
        return Table(
            [Column(_label(key), key in TEXT_COLUMNS, key) for key in keys],
            [[Shown(_cell(key, row), row.get(key)) for key in keys] for row in listing.rows],
            above=[load] if load else [],
            below=[line] if line else [],
            is_framed=False,
        )

    def _varying(self) -> tuple[Listing, str]:
        """The columns in which rows differ, and a line of shared settings."""
        rows = [row | _own_dtype(row) for row in self.rows]
        values = {key: {row[key] for row in rows} for key in self.columns}
        drafting = [row for row in rows if row["draft_model"] is not None]
        for key in DRAFT_KEYS:  # which only passes with a draft model have
            draft_values = {row[key] for row in drafting}
            values[key] = draft_values if len(draft_values) > 1 else {None}
        if not any(is_busy(row[TAKEN]) for row in rows):
            values[TAKEN] = {None}
        varying = (*(["status"] if len(rows) == 1 else []), *METRICS, TAKEN)
        same = [key for key in self.columns if len(values[key]) == 1 and key not in varying]
        constants = {key: v for key in same for v in values[key] if v is not None}
        columns = [key for key in self.columns if key not in constants and values[key] != {None}]
        texts = [f"{LABELS.get(key, key)} {v}" for key, v in constants.items()]
        return Listing(columns, rows), f"in every row: {', '.join(texts)}" if texts else ""

    def _compact(self) -> Listing:
        """A listing with fewer columns: draft model or drafter in one, low-bit weights and budget
        behind draft and policy, and the status only where tokens are wrong or lacking."""
        columns = self.columns
        if not any(row["status"] in WITHOUT_METRICS for row in self.rows):
            columns = [key for key in columns if key != "status"]
        rows = self.rows
        if {"draft_model", "drafter"} <= {*columns}:
            columns = [key for key in columns if key != "drafter"]
            rows = [row | {"draft_model": row["draft_model"] or row["drafter"]} for row in rows]
        for first, second in (("draft_model", "draft_weights"), ("kv_policy", "budget")):
            if {first, second} <= {*columns}:
                columns = [key for key in columns if key != second]
                pairs = [[row[key] for key in (first, second)] for row in rows]
                texts = [" ".join(str(part) for part in pair if part is not None) for pair in pairs]
                rows = [row | {first: text} for row, text in zip(rows, texts, strict=True)]
        return Listing(columns, rows)

    def _as_text(self) -> Table:
        meanings = [
            f"{label}: {LABELS[key]}"
            for key, label in NARROW_METRICS.items()
            if key in self.columns
        ]
        cells = [[_narrow_cell(key, row) for key in self.columns] for row in self.rows]
        if any("±" in cell for row in cells for cell in row):
            meanings.append("±: half of the 95 % interval")
        return Table(
            [Column(NARROW_LABELS.get(k, k), k in TEXT_COLUMNS, k) for k in self.columns],
            cells,
            above=["; ".join(meanings)] if meanings else [],
            is_framed=False,
        )

    def _with_intervals(self, has_ends: bool) -> list[str]:
        """The columns, each metric before its interval if any row has one; with `has_ends` always,
        in two columns."""
        keys = list[str]()
        for key in self.columns:
            keys.append(key)
            low, high = (f"{key}{end}" for end in ENDS)
            if has_ends and hasattr(PassMetrics, f"{key}{SUFFIX}"):
                keys += [low, high]
            elif any(row.get(low) is not None for row in self.rows):
                keys.append(f"{key}{SUFFIX}")
        return keys


def _own_dtype(row: ListingRow) -> ListingRow:
    return {"target_dtype": None if row["target_dtype"] == row["dtype"] else row["target_dtype"]}


def list_records(
    records: Iterable[PassRecord],
    columns: Sequence[str] = (),
    sort_by: Sequence[str] = (),
    is_reversed: bool = False,
) -> Listing:
    """A row for each pass; those of a study are in the order of its settings. `columns`
    replace the usual ones. `sort_by` has the most important column first; rows without a value come
    last."""
    metrics = tuple(dict.fromkeys((*METRICS, *filter(DESCRIBED.get, (*columns, *sort_by)))))
    rows = list[ListingRow]()
    studies = list[str]()
    for r in records:
        values = {name: getattr(r.metrics, name, None) for name in metrics}
        taken = {TAKEN: r.environment.cores_taken}
        rows.append(settings(r) | values | _intervals(r.metrics, metrics) | taken)
        studies.append(_study_of(r))
    for row in rows:
        row["drafter"] = row["drafter"] or "none"
    rows = _by_study(rows, studies)
    for key in reversed(sort_by):
        present = [row for row in rows if row[key] is not None]
        present.sort(key=lambda row, key=key: rank(row[key]), reverse=is_reversed)  # type: ignore[misc]
        rows = present + [row for row in rows if row[key] is None]
    usual = (*SETTINGS[:-1], *METRICS, TAKEN, SETTINGS[-1])
    return Listing(columns or usual, rows, bool(columns))


def _intervals(metrics: PassMetrics | None, names: Iterable[str]) -> ListingRow:
    row: ListingRow = {}
    for name in names:
        if hasattr(PassMetrics, f"{name}{SUFFIX}"):
            low, high = getattr(metrics, f"{name}{SUFFIX}", None) or (None, None)
            row |= dict(zip((f"{name}{end}" for end in ENDS), (low, high), strict=True))
    return row


def _study_of(record: PassRecord) -> str:
    command = " ".join(record.environment.argv)
    return command if command.startswith("magicdec sweep ") else ""


def _by_study(rows: Sequence[ListingRow], studies: Sequence[str]) -> list[ListingRow]:
    """The rows with a study's passes, measured in random order, together: numbers by size, names as
    in the command."""
    first = {study: number for number, study in reversed([*enumerate(studies)])}

    def place(number: int) -> tuple[Any, ...]:
        study = studies[number]
        row = rows[number]
        if not study:
            return (number,)
        words = [word.removeprefix("model:") for word in study.split()]
        named = {word: at for at, word in reversed([*enumerate(words)])}
        ranks = (rank(row[key]) for key in SETTINGS)
        return first[study], *((text, size, named.get(name, 0), name) for text, size, name in ranks)

    return [rows[number] for number in sorted(range(len(rows)), key=place)]


def _label(key: str) -> str:
    metric = key.removesuffix(SUFFIX)
    return f"{LABELS[metric]}, 95 % interval" if metric != key else LABELS.get(key, key)


def _cell(key: str, row: ListingRow) -> str:
    metric = key.removesuffix(SUFFIX)
    value = row.get(key)
    if metric != key:
        about = DESCRIBED[metric]
        ends = [row[f"{metric}{end}"] for end in ENDS]
        return "" if None in ends else about.show_interval(*ends)
    if key == TAKEN:
        return busy_share(value)
    if value is None:
        return ""
    return DESCRIBED[key].show(value) if key in DESCRIBED else str(value)


def _narrow_cell(key: str, row: ListingRow) -> str:
    """A short cell: without unit and separators, and half of the interval where there is space."""
    value = row[key]
    if key == TAKEN:
        return busy_share(value)
    if value is None or key not in DESCRIBED:
        return "" if value is None else str(value)
    about = DESCRIBED[key]
    low, high = (row.get(f"{key}{end}") for end in ENDS)
    if key == "roofline_fraction":
        return f"{value:.0%}"
    if low is None or key not in NARROW_SPREAD:
        return f"{value * about.scale:.{about.digits}f}"
    return f"{value:.2f}±{(high - low) / 2:.2f}"
