"""MagicDec's published tables ([paper](https://arxiv.org/abs/2408.11049); numbers from its project
page), in which `magicdec reproduce` fills the columns `predicted`, `measured`, `interval` and
`exists`, and which it saves after each command.

A `PublishedRow` has texts by column, empty where nothing is published. A new table is a line in
`TABLES` and a file in `results/paper/`.
"""

from __future__ import annotations

import csv
import json
import sys
import tempfile
from io import StringIO
from pathlib import Path

from magicdec.distributed.ranks import run_command
from magicdec.model.presets.presets import PRESETS, find_config
from magicdec.output.files import read_text
from magicdec.output.tables import Column, Table, csv_text
from magicdec.output.writing import append_file, write_text

PublishedRow = dict[str, str]
# `draft` is `self`, `none` or a model; `budget` is the KV budget of the draft.
COLUMNS = (
    "model",
    "draft",
    "hardware",
    "ranks",
    "budget",
    "prefix_len",
    "batch_size",
    "gamma",
    "quantity",
)
# The metric of the last pass of a run that a quantity is, and the digits that it is written with.
QUANTITIES = {
    "speedup": ("speedup", 3),
    "conditional_acceptance": ("draft_acceptance_rate", 3),  # from which it is converted
    "tpot_ms": ("mean_tpot_ms", 2),
    "tokens_per_s": ("decode_tokens_per_s", 1),
}
CONDITIONAL = "conditional_acceptance"  # the rate of MagicDec's formula for the expected tokens
TABLES = {
    "magicdec_acceptance": "acceptance of Llama-3.1-8B by prefix length",
    "magicdec_speedups_a100": "speedups on 8 A100",
    "magicdec_speedups_h100": "speedups on 8 H100",
    "magicdec_speedups_h100_early": "speedups on H100, from an early draft",
    "magicdec_speedups_budget512": "speedups by batch size at KV budget 512",
    "magicdec_throughput_latency": "throughput against time per token on 8 A100",
}
"""What each table shows."""
PACKAGED = Path(__file__).with_name("published")
# the packaged models
DEMO = "demo"
DEMO_DRAFT = "demo-draft"
OWN_CACHE = ("self", "none")  # the drafts that are no model
# Published peak rates of one GPU in bfloat16 (bytes/s, operations/s), and assumed links (bytes/s).
GPUS = {"A100": (2039e9, 312e12, 300e9), "H100": (3352e9, 989e12, 450e9)}
# of a link and of one of 32 layers; as in docs/plan.md
LATENCY_S = 15e-6
OVERHEAD_S = 160e-6 / 32


def file_of(folder: Path, table: str) -> Path:
    path = folder / f"{table}.csv"
    return path if path.exists() else PACKAGED / path.name


class Missing(Exception):
    """The reason why a number does not exist."""


def at_demo_size(row: PublishedRow) -> PublishedRow:
    """The line's setting for the packaged models on one CPU rank, with shorter prefixes and smaller
    batches."""
    return {name: row[name] for name in COLUMNS} | {
        "model": DEMO,
        "draft": row["draft"] if row["draft"] in OWN_CACHE else DEMO_DRAFT,
        "hardware": "CPU",
        "ranks": "1",
        "budget": "129",
        "prefix_len": str(min(4096, max(512, int(row["prefix_len"]) // 16))),
        "batch_size": str(max(1, int(row["batch_size"] or 32) // 32)),
    }


def command_of(row: PublishedRow) -> str:
    """The words after `magicdec`, without `--out`, with enough batches for intervals."""
    draft = row["draft"]
    is_demo = row["model"] == DEMO
    drafter = draft if draft in OWN_CACHE else f"model:{hub_name(draft)}"
    drafting = f"--budget {row['budget']} --gamma {gamma_of(row)} " * (draft != "none")
    return (
        f"run --model {hub_name(row['model'])} --draft {drafter} --nproc {row['ranks'] or 1} "
        f"--B {row['batch_size'] or 1} --prefix_len {row['prefix_len']} --gen_len 64 "
        f"--num_batches 4 {drafting}--dataset {'demo' if is_demo else 'pg19'}"
    )


def gamma_of(row: PublishedRow) -> int:
    return int(row["gamma"] or 4)


def hub_name(model: str) -> str:
    return PRESETS[model].repo_id if model in PRESETS else model


def read_measured(row: PublishedRow, records: Path) -> tuple[str, str]:
    """The number in the records of a line, and its 95 % interval or an empty text. Raises Missing
    without it."""
    from magicdec.predict.curves import conditional_rate
    from magicdec.records.metrics import SUFFIX as INTERVAL

    name, digits = QUANTITIES[row["quantity"]]
    metrics = json.loads(records.read_text(encoding="utf-8").splitlines()[-1])["metrics"]
    if metrics is None:
        raise Missing("the tokens of its run were wrong")
    if metrics[name] is None:
        raise Missing(f"the run has no {name}")
    numbers = [metrics[name], *(metrics.get(f"{name}{INTERVAL}") or ())]
    if row["quantity"] == CONDITIONAL:
        numbers = [conditional_rate(rate, gamma_of(row)) for rate in numbers]
    value, *ends = (f"{number:.{digits}f}" for number in numbers)
    return value, " to ".join(ends)


def predict(row: PublishedRow, folder: Path) -> str:
    """The prediction of `magicdec plan`. The published acceptance is a conditional rate, as in the
    paper's formula. Raises Missing if there is none."""
    from magicdec.hardware.ceiling_file import Hardware, Link
    from magicdec.hardware.costs import Deployment
    from magicdec.predict.speculation import SpeculationCost

    lines = StringIO(read_text(file_of(folder, "magicdec_acceptance")), newline="")
    place = {"model": row["model"], "prefix_len": row["prefix_len"]}.items()
    rates = [r["published"] for r in csv.DictReader(lines) if r["published"] and place <= r.items()]
    if row["quantity"] == CONDITIONAL:
        raise Missing("the plan takes acceptance as given")
    if not row["ranks"]:
        raise Missing("the number of GPUs is not published")
    if row["draft"] != "none" and (row["draft"] != "self" or not rates):
        raise Missing("no acceptance is published for this pair and prefix")
    bandwidth, flops, link_bandwidth = GPUS[row["hardware"]]
    gpu = Hardware(bandwidth, flops, OVERHEAD_S, link=Link(LATENCY_S, link_bandwidth))
    target = Deployment(find_config("--model", row["model"]), gpu, 2, int(row["ranks"]))
    S = int(row["prefix_len"])
    B = int(row["batch_size"])
    if row["draft"] == "none":
        step_s = target.seconds(B, 1, S)
        return f"{1e3 * step_s if row['quantity'] == 'tpot_ms' else B / step_s:.2f}"
    speculation = SpeculationCost(target, target, int(row["budget"]), float(rates[-1]))
    return f"{speculation.predict_step(B, S, int(row['gamma'])).speedup:.2f}"


FLAG = "--tables"  # names the folder
DEMO_SIZE = "demo size"  # the source of a line that was not published
NUMBERS = ("published", "predicted", "measured")
FILLED = (*NUMBERS, "interval", "exists", "source")  # the columns after those of the setting
ALL_COLUMNS = (*COLUMNS, *FILLED)
SHORT = {"prefix_len": "prefix", "batch_size": "B"}


class PublishedTable:
    """A table with `COLUMNS`, its settings, and `FILLED`: a missing number is empty, and `exists`
    says why. Raises ValueError if its file cannot be read or has other columns."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.path = folder / f"{name}.csv"
        self.about = TABLES[name]
        try:
            reader = csv.DictReader(StringIO(read_text(file_of(folder, name)), newline=""))
            self.rows: list[PublishedRow] = list(reader)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            why = getattr(error, "strerror", None) or error
            raise ValueError(f"{FLAG} {folder}: {self.path.name}: {why}") from None
        if tuple(reader.fieldnames or ()) != ALL_COLUMNS:
            expected = ",".join(ALL_COLUMNS)
            raise ValueError(f"{FLAG} {folder}: {self.path.name} needs the columns {expected}")

    def part(self, is_demo: bool) -> list[PublishedRow]:
        return [row for row in self.rows if (row["source"] == DEMO_SIZE) == is_demo]

    def predict(self) -> None:
        for row in self.part(is_demo=False):
            self.refresh(row)

    def make_demo(self) -> None:
        """Makes the lines at demo size from the published ones, without repetitions, keeping
        measurements."""
        published = self.part(is_demo=False)
        old_rows = self.part(is_demo=True)
        demo: list[PublishedRow] = []
        for setting in map(at_demo_size, published):
            if any(setting.items() <= row.items() for row in demo):
                continue
            new_row = setting | dict.fromkeys(FILLED, "") | {"source": DEMO_SIZE}
            demo.append(next((r for r in old_rows if setting.items() <= r.items()), new_row))
            self.refresh(demo[-1])
        self.rows = [*published, *demo]

    def refresh(self, row: PublishedRow, unmeasured: str = "") -> None:
        """Predicts a line anew, and says in `exists` why numbers are missing; `unmeasured` is the
        reason if its command measured nothing."""
        is_demo = row["source"] == DEMO_SIZE
        needs = "a run" if is_demo else f"{row['ranks']} {row['hardware']} GPUs".lstrip()
        reasons = {
            "published": "the packaged models are not of the paper",
            "predicted": "the plan needs a probe of this machine",
            "measured": unmeasured or f"it needs {needs}",
        }
        if not is_demo:
            try:
                row["predicted"] = predict(row, self.folder)
            except Missing as reason:
                row["predicted"] = ""
                reasons["predicted"] = str(reason)
        existing = ", ".join(name for name in NUMBERS if row[name])
        missing = [f"not {name}: {why}" for name, why in reasons.items() if not row[name]]
        row["exists"] = "; ".join(filter(None, [existing, *missing]))

    def commands(self, is_demo: bool) -> list[str]:
        return list(dict.fromkeys(command_of(row) for row in self.part(is_demo)))

    def measure(self, is_demo: bool, out: Path) -> int:
        """Measures one part, saves it and appends every record to `out`. Returns the number of
        failed commands. Raises ValueError if a file cannot be written."""
        commands = self.commands(is_demo)
        num_failed = 0
        for number, command in enumerate(commands, start=1):
            print(f"{number}/{len(commands)}  magicdec {command}", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory() as folder:
                records = Path(folder, "records.jsonl")
                ended = run_command([*command.split(), "--out", records])
                error = f"its run ended with {ended.code}: {ended.error}" if ended.code else ""
                for row in self.part(is_demo):
                    if command_of(row) == command:
                        self.enter(row, records, error)
                append_file("--out", records, out)
            self.save()
            if error:
                print(f"  {error}", file=sys.stderr, flush=True)
                num_failed += 1
        return num_failed

    def enter(self, row: PublishedRow, records: Path, error: str) -> None:
        row["measured"] = row["interval"] = ""
        try:
            if not error:
                row["measured"], row["interval"] = read_measured(row, records)
        except Missing as reason:
            error = str(reason)
        self.refresh(row, error)

    def save(self) -> None:
        """Raises ValueError if the file cannot be written."""
        rows = [[row[name] for name in ALL_COLUMNS] for row in self.rows]
        write_text(FLAG, self.path, csv_text([ALL_COLUMNS, *rows]))

    def print(self) -> None:
        print(f"{self.name}: {self.about}")
        for is_demo in (False, True):
            if rows := self.part(is_demo):
                print()
                self._as_table("the packaged models" if is_demo else "published size", rows).print()

    def _as_table(self, what: str, rows: list[PublishedRow]) -> Table:
        """A table of the settings that differ between lines and of the numbers; shared settings are
        in the title."""
        values = {name: {row[name] for row in rows} for name in ALL_COLUMNS}
        shared = [name for name in COLUMNS if len(values[name]) == 1]
        settings_of_all = ", ".join(f"{name} {rows[0][name]}" for name in shared if rows[0][name])
        numbers = [name for name in (*NUMBERS, "interval") if values[name] != {""}]
        names = [*(name for name in COLUMNS if name not in shared), *numbers]
        return Table(
            [Column(SHORT.get(name, name), name in ("model", "draft"), name) for name in names],
            [[row[name] for name in names] for row in rows],
            above=[f"{what}: {settings_of_all}" if settings_of_all else what],
            is_framed=False,
        )


def print_tables(folder: Path) -> None:
    """Prints every table. Raises ValueError if one cannot be read."""
    for name in TABLES:
        PublishedTable(name, folder).print()
        print()
