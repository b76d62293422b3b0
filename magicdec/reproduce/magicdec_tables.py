"""The published tables of MagicDec that are reproduced. For each line: the command that measures
it, the same line at the size of the packaged models, and what the cost model predicts for it.

A line is a `Row`: its texts by column, empty where nothing is published. A new table is a line in
`TABLES` and a file in `results/paper/`. Source: MagicDec's project page.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

from magicdec.model.presets.presets import PRESETS, find_config

Row = dict[str, str]
# `draft` is `self`, `none` or a model; `budget` is the KV budget of the draft.
COLUMNS = (
    *("model", "draft", "hardware", "ranks", "budget", "prefix_len", "batch_size", "gamma"),
    "quantity",
)
# The metric of the last pass of a run that a quantity is, and the digits that it is written with.
QUANTITIES = {
    "speedup": ("speedup", 3),
    "acceptance_rate": ("acceptance_rate", 3),
    "tpot_ms": ("mean_tpot_ms", 2),
    "tokens_per_s": ("decode_tokens_per_s", 1),
}
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
DEMO, DEMO_DRAFT = "demo", "demo-draft"  # the packaged models
OWN_CACHE = ("self", "none")  # the drafts that are no model
# Published peak rates of one GPU in bfloat16 (bytes/s, operations/s), and assumed links (bytes/s).
GPUS = {"A100": (2039e9, 312e12, 300e9), "H100": (3352e9, 989e12, 450e9)}
LATENCY_S, OVERHEAD_S = 15e-6, 160e-6 / 32  # of a link and of one of 32 layers; as in docs/plan.md


def file_of(folder: Path, table: str) -> Path:
    """The file of a table in the folder, or the packaged one where the folder has none."""
    path = folder / f"{table}.csv"
    return path if path.exists() else PACKAGED / path.name


class Missing(Exception):
    """A number does not exist. The message says why."""


def at_demo_size(row: Row) -> Row:
    """The setting of the line for the packaged models on one rank without a GPU: shorter prefixes
    and smaller batches."""
    return {name: row[name] for name in COLUMNS} | {
        "model": DEMO,
        "draft": row["draft"] if row["draft"] in OWN_CACHE else DEMO_DRAFT,
        "hardware": "CPU",
        "ranks": "1",
        "budget": "129",
        "prefix_len": str(min(4096, max(512, int(row["prefix_len"]) // 16))),
        "batch_size": str(max(1, int(row["batch_size"] or 32) // 32)),
    }


def command_of(row: Row) -> str:
    """The words after `magicdec`, without `--out`, with enough batches for intervals."""
    draft, is_demo = row["draft"], row["model"] == DEMO
    drafter = draft if draft in OWN_CACHE else f"model:{hub_name(draft)}"
    drafting = f"--budget {row['budget']} --gamma {row['gamma'] or 4} " * (draft != "none")
    return (
        f"run --model {hub_name(row['model'])} --draft {drafter} --nproc {row['ranks'] or 1} "
        f"--B {row['batch_size'] or 1} --prefix_len {row['prefix_len']} --gen_len 64 "
        f"--num_batches 4 {drafting}--dataset {'demo' if is_demo else 'pg19'}"
    )


def hub_name(model: str) -> str:
    """What a published model is called on the hub; others keep their names."""
    return PRESETS[model].repo_id if model in PRESETS else model


def read_measured(row: Row, records: Path) -> tuple[str, str]:
    """The number of a line in the file that its command wrote, and its 95 % interval, empty if it
    has none. Raises Missing if the records do not have the number."""
    from magicdec.records.performance import SUFFIX as INTERVAL

    name, digits = QUANTITIES[row["quantity"]]
    metrics = json.loads(records.read_text(encoding="utf-8").splitlines()[-1])["metrics"]
    if metrics is None:
        raise Missing("the tokens of its run were wrong")
    if metrics[name] is None:
        raise Missing(f"the run has no {name}")
    ends = metrics.get(f"{name}{INTERVAL}") or ()
    return f"{metrics[name]:.{digits}f}", " to ".join(f"{end:.{digits}f}" for end in ends)


def predict(row: Row, folder: Path) -> str:
    """The prediction of `magicdec plan`, with the tables in `folder`. The published acceptance is
    taken as a conditional rate, as in the formula of the paper. Raises Missing if there is none."""
    from magicdec.cost_model.costs import Deployment
    from magicdec.cost_model.speculation import Speculation
    from magicdec.hardware.ceiling_file import Hardware, Link

    with file_of(folder, "magicdec_acceptance").open(newline="", encoding="utf-8") as file:
        place = {"model": row["model"], "prefix_len": row["prefix_len"]}.items()
        rates = [
            r["published"] for r in csv.DictReader(file) if r["published"] and place <= r.items()
        ]
    if row["quantity"] == "acceptance_rate":
        raise Missing("the plan takes acceptance as given")
    if not row["ranks"]:
        raise Missing("the number of GPUs is not published")
    if row["draft"] != "none" and (row["draft"] != "self" or not rates):
        raise Missing("no acceptance is published for this pair and prefix")
    bandwidth, flops, link_bandwidth = GPUS[row["hardware"]]
    gpu = Hardware(bandwidth, flops, OVERHEAD_S, link=Link(LATENCY_S, link_bandwidth))
    target = Deployment(find_config("--model", row["model"]), gpu, 2, int(row["ranks"]))
    S, B = int(row["prefix_len"]), int(row["batch_size"])
    if row["draft"] == "none":
        step_s = target.seconds(B, 1, S)
        return f"{1e3 * step_s if row['quantity'] == 'tpot_ms' else B / step_s:.2f}"
    speculation = Speculation(target, target, int(row["budget"]), float(rates[-1]))
    return f"{speculation.predict_step(B, S, int(row['gamma'])).speedup:.2f}"
