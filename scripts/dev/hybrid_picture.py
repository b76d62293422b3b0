#!/usr/bin/env python3
"""The picture of a model with linear attention beside a dense one: what a step of a run emits, by
context, from how many tokens a step pays on the machine that timed it, and what that acceptance
would be worth in the costs of Qwen3.5-27B on an H200 (predicted), beside what the page of models
takes for all contexts and models.

    python scripts/dev/hybrid_picture.py --dense results/acceptance/demo.jsonl.gz \\
        --hybrid results/hybrids/demo_hybrid.jsonl.gz --latency results/hybrids/latency.jsonl.gz \\
        --plot results/hybrids/by_context.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from acceptance_picture import by_draft, draw_tokens, marks

from magicdec.bench.acceptance.record import AcceptanceRecord
from magicdec.bench.acceptance.selection import lengths_of
from magicdec.bench.latency.record import LatencyRecord, break_even, by_place
from magicdec.cli import plan
from magicdec.cli.plan import PlanSection
from magicdec.names import DEFAULT_KV_POLICY
from magicdec.output.figures import GREY, check_picture, saved_figure
from magicdec.predict.lengths import AcceptanceLengths
from magicdec.records.reading import read_records

GAMMA = 4
BUDGET = 257  # of the drafts whose break-even and worth are drawn
BATCH = 8  # requests, in the predicted panel
LARGE = "qwen3.5-27b"
# Of an H200: published bandwidth (GB/s) and bfloat16 TFLOP/s.
MACHINE = f"--model {LARGE} --bandwidth 4800 --flops 989 --budget {BUDGET}"
TAKEN = 0.8  # conditional acceptance on the page of models
CONTEXTS = [2**power for power in range(12, 19)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for flag in ("--dense", "--hybrid", "--latency"):
        parser.add_argument(flag, type=Path, required=True)
    parser.add_argument("--plot", type=Path, required=True)
    args = parser.parse_args(arguments)
    check_picture("--plot", args.plot)
    dense, hybrid = (
        list(read_records(path, AcceptanceRecord)) for path in (args.dense, args.hybrid)
    )
    times = {
        record.config["model"]["model"]: record
        for record in read_records(args.latency, LatencyRecord)
    }
    with saved_figure("--plot", args.plot, (14.0, 4.6), columns=3) as (_, axes):
        for ax, records in zip(axes, (dense, hybrid), strict=False):
            draw_tokens(ax, records)
            draw_break_even(ax, times[records[0].workload.model])
            ax.set_ylim(1, GAMMA + 2)
            ax.legend(fontsize=6, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14))
        draw_worth(axes[2], dense, hybrid)


def draw_break_even(ax: Any, record: LatencyRecord) -> None:
    """From how many tokens a step self-drafts pay, on the machine that was timed."""
    points = {
        rows[0].context: break_even(rows)[DEFAULT_KV_POLICY, BUDGET, None][GAMMA]
        for rows in by_place(record.rows)
    }
    ax.plot(
        [*points],
        [*points.values()],
        color=GREY,
        linestyle=":",
        label=f"self {DEFAULT_KV_POLICY} {BUDGET} pays from (timed)",
    )


def draw_worth(
    ax: Any, dense: Sequence[AcceptanceRecord], hybrid: Sequence[AcceptanceRecord]
) -> None:
    words = [*MACHINE.split(), "--conditional_acceptance", str(TAKEN)]
    asked = plan.make_plan(plan.main.build_parser().read(words)[PlanSection])
    speedups = {
        f"acceptance {TAKEN} at all contexts": [asked.predict(BATCH, c).speedup for c in CONTEXTS]
    }
    for records in (dense, hybrid):
        found = by_draft(records)[f"self {DEFAULT_KV_POLICY} {BUDGET}"]
        curve = AcceptanceLengths({c: lengths_of(record) for c, record in found.items()})
        own = replace(asked, curves={BUDGET: curve})
        speedups[f"as measured of {records[0].workload.model}"] = [
            own.predict(BATCH, c).speedup for c in CONTEXTS
        ]
    for number, (label, values) in enumerate(speedups.items()):
        ax.plot(CONTEXTS, values, label=label, **marks(number))
    ax.axhline(1, color=GREY, linewidth=0.8)
    ax.set_xscale("log", base=2)
    ax.set_xticks(CONTEXTS, [f"{context // 1024}k" for context in CONTEXTS])
    ax.set_xlabel("context (tokens)")
    ax.set_ylabel(f"speedup of steps, batch {BATCH}")
    ax.set_title(f"predicted, {LARGE}'s costs on an H200, budget {BUDGET}", fontsize=9)
    ax.legend(fontsize=6)


if __name__ == "__main__":
    main()
