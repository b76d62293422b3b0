"""Compares a published table of MagicDec with what `magicdec plan` predicts and with what runs here
measure. The scripts beside this file call it with the name of their table.

    python scripts/reproduce/table.py magicdec_speedups_a100 [--predict | --demo | --commands]

The table is `results/paper/NAME.csv`: the published numbers with their source, and the columns
`predicted`, `measured` and `exists` that this program writes. Nothing is fetched but the weights
that a full-size run names.
"""

from __future__ import annotations

import argparse
import csv
import shlex
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from measuring import run_command

from magicdec.cost_model.costs import Deployment
from magicdec.cost_model.speculation import Speculation
from magicdec.hardware.ceiling_file import Hardware, Link
from magicdec.model.presets.named import find_config
from magicdec.records.reading import load_records
from magicdec.records.record import RunRecord

PAPER = Path(__file__).parents[2] / "results" / "paper"
LAYERS = 32  # of every published target
OVERHEAD_S = 160e-6 / LAYERS  # assumed, as in docs/plan.md
# Published peak rates of one GPU in bfloat16. The links are assumed.
HARDWARE = {
    "A100": Hardware(2039e9, 312e12, OVERHEAD_S, link=Link(15e-6, 300e9)),
    "H100": Hardware(3352e9, 989e12, OVERHEAD_S, link=Link(15e-6, 450e9)),
}
HUB = {
    "llama-2-7b-32k": "togethercomputer/LLaMA-2-7B-32K",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "tinyllama-1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
}
DEMO, GEN_LEN = "demo", 64
SHRINK_PREFIX, SHRINK_BATCH, LEAST_PREFIX, MOST_DEMO_PREFIX = 16, 32, 512, 4096
DEMO_BUDGET, DEFAULT_GAMMA = 129, 4


@dataclass(frozen=True)
class Cell:
    """One line of a table. Text fields are empty where nothing is known. `draft` is `self`, `none`
    or a model; `budget` is the KV budget of the draft."""

    model: str
    draft: str
    hardware: str
    ranks: str
    budget: str
    prefix_len: str
    batch_size: str
    gamma: str
    quantity: str
    published: str = ""
    predicted: str = ""
    measured: str = ""
    exists: str = ""
    source: str = ""

    @property
    def is_demo(self) -> bool:
        return self.model == DEMO


def main() -> None:
    args = make_parser().parse_args()
    path = PAPER / f"{args.table}.csv"
    cells = read(path)
    full = [cell for cell in cells if not cell.is_demo]
    if args.commands:
        print("\n".join(shlex.join(["magicdec", *command(cell)]) for cell in unique(full)))
        return
    if args.demo:
        demo = measure(demo_cells(full))
        cells = [*full, *(said(cell, "") for cell in demo)]
    elif not args.predict:
        check_devices(args.table, full)
        cells = [*measure(full), *(cell for cell in cells if cell.is_demo)]
    cells = [cell if cell.is_demo else predict(cell) for cell in cells]
    write(path, cells)
    print_cells(path, cells)


def make_parser() -> argparse.ArgumentParser:
    tables = sorted(path.stem for path in PAPER.glob("magicdec_*.csv"))
    parser = argparse.ArgumentParser(
        description="Compare a published table with predictions and with runs. Without a flag it "
        "runs at full size, on the published number of GPUs."
    )
    parser.add_argument("table", choices=tables, help="name of a file in results/paper/")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--predict", action="store_true", help="only predict; needs no GPU")
    ways.add_argument("--demo", action="store_true",
        help="run the same at the size of the packaged models, on this machine")  # fmt: skip
    ways.add_argument("--commands", action="store_true", help="only print the full-size commands")
    return parser


def check_devices(table: str, cells: list[Cell]) -> None:
    """End with code 2 and one line if this machine has too few GPUs."""
    import torch

    needed = max(int(cell.ranks or 1) for cell in cells)
    found = torch.cuda.device_count()
    if found < needed:
        text = f"{table} needs {needed} CUDA devices, this machine has {found}"
        print(f"{text}; --predict and --demo need none", file=sys.stderr)
        sys.exit(2)


def command(cell: Cell) -> list[str]:
    """The arguments of `magicdec` that measure one cell."""
    draft = (
        cell.draft if cell.draft in ("self", "none") else f"model:{HUB.get(cell.draft, cell.draft)}"
    )
    words = ["run", "--model", HUB.get(cell.model, cell.model), "--draft", draft]
    words += ["--nproc", cell.ranks or "1", "--B", cell.batch_size or "1"]
    words += ["--prefix_len", cell.prefix_len, "--gen_len", str(GEN_LEN)]
    if cell.draft != "none":
        words += ["--budget", cell.budget, "--gamma", cell.gamma or str(DEFAULT_GAMMA)]
    return [*words, "--dataset", "demo" if cell.is_demo else "pg19"]


def unique(cells: Iterable[Cell]) -> list[Cell]:
    """One cell for each command: several quantities come from one run."""
    return list({tuple(command(cell)): cell for cell in cells}.values())


def demo_cells(cells: list[Cell]) -> list[Cell]:
    """The same cells at the size of the packaged models: shorter prefixes and smaller batches, on
    one rank. Cells that become equal are one."""
    found = {}
    for cell in cells:
        prefix = int(cell.prefix_len) // SHRINK_PREFIX
        small = replace(
            cell, model=DEMO, hardware="CPU", ranks="1", budget=str(DEMO_BUDGET),
            draft=cell.draft if cell.draft in ("self", "none") else "demo-draft",
            prefix_len=str(min(MOST_DEMO_PREFIX, max(LEAST_PREFIX, prefix))),
            batch_size=str(max(1, int(cell.batch_size or SHRINK_BATCH) // SHRINK_BATCH)),
            published="", predicted="", measured="", source="demo size",
        )  # fmt: skip
        found[small] = small
    return list(found)


def measure(cells: list[Cell]) -> list[Cell]:
    """Run every cell, each command once, and fill in what it measured."""
    found: dict[tuple[str, ...], RunRecord] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, cell in enumerate(unique(cells)):
            path = Path(folder) / f"{number}.jsonl"
            run_command(1, *command(cell), "--out", path)
            found[tuple(command(cell))] = load_records(path)[-1]
    return [replace(c, measured=value_of(c.quantity, found[tuple(command(c))])) for c in cells]


def value_of(quantity: str, record: RunRecord) -> str:
    names = {
        "speedup": ("speedup", 3),
        "acceptance_rate": ("acceptance_rate", 3),
        "tpot_ms": ("mean_tpot_ms", 2),
        "tokens_per_s": ("decode_tokens_per_s", 1),
    }
    name, digits = names[quantity]
    value = getattr(record.metrics, name, None)
    return "" if value is None else f"{value:.{digits}f}"


def predict(cell: Cell) -> Cell:
    """The cell with the prediction of `magicdec plan` for the published hardware, and with what
    exists of it."""
    why = not_predicted(cell)
    if why:
        return said(replace(cell, predicted=""), why)
    hardware, S, B = HARDWARE[cell.hardware], int(cell.prefix_len), int(cell.batch_size)
    target = Deployment(find_config("--model", cell.model), hardware, 2, int(cell.ranks))
    if cell.draft == "none":
        step = target.seconds(B, 1, S)
        value = 1e3 * step if cell.quantity == "tpot_ms" else B / step
        return said(replace(cell, predicted=f"{value:.2f}"), "")
    rate = published_rates()[cell.model][S]
    way = Speculation(target, target, int(cell.budget), rate)
    value = way.predict_step(B, S, int(cell.gamma)).speedup
    return said(replace(cell, predicted=f"{value:.2f}"), "")


def not_predicted(cell: Cell) -> str:
    """Why there is no prediction; empty if there is one."""
    if cell.quantity == "acceptance_rate":
        return "the plan takes acceptance as given"
    if not cell.ranks:
        return "the number of GPUs is not published"
    if cell.draft == "none":
        return ""
    if cell.draft != "self" or int(cell.prefix_len) not in published_rates().get(cell.model, {}):
        return "no acceptance is published for this pair and prefix"
    return ""


def published_rates() -> dict[str, dict[int, float]]:
    """The published acceptance by model and prefix length, taken as conditional rates, as in the
    formula of the paper."""
    rates: dict[str, dict[int, float]] = {}
    for cell in read(PAPER / "magicdec_acceptance.csv"):
        if cell.published:
            rates.setdefault(cell.model, {})[int(cell.prefix_len)] = float(cell.published)
    return rates


def said(cell: Cell, not_predicted: str) -> Cell:
    """The cell with a column that says which numbers exist, and why the others do not."""
    absent = "the packaged models are not of the paper" if cell.is_demo else ""
    why = {
        "published": absent,
        "predicted": "the plan needs a probe of this machine" if cell.is_demo else not_predicted,
        "measured": f"it needs {cell.ranks or 'CUDA'} {cell.hardware} GPUs",
    }
    there = [name for name in why if getattr(cell, name)]
    missing = [f"not {name}: {reason}" for name, reason in why.items() if not getattr(cell, name)]
    return replace(cell, exists="; ".join([", ".join(there), *missing]))


def read(path: Path) -> list[Cell]:
    with path.open(newline="", encoding="utf-8") as file:
        return [Cell(**row) for row in csv.DictReader(file)]


def write(path: Path, cells: list[Cell]) -> None:
    names = [field.name for field in fields(Cell)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([getattr(cell, name) for name in names] for cell in cells)


def print_cells(path: Path, cells: list[Cell]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    names = ("model", "draft", "hardware", "prefix_len", "batch_size", "gamma", "quantity",
             "published", "predicted", "measured")  # fmt: skip
    for name in names:
        table.add_column(name, overflow="fold")
    for cell in cells:
        table.add_row(*(getattr(cell, name) for name in names))
    Console(width=120).print(table)
    print(f"written to {path}; its column `exists` says what is missing, and why", file=sys.stderr)


if __name__ == "__main__":
    main()
