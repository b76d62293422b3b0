#!/usr/bin/env python3
"""The picture of acceptance by context: what a step of a run emits, of drafts of small models over
texts of several kinds, and how far wrong one acceptance for all contexts would be. The second is
predicted: the acceptance of these models in the cost shape of Llama-3.1-8B on an H200.

    python scripts/dev/acceptance_picture.py results/acceptance/*.jsonl --plot picture.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from magicdec.bench.acceptance.record import AcceptanceRecord
from magicdec.bench.acceptance.selection import by_context, lengths_of
from magicdec.cli import plan
from magicdec.cli.plan import PlanSection
from magicdec.names import DEFAULT_KV_POLICY
from magicdec.output.figures import GREY, check_picture, look, saved_figure
from magicdec.predict.lengths import AcceptanceLengths
from magicdec.records.reading import read_records

GAMMA = 4  # draft tokens of a step, in the left panels
BATCH = 64  # requests, in the right ones
CONTROL = "self full"  # which the target accepts always
APART = 0.06  # of neighbouring drafts, as a power of 2
# Of an H200: published bandwidth (GB/s) and bfloat16 TFLOP/s. The acceptance is replaced.
MACHINE = "--model llama-3.1-8b --bandwidth 4800 --flops 989 --conditional_acceptance 0.8"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--plot", type=Path, required=True)
    args = parser.parse_args()
    check_picture("--plot", args.plot)
    models = [list(read_records(path, AcceptanceRecord)) for path in args.records]
    size = (10.0, 4.6 * len(models))
    with saved_figure("--plot", args.plot, size, rows=len(models), columns=2) as (_, axes):
        for place, records in enumerate(models):
            tokens, wrong = axes[2 * place : 2 * place + 2]
            draw_tokens(tokens, records)
            draw_wrong(wrong, records)


def by_draft(records: Sequence[AcceptanceRecord]) -> dict[str, dict[int, AcceptanceRecord]]:
    drafts = dict.fromkeys(record.draft for record in records)
    return {
        draft: by_context([record for record in records if record.draft == draft])
        for draft in drafts
    }


def marks(number: int) -> dict[str, Any]:
    style = look(number)
    return {
        "color": style.colour,
        "marker": style.marker,
        "linestyle": style.line,
        "markerfacecolor": style.colour if style.is_filled else "none",
        "markersize": 4,
    }


def draw_tokens(ax: Any, records: Sequence[AcceptanceRecord]) -> None:
    drafts = {draft: found for draft, found in by_draft(records).items() if draft != CONTROL}
    for number, (draft, contexts) in enumerate(drafts.items()):
        shift = 2 ** (APART * (number - (len(drafts) - 1) / 2))  # so that intervals stay apart
        rows = {c: record.rows[min(GAMMA, record.gamma) - 1] for c, record in contexts.items()}
        known = {c: row for c, row in rows.items() if row.tokens_per_step is not None}
        if not known:  # drafts whose number decides what they are
            rows = {c: record.rows[-1] for c, record in contexts.items()}
            known = rows
            draft = f"{draft} ({next(iter(contexts.values())).gamma} tokens)"
        values = [row.tokens_per_step or 0.0 for row in known.values()]
        intervals = [row.tokens_per_step_interval for row in known.values()]
        ends = [own or [value] * 2 for own, value in zip(intervals, values, strict=True)]
        below = [max(0.0, value - low) for value, (low, _) in zip(values, ends, strict=True)]
        above = [max(0.0, high - value) for value, (_, high) in zip(values, ends, strict=True)]
        at = [context * shift for context in known]
        ax.errorbar(at, values, yerr=[below, above], capsize=2, label=draft, **marks(number))
    places = sorted({record.context for record in records})
    workload = records[0].workload
    ax.set_xscale("log", base=2)
    ax.set_xticks(places, [f"{context:,}" for context in places])
    ax.set_xlabel("context (tokens)")
    ax.set_ylabel(f"tokens a step, {GAMMA} drafts")
    title = (
        f"{workload.model}, {workload.num_prompts} texts of {num_kinds(records)} kinds: measured"
    )
    ax.set_title(title, fontsize=9)
    ax.legend(fontsize=6, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14))


def num_kinds(records: Sequence[AcceptanceRecord]) -> int:
    return len({*(records[0].workload.categories or ())})


def draw_wrong(ax: Any, records: Sequence[AcceptanceRecord]) -> None:
    """The predicted speedup with each context's own acceptance, and with that of the shortest
    context held at all, of drafts that read a part of the cache."""
    contexts = sorted({record.context for record in records})
    for number, (draft, found) in enumerate(by_draft(records).items()):
        config = next(iter(found.values())).config
        kv = config["kv"] or {}
        is_planned = config["decoding"]["drafter"] == "self" and kv.get("budget", 0) > 0
        is_planned &= config["decoding"]["draft_weights"] is None
        if not is_planned or kv["policy"] != DEFAULT_KV_POLICY:
            continue
        curve = AcceptanceLengths({c: lengths_of(record) for c, record in found.items()})
        places = [context for context in contexts if context > kv["budget"]]
        words = [*MACHINE.split(), "--budget", str(kv["budget"])]
        asked = plan.make_plan(plan.main.build_parser().read(words)[PlanSection])
        planned = replace(asked, curves={kv["budget"]: curve})
        own = [planned.predict(BATCH, context).speedup for context in places]
        flat = [planned.flat_speedup(BATCH, context) for context in places]
        ax.plot(places, own, label=draft, **marks(number))
        dashed = marks(number) | {"linestyle": ":", "markerfacecolor": "none"}
        ax.plot(places, flat, label="the same, by the shortest context", **dashed)
    ax.axhline(1, color=GREY, linewidth=0.8)
    ax.set_xscale("log", base=2)
    ax.set_xticks(contexts, [f"{context:,}" for context in contexts])
    ax.set_xlabel("context (tokens)")
    ax.set_ylabel(f"speedup of steps, batch {BATCH}")
    ax.set_title("predicted, Llama-3.1-8B's costs on an H200", fontsize=9)
    ax.legend(fontsize=6)


if __name__ == "__main__":
    main()
