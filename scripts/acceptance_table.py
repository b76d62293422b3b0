"""What each draft of a run is worth: acceptance by KV policy and budget, all from one prefill.

    python scripts/acceptance_table.py --dataset books.jsonl --prefix_len 16384
    python scripts/acceptance_table.py --dataset recall --budget 129 257 513 --json table.json

Self-speculation under every policy that takes a budget, and prompt lookup, on the same prompts; the
tokens of each are compared with the baseline's. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from magicdec.bench.metrics import PassSamples, acceptance
from magicdec.bench.prepare import prepare
from magicdec.bench.progress import make_progress
from magicdec.bench.run import BASELINE, Run
from magicdec.config import RunConfig
from magicdec.decoding.strategy import Setup, make_strategy
from magicdec.distributed.groups import Launch, make_groups
from magicdec.request import Request
from magicdec.sections import DecodingSection, KVSection, ModelSection, WorkloadSection

NGRAM = "prompt lookup"


@dataclass
class Way:
    """One way of drafting, and what became of its drafts over all batches."""

    name: str
    budget: int | None
    drafter: str
    kv: KVSection
    samples: PassSamples
    num_different: int = 0  # sequences that are not the baseline's

    def as_json(self) -> dict[str, object]:
        found = acceptance(self.samples.num_accepted, self.samples.num_drafted)
        return {"name": self.name, "budget": self.budget, "different": self.num_different, **found}


def make_ways(budgets: list[int]) -> list[Way]:
    sections = {
        "streaming_llm": KVSection("streaming_llm"),
        "snapkv": KVSection("snapkv"),
        "snapkv, anew every 32": KVSection("snapkv", reselect_every=32),
        "verified": KVSection("verified"),
    }
    ways = [
        Way(name, budget, "self", replace(kv, budget=budget).resolve(), PassSamples())
        for name, kv in sections.items()
        for budget in budgets
    ]
    return [*ways, Way(NGRAM, None, "ngram", KVSection(), PassSamples())]


def decode(run: Run, snapshots: list[Request], name: str, way: Way) -> list[Request]:
    run.engine.rewind(snapshots)
    decoding = replace(run.config.decoding, drafter=way.drafter)
    strategy = make_strategy(name, Setup(run.runner, decoding, way.kv))
    run.engine.begin(strategy)
    return run.engine.decode(strategy, way.samples.observe)


def measure(run: Run, ways: list[Way]) -> None:
    for batch in range(run.config.workload.num_batches):
        requests = run.make_requests(batch)
        with run.progress.task(f"prefill {batch + 1}", sum(len(r.prompt_ids) for r in requests)):
            snapshots = run.engine.prefill(requests)
        baseline = Way(BASELINE, None, "self", KVSection(), PassSamples())
        baseline.samples.begin_batch()
        expected = [list(r.output_ids) for r in decode(run, snapshots, BASELINE, baseline)]
        for way in ways:
            way.samples.begin_batch()
            found = [list(r.output_ids) for r in decode(run, snapshots, "speculative", way)]
            way.num_different += sum(a != b for a, b in zip(expected, found, strict=True))


def print_ways(ways: list[Way], budgets: list[int], title: str) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("acceptance rate (length)")
    for budget in budgets:
        table.add_column(f"budget {budget}", justify="right")
    rows: dict[str, list[str]] = {}
    for way in ways:
        found = way.as_json()
        rows.setdefault(way.name, []).append(
            f"{found['acceptance_rate']:.3f} ({found['acceptance_length']:.2f})"
        )
    for name, cells in rows.items():
        table.add_row(name, *cells)
    Console(width=140).print(table)
    different = [f"{way.name} {way.budget}: {way.num_different}" for way in ways]
    print("sequences unlike the baseline:", sum(way.num_different for way in ways), end="\n")
    if any(way.num_different for way in ways):
        print("; ".join(different))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--dataset", default="demo")
    parser.add_argument("--prefix_len", type=int, default=16384)
    parser.add_argument("--B", type=int, default=4)
    parser.add_argument("--num_batches", type=int, default=2)
    parser.add_argument("--gen_len", type=int, default=64)
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--budget", nargs="+", type=int, default=[65, 129, 257, 513, 1025])
    parser.add_argument("--json", type=Path, help="write the table here")
    args = parser.parse_args()
    config = RunConfig(
        model=ModelSection(args.model, args.dtype),
        decoding=DecodingSection("speculative", "self", args.gamma, ignore_eos=True),
        workload=WorkloadSection(
            args.dataset, args.B, args.prefix_len, args.gen_len, num_batches=args.num_batches
        ),
    )
    launch = Launch(0, 1, 0, 1)
    prepared = prepare(config, launch)
    torch.set_num_threads(prepared.config.parallel.threads or 1)
    groups = make_groups(launch, (0,), torch.device("cpu"), None)
    run, ways = Run(prepared, groups, make_progress(True)), make_ways(args.budget)
    measure(run, ways)
    title = (
        f"{args.model}, {Path(args.dataset).name}, prefix {args.prefix_len}, gamma {args.gamma}, "
        f"{args.B * args.num_batches} sequences of {args.gen_len} tokens"
    )
    print_ways(ways, args.budget, title)
    if args.json:
        args.json.write_text(json.dumps([way.as_json() for way in ways], indent=1) + "\n")


if __name__ == "__main__":
    main()
