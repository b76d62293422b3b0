"""Compare predicted with measured times: runs self-speculation over a small grid, predicts each
cell from a probe of the same machine, and prints the error of the prediction.

    python scripts/check_plan.py
    python scripts/check_plan.py --B 1 4 8 --prefix_len 4096 16384 --ranks 2 --json check.json

Every run is a process of its own and checks its tokens against its baseline. The prediction uses
the run's own acceptance per position, so only the times are judged. The machine is probed before
and after the runs, and the better probe is used, because other load on the host only lowers the
rates.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from peers.measuring import run_command, run_selfspec
from rich.console import Console
from rich.table import Table

from magicdec.hardware.ceiling_file import MachineFile, load_machine
from magicdec.hardware.costs import DTYPE_BYTES, Deployment
from magicdec.model.presets.presets import find_config
from magicdec.predict.speculation import SpeculationCost
from magicdec.records.record import RunRecord

COLUMNS = ("decode_ms", "draft_ms", "verify_ms", "speedup")


@dataclass(frozen=True)
class Cell:
    """The measured and the predicted values of one run, by the names in COLUMNS."""

    batch_size: int
    prefix_len: int
    gamma: int
    acceptance_per_position: tuple[float, ...]
    measured: dict[str, float]
    predicted: dict[str, float]


def probe(args: argparse.Namespace, path: Path) -> MachineFile:
    threads = [] if args.threads is None else ["--threads", args.threads]
    run_command(args.ranks, "probe", "--out", path, *threads)
    return load_machine(path)


def run(args: argparse.Namespace, batch_size: int, prefix_len: int, path: Path) -> RunRecord:
    """Run one cell and return its record."""
    threads = [] if args.threads is None else ["--threads", args.threads]
    return run_selfspec(
        path, args.ranks, "--model", args.model, "--B", batch_size, "--gamma", args.gamma,
        "--prefix_len", prefix_len, "--gen_len", args.gen_len, "--num_batches", args.num_batches,
        "--streamingllm_budget", args.budget, "--dtype", args.dtype, "--ignore_eos", "--benchmark",
        *threads,
    )  # fmt: skip


def better(one: MachineFile, other: MachineFile) -> MachineFile:
    """The probe with the higher read bandwidth, which was less disturbed by other load."""
    return max(one, other, key=lambda machine: machine.read_bytes_per_s)


def compare(record: RunRecord, machine: MachineFile) -> Cell:
    config, metrics, baseline = record.config, record.metrics, record.baseline_metrics
    assert metrics is not None and baseline is not None, "a run that ended well passed its check"
    curve = tuple(metrics.acceptance_per_position or ())  # gamma shares
    w, dtype, gamma = config["workload"], config["model"]["dtype"], len(curve)
    model = find_config("--model", config["model"]["model"])
    ranks = record.environment.world_size
    target = Deployment(model, machine.hardware(dtype), DTYPE_BYTES[dtype], ranks)
    # The context grows during decoding; the prediction is for its mean length.
    context = w["prefix_len"] + w["gen_len"] // 2
    way = SpeculationCost(target, target, config["kv"]["budget"], curve)
    p = way.predict(w["batch_size"], context, gamma)
    assert p.draft_s is not None and p.verify_s is not None, "gamma is at least 1"
    seconds = {"decode_ms": p.decode_s, "draft_ms": p.draft_s, "verify_ms": p.verify_s}
    predicted = {name: 1e3 * s for name, s in seconds.items()} | {"speedup": p.speedup}
    measured = {name: getattr(metrics, name) for name in COLUMNS[1:]}
    measured["decode_ms"] = baseline.decode_ms
    return Cell(w["batch_size"], w["prefix_len"], gamma, curve, measured, predicted)


def mean_error(cells: list[Cell], column: str) -> float:
    """Mean absolute percentage error of the prediction."""
    errors = [abs(c.predicted[column] / c.measured[column] - 1) for c in cells]
    return 100 * fmean(errors)


def print_cells(cells: list[Cell]) -> None:
    table = Table(title="measured / predicted", title_justify="left")
    for label in ("B", "prefix", "gamma", *COLUMNS):
        table.add_column(label, justify="right", no_wrap=True)
    for c in cells:
        pairs = (f"{c.measured[n]:.2f} / {c.predicted[n]:.2f}" for n in COLUMNS)
        table.add_row(str(c.batch_size), str(c.prefix_len), str(c.gamma), *pairs)
    table.add_section()
    errors = (f"{mean_error(cells, n):.1f} %" for n in COLUMNS)
    table.add_row("", "", "error", *errors)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--B", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--prefix_len", nargs="+", type=int, default=[2048, 8192, 16384])
    parser.add_argument("--budget", type=int, default=257)
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--gen_len", type=int, default=64)
    parser.add_argument("--num_batches", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--threads", type=int, help="per rank [cores / ranks]")
    parser.add_argument("--json", type=Path, help="write all values to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        before = probe(args, directory / "machine.json")
        records = [
            run(args, B, S, directory / "runs.jsonl") for B in args.B for S in args.prefix_len
        ]
        machine = better(before, probe(args, directory / "machine.json"))
    cells = [compare(record, machine) for record in records]
    print_cells(cells)
    if args.json:
        found = {"machine": asdict(machine), "cells": [asdict(cell) for cell in cells]}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
