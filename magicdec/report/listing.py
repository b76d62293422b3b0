"""The settings of runs by the names of their flags, as tables sort, group and export them; the
command that started a run; and many records as one table, with a line for each run. Imports no
torch and no pandas."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from magicdec.names import BASELINE, FULL_KV_POLICY
from magicdec.records.comparison.conditions import policy_of
from magicdec.records.environment import Environment
from magicdec.records.performance import SUFFIX, Metrics
from magicdec.records.record import RunRecord
from magicdec.tables import Column, Shown, Table

Setting = str | int | float | bool | None


SETTINGS = (
    *("model", "dtype", "target_dtype", "draft_model", "draft_ranks", "draft_dtype", "drafter"),
    "draft_weights",
    *("kv_policy", "budget", "gamma", "pa", "B", "prefix_len", "gen_len", "dataset", "ranks"),
    *("threads", "device", "attention", "temperature", "seed", "status"),
)


def settings(record: RunRecord) -> dict[str, Setting]:
    """The settings of a run, which `SETTINGS` names in order, by the names of their flags; None
    where they mean nothing."""
    config, environment = record.config, record.environment
    model, workload, decoding = (config[name] for name in ("model", "workload", "decoding"))
    draft, drafts = config.get("draft") or {}, not is_baseline(record)
    policy = policy_of(config) if drafts else None
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
        "budget": None if policy in (None, FULL_KV_POLICY) else int(config["kv"]["budget"]),
        "gamma": (decoding.get("tree") or decoding["num_draft_tokens"]) if drafts else None,
        "pa": decoding.get("pa") if drafts else None,
        "B": workload["batch_size"],
        "prefix_len": workload["prefix_len"],
        "gen_len": workload["gen_len"],
        "dataset": None if record.workload is None else record.workload.dataset,
        "ranks": environment.world_size,
        "threads": environment.threads,
        "device": environment.gpu or environment.cpu or config["parallel"]["device"],
        "attention": (config.get("attention") or {}).get("backend"),
        "temperature": (config.get("sampling") or {}).get("temperature"),
        "seed": workload.get("seed"),
        "status": record.status,
    }


def rank(value: Setting) -> tuple[bool, float, str]:
    """Orders numbers before text, and numbers by size."""
    is_number = isinstance(value, int | float)
    return not is_number, float(value) if is_number else 0.0, str(value)  # type: ignore[arg-type]


def is_baseline(record: RunRecord) -> bool:
    return bool(record.config["decoding"]["strategy"] == BASELINE)


LAUNCHER = "torchrun --standalone --nproc_per_node={}"


def command_of(environment: Environment) -> str:
    """The command that starts the run again from the root of the repository. A record has the name
    of the program without its folder. Several ranks of a run that did not start them itself
    (`--nproc`) are given to torchrun on one host."""
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


Row = dict[str, Setting]
NARROW = 80  # columns of a text table that is written to a file or a pipe
OF_DRAFT = ("draft_ranks", "draft_dtype")
TEXT_COLUMNS = ("model", "draft_model", "drafter", "draft_weights", "kv_policy", "device", "status")
# The labels of columns that are not those of their keys.
LABELS = {
    "draft_model": "draft", "draft_weights": "draft weights", "prefix_len": "prefix",
    "decode_tokens_per_s": "tokens/s", "net_speedup": "net", "acceptance_rate": "accept",
    "roofline_fraction": "roof",
}  # fmt: skip
GAMMA = "\N{GREEK SMALL LETTER GAMMA}"
NARROW_LABELS = LABELS | {"gamma": GAMMA, "decode_tokens_per_s": "tok/s"}  # of a text table
DIGITS = {  # of the metrics
    "decode_tokens_per_s": 1,
    "speedup": 2,
    "net_speedup": 2,
    "acceptance_rate": 3,
    "roofline_fraction": 2,
}
HALF = "half of the interval of "  # before the key of a metric: its key in a row


@dataclass(frozen=True)
class Listing:
    """The rows of a table. `columns` are keys of the rows, in order."""

    columns: Sequence[str]
    rows: list[Row]

    def table(self, form: str) -> Table:
        """The table. As CSV it has every column. Otherwise a setting that is the same in every row
        is said in a line of text, and a column without a value is left out. As text it is
        narrow."""
        columns, rows, labels = self.columns, self.rows, LABELS
        above, below = list[str](), list[str]()
        if form != "csv":
            rows = [row | _own_dtype(row) for row in rows]
            values = {key: {row[key] for row in rows} for key in columns}
            drafting = [row for row in rows if row["draft_model"] is not None]
            for key in OF_DRAFT:  # which only runs with a draft model have
                of_drafts = {row[key] for row in drafting}
                values[key] = of_drafts if len(of_drafts) > 1 else {None}
            varying = ("status", *DIGITS) if len(rows) == 1 else DIGITS
            same = [key for key in columns if len(values[key]) == 1 and key not in varying]
            constants = {key: v for key in same for v in values[key] if v is not None}
            columns = [key for key in columns if key not in constants and values[key] != {None}]
            texts = [f"{LABELS.get(key, key)} {_cell(key, v)}" for key, v in constants.items()]
            lines = [f"in every row: {', '.join(texts)}"] if texts else []
            above, below = (lines, []) if form == "text" else ([], lines)
        if form == "text":
            columns, rows, labels = *_compact(columns, rows), NARROW_LABELS
        return Table(
            [Column(labels.get(key, key), key in TEXT_COLUMNS, key) for key in columns],
            [
                [Shown(_cell(key, row[key], row.get(HALF + key)), row[key]) for key in columns]
                for row in rows
            ],
            above=above, below=below, is_framed=False,
        )  # fmt: skip


def _own_dtype(row: Row) -> Row:
    """The dtype of the weights if it is not that of the activations."""
    return {"target_dtype": None if row["target_dtype"] == row["dtype"] else row["target_dtype"]}


def list_records(records: Iterable[RunRecord]) -> Listing:
    """A row for each record, in their order."""
    rows = [
        settings(r) | {name: getattr(r.metrics, name, None) for name in DIGITS} | _halves(r.metrics)
        for r in records
    ]
    for row in rows:
        row["drafter"] = row["drafter"] or "none"
    return Listing((*SETTINGS[:-1], *DIGITS, SETTINGS[-1]), rows)


def _halves(metrics: Metrics | None) -> Row:
    """Half the width of the 95 % interval of each metric that has one."""
    ends = {name: getattr(metrics, f"{name}{SUFFIX}", None) for name in DIGITS}
    return {f"{HALF}{name}": (e[1] - e[0]) / 2 for name, e in ends.items() if e}


def _compact(columns: Sequence[str], rows: list[Row]) -> tuple[Sequence[str], list[Row]]:
    """Fewer columns for the same: the draft is a model or what else drafts, its low-bit weights
    stand behind it, and the budget behind its policy. Columns that are not all there stay as they
    are."""
    if {"draft_model", "drafter"} <= {*columns}:
        columns = [key for key in columns if key != "drafter"]
        rows = [row | {"draft_model": row["draft_model"] or row["drafter"]} for row in rows]
    for first, second in (("draft_model", "draft_weights"), ("kv_policy", "budget")):
        if {first, second} <= {*columns}:
            columns = [key for key in columns if key != second]
            pairs = [[row[key] for key in (first, second)] for row in rows]
            texts = [" ".join(str(each) for each in pair if each is not None) for pair in pairs]
            rows = [row | {first: text} for row, text in zip(rows, texts, strict=True)]
    return columns, rows


def _cell(key: str, value: Setting, half: Setting = None) -> str:
    if value is None:
        return ""
    if key not in DIGITS or not isinstance(value, float):
        return str(value)
    digits = DIGITS[key]
    if half is None:
        return f"{value:.{digits}f}"
    digits = min(2, digits)  # no more than the interval says
    return f"{value:.{digits}f}±{half:.{digits}f}"
