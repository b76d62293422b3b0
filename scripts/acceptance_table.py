"""Acceptance by KV policy and budget, all measured from one prefill.

    python scripts/acceptance_table.py --dataset books.jsonl --prefix_len 16384
    python scripts/acceptance_table.py --dataset recall --budget 129 257 513 --json table.json

Runs self-speculation with every KV policy that has a budget, and prompt lookup, on the same
prompts. The tokens of each are compared with the baseline's. Nothing is timed. Each rate, accepted
tokens over draft tokens of all sequences together, is followed by its difference from the same rate
of streaming_llm with the same budget, and the standard error of this difference over the sequences,
which are paired. The last table shows the share of the target's attention weights within
each budget: for the last tokens of the prompts, by block, mean over layers, heads and sequences.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from magicdec.bench.run.resident import make_requests
from magicdec.bench.run.run import Run
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import DecodingSection, KVSection, ModelSection, WorkloadSection
from magicdec.distributed.groups import Launch
from magicdec.kv.view import WEIGHTS_BLOCK
from magicdec.names import BASELINE
from magicdec.output.console import make_progress
from magicdec.records.acceptance import Verifications, acceptance_of
from magicdec.records.intervals import jackknife_error
from magicdec.records.samples import PassSamples
from magicdec.runner.request import Request, StepOutput
from magicdec.setup.prepare import prepare
from magicdec.setup.session import RankSession
from magicdec.speculation.steps.build import build_decoder

NGRAM, REFERENCE = "prompt lookup", "streaming_llm"


@dataclass
class Way:
    """One drafter with one KV policy, and its acceptance over all batches."""

    name: str
    budget: int | None
    drafter: str
    kv: KVSection
    samples: PassSamples
    num_different: int = 0  # sequences that differ from the baseline's
    judged: Verifications = field(default_factory=Verifications)

    def counts(self) -> list[tuple[int, int]]:
        """(accepted, drafted) tokens of each sequence with drafts."""
        return [
            (sum(each.accepted for each in steps), sum(each.drafted for each in steps))
            for _, steps in sorted(self.judged.by_request.items())
        ]

    def rates(self) -> list[float]:
        """Acceptance rate of each sequence with drafts."""
        return [accepted / n if n else 0.0 for accepted, n in self.counts()]

    def as_json(self) -> dict[str, object]:
        names = ("draft_acceptance_rate", "mean_acceptance_length", "acceptance_per_position")
        metrics = acceptance_of(self.samples)
        return {
            "name": self.name,
            "budget": self.budget,
            "different": self.num_different,
            "rates": self.rates(),
            **{key: metrics.get(key) for key in names},
        }


def make_ways(budgets: list[int]) -> list[Way]:
    sections = {
        "streaming_llm": KVSection("streaming_llm"),
        "snapkv": KVSection("snapkv"),
        "snapkv, anew every 32": KVSection("snapkv", reselect_every=32),
        "verified": KVSection("verified"),
    }
    ways = [
        Way(name, budget, "self", replace(kv, budget=budget).resolve(), PassSamples.empty())
        for name, kv in sections.items()
        for budget in budgets
    ]
    return [*ways, Way(NGRAM, None, "ngram", KVSection(), PassSamples.empty())]


def decode(run: Run, snapshots: list[Request], name: str, way: Way) -> list[Request]:
    run.engine.rewind(snapshots)
    decoding = replace(run.config.decoding, drafter=way.drafter)
    strategy = build_decoder(run.runner, decoding, way.kv, name=name)
    run.engine.begin(strategy)
    started = time.perf_counter()

    def observe(request_ids: Sequence[int], output: StepOutput, seconds: float) -> None:
        way.samples.observe(output, seconds)
        way.judged.observe(request_ids, output)

    requests = run.engine.decode(strategy, observe)
    way.samples.end_batch(requests, started)
    return requests


def measure(run: Run, ways: list[Way], budgets: list[int]) -> list[list[list[float]]]:
    """Fill in the counts of `ways`, and return `attention_seen` of each batch."""
    seen = []
    for batch in range(run.config.workload.num_batches):
        requests = make_requests(run.prepared, batch)
        with run.progress.task(f"prefill {batch + 1}", sum(len(r.prompt_ids) for r in requests)):
            snapshots = run.engine.prefill(requests)
        seen.append(attention_seen(run, snapshots, budgets))
        baseline = Way(BASELINE, None, "self", KVSection(), PassSamples.empty())
        baseline.samples.begin_batch()
        expected = [list(r.output_ids) for r in decode(run, snapshots, BASELINE, baseline)]
        for way in ways:
            way.samples.begin_batch()
            found = [list(r.output_ids) for r in decode(run, snapshots, "speculative", way)]
            way.num_different += sum(a != b for a, b in zip(expected, found, strict=True))
    return seen


def attention_seen(run: Run, snapshots: list[Request], budgets: list[int]) -> list[list[float]]:
    """For each budget, two shares of the attention weights of a verification of 5 tokens: within
    the sinks and the newest tokens, and within the top-k blocks of each head."""
    runner, masses = run.runner, []
    run.engine.rewind(snapshots)
    rows = [r.row for r in snapshots if r.row is not None]
    tokens = [list(r.prompt_ids[-5:]) for r in snapshots]
    lengths = [len(r.prompt_ids) - 5 for r in snapshots]
    runner.truncate(rows, lengths)
    runner.forward(torch.tensor(tokens), rows, watch=lambda layer, mass: masses.append(mass))
    runner.truncate(rows, [length + 5 for length in lengths])
    mass = torch.stack(masses).double()  # [L, B, G, blocks]
    mass = mass / mass.sum(dim=3, keepdim=True)
    sinks, blocks = 1, mass.shape[3]
    seen = []
    for budget in budgets:
        kept = budget // WEIGHTS_BLOCK  # blocks
        newest = mass[..., :sinks].sum(3) + mass[..., blocks - (kept - sinks) :].sum(3)
        heaviest = mass.topk(min(kept, blocks), dim=3).values.sum(3)
        seen.append([float(newest.mean()), float(heaviest.mean())])
    return seen


def print_seen(shares: list[list[list[float]]], budgets: list[int]) -> None:
    table = Table(title="share of the target's attention", title_justify="left")
    table.add_column("within the budget")
    for budget in budgets:
        table.add_column(f"{budget}", justify="right")
    for index, name in enumerate(("sinks and the newest tokens", "top-k blocks, in hindsight")):
        means = [statistics.fmean(batch[b][index] for batch in shares) for b in range(len(budgets))]
        table.add_row(name, *(f"{mean:.3f}" for mean in means))
    Console(width=140).print(table)


def difference(way: Way, reference: Way) -> str:
    """The difference of the two rates, and its standard error over the sequences."""
    found, error = paired_difference(way.counts(), reference.counts())
    return f"{found:+.3f}±{error:.3f}"


def paired_difference(
    ours: list[tuple[int, int]], others: list[tuple[int, int]]
) -> tuple[float, float]:
    """The difference of two acceptance rates, each accepted / drafted over all sequences together,
    and its standard error by the jackknife: the difference is computed again without each sequence.
    `ours` and `others` are (accepted, drafted) of the same sequences. The error of one sequence is
    0."""
    size = len(ours)
    found = _rate(ours) - _rate(others)
    if size < 2:
        return found, 0.0
    without = [
        _rate(ours[:i] + ours[i + 1 :]) - _rate(others[:i] + others[i + 1 :]) for i in range(size)
    ]
    return found, jackknife_error(np.array([found, *without]))


def _rate(counts: list[tuple[int, int]]) -> float:
    accepted, drafted = (sum(column) for column in zip(*counts, strict=True))
    return accepted / drafted if drafted else 0.0


def print_ways(ways: list[Way], budgets: list[int], title: str) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("acceptance rate (length)")
    for budget in budgets:
        table.add_column(f"budget {budget}", justify="right")
    rows: dict[str, list[str]] = {}
    references = {way.budget: way for way in ways if way.name == REFERENCE}
    for way in ways:
        found = way.as_json()
        cell = f"{found['draft_acceptance_rate']:.3f} ({found['mean_acceptance_length']:.2f})"
        reference = references.get(way.budget)
        if reference not in (None, way):
            assert reference is not None
            cell += f" {difference(way, reference)}"
        rows.setdefault(way.name, []).append(cell)
    for name, cells in rows.items():
        table.add_row(name, *cells)
    Console(width=160).print(table)
    different = [f"{way.name} {way.budget}: {way.num_different}" for way in ways]
    print("sequences that differ from the baseline:", sum(way.num_different for way in ways))
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
    parser.add_argument("--json", type=Path, help="write the tables to this file")
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
    ways = make_ways(args.budget)
    with RankSession(launch, prepared.config.parallel) as session:
        run = Run(prepared, session, make_progress(True))
        seen = measure(run, ways, args.budget)
    title = (
        f"{args.model}, {Path(args.dataset).name}, prefix {args.prefix_len}, gamma {args.gamma}, "
        f"{args.B * args.num_batches} sequences of {args.gen_len} tokens"
    )
    print_ways(ways, args.budget, title)
    print_seen(seen, args.budget)
    if args.json:
        found = {"ways": [way.as_json() for way in ways], "attention_seen": seen}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
