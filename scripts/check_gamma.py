"""Is `--gamma auto` ever slower than autoregressive decoding? Runs a grid of batch sizes, prefix
lengths and KV budgets, and prints each run's speedup over its own baseline.

    python scripts/check_gamma.py
    python scripts/check_gamma.py --B 4 --prefix_len 4096 --kv_policy verified --fixed 1 2 4

Every run is a process of its own and checks its tokens against its baseline. `--fixed` also runs
each cell with those numbers of draft tokens, to judge what auto chose. Batches with short prefixes
take a fraction of a second, so many batches are needed to tell a few per cent from noise. The
median speedup should be at least 0.97; its standard error is printed beside it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import stdev

from measuring import run_selfspec
from rich.console import Console
from rich.table import Table

BAR = 0.97


@dataclass(frozen=True)
class Cell:
    """The results of one run; `gamma` is the value of its flag."""

    batch_size: int
    prefix_len: int
    budget: int
    gamma: str
    speedup: float
    speedup_per_batch: tuple[float, ...]
    mean_draft_tokens: float
    draft_acceptance_rate: float | None
    decode_tokens_per_s: float
    calibration_ms: float | None
    net_speedup: float


def measure(
    args: argparse.Namespace, B: int, prefix: int, budget: int, gamma: str, path: Path
) -> Cell:
    record = run_selfspec(
        path, args.ranks,
        "--model", args.model, "--dataset", args.dataset, "--kv_policy", args.kv_policy, "--B", B,
        "--prefix_len", prefix, "--streamingllm_budget", budget, "--gamma", gamma, "--gen_len",
        args.gen_len, "--num_batches", args.num_batches, "--dtype", args.dtype, "--ignore_eos",
    )  # fmt: skip
    m = record.metrics
    assert m is not None, "a run that ended well passed its check"
    assert m.speedup is not None and m.speedup_per_batch is not None
    assert m.net_speedup is not None, "known where the speedup is"
    assert m.mean_draft_tokens is not None and m.decode_tokens_per_s is not None
    return Cell(
        B,
        prefix,
        budget,
        gamma,
        m.speedup,
        tuple(m.speedup_per_batch),
        m.mean_draft_tokens,
        m.draft_acceptance_rate,
        m.decode_tokens_per_s,
        m.calibration_ms,
        m.net_speedup,
    )


def print_cells(cells: list[Cell]) -> None:
    table = Table(
        title="compared with autoregressive decoding in the same run", title_justify="left"
    )
    for label in ("B", "prefix", "budget", "gamma", "drafted", "acceptance", "tokens/s"):
        table.add_column(label, justify="right", no_wrap=True)
    table.add_column("speedup", justify="right", no_wrap=True)
    table.add_column("net", justify="right", no_wrap=True)
    table.add_column("calibration, ms", justify="right", no_wrap=True)
    for c in cells:
        rate = "" if c.draft_acceptance_rate is None else f"{c.draft_acceptance_rate:.2f}"
        error = 1.2533 * stdev(c.speedup_per_batch) / len(c.speedup_per_batch) ** 0.5
        took = "" if c.calibration_ms is None else f"{c.calibration_ms:.0f}"
        table.add_row(
            *map(str, (c.batch_size, c.prefix_len, c.budget, c.gamma)),
            f"{c.mean_draft_tokens:.2f}",
            rate,
            f"{c.decode_tokens_per_s:.1f}",
            f"{c.speedup:.3f}x ± {error:.3f}",
            f"{c.net_speedup:.3f}x",
            took,
        )
    Console(width=140).print(table)
    auto = [c for c in cells if c.gamma == "auto"]
    below = [c for c in auto if c.speedup < BAR]
    worst = min(auto, key=lambda c: c.speedup)
    print(f"auto: {len(auto) - len(below)} of {len(auto)} cells at {BAR}x or more", end="; ")
    print(f"worst {worst.speedup:.3f}x at B {worst.batch_size}, prefix {worst.prefix_len}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dataset", default="demo")
    parser.add_argument("--kv_policy", default="streaming_llm")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--B", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--prefix_len", nargs="+", type=int, default=[512, 4096, 16384])
    parser.add_argument("--budget", nargs="+", type=int, default=[65, 257])
    parser.add_argument("--fixed", nargs="*", default=[], help="gammas to run besides auto")
    parser.add_argument("--gen_len", type=int, default=128)
    parser.add_argument("--num_batches", type=int, default=5, help="at least 2")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    cells = []
    with tempfile.TemporaryDirectory() as name:
        for prefix in args.prefix_len:
            for B in args.B:
                for budget in args.budget:
                    for gamma in ("auto", *args.fixed):
                        path = Path(name) / "runs.jsonl"
                        cells.append(measure(args, B, prefix, budget, gamma, path))
                        print(f"{cells[-1].speedup:.3f}x", end=" ", flush=True)
    print_cells(cells)
    if args.json:
        args.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=1) + "\n")


if __name__ == "__main__":
    main()
