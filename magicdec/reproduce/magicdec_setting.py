"""The lines of MagicDec's published tables: runs of `magicdec run`, and predictions of `magicdec
plan` for the published peak rates of the GPUs.

Owns what the published hardware and models are called elsewhere, and the demo size. Must not know
the tables' files, but for the one that holds the published acceptance.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path

from magicdec.cost_model.costs import Deployment
from magicdec.cost_model.speculation import Speculation
from magicdec.hardware.ceiling_file import Hardware, Link
from magicdec.model.presets.presets import find_config
from magicdec.records.reading import load_records
from magicdec.records.statistics.uncertainty import SUFFIX as INTERVAL
from magicdec.reproduce.setting import DEMO, Finding, Setting

ACCEPTANCE = "magicdec_acceptance.csv"
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
SELF, NONE = "self", "none"
GEN_LEN, DEFAULT_GAMMA = "64", "4"
NUM_BATCHES = "4"  # enough for intervals
DEMO_BUDGET, DEMO_DRAFT = "129", "demo-draft"
SHRINK_PREFIX, SHRINK_BATCH, LEAST_PREFIX, MOST_PREFIX = 16, 32, 512, 4096
# A quantity of the tables: the metric of a record, and the digits that are written.
METRICS = {
    "speedup": ("speedup", 3),
    "acceptance_rate": ("acceptance_rate", 3),
    "tpot_ms": ("mean_tpot_ms", 2),
    "tokens_per_s": ("decode_tokens_per_s", 1),
}


@dataclass(frozen=True)
class MagicDecSetting(Setting):
    """`draft` is `self`, `none` or a model; `budget` is the KV budget of the draft."""

    model: str
    draft: str
    hardware: str
    ranks: str
    budget: str
    prefix_len: str
    batch_size: str
    gamma: str
    quantity: str

    @property
    def num_gpus(self) -> int:
        return 0 if self.model == DEMO else int(self.ranks or 1)

    @property
    def needs(self) -> str:
        return "a run" if self.model == DEMO else f"{self.ranks} {self.hardware} GPUs".lstrip()

    def command(self) -> list[str]:
        is_named = self.draft in (SELF, NONE)
        draft = self.draft if is_named else f"model:{HUB.get(self.draft, self.draft)}"
        words = ["run", "--model", HUB.get(self.model, self.model), "--draft", draft]
        words += ["--nproc", self.ranks or "1", "--B", self.batch_size or "1"]
        words += ["--prefix_len", self.prefix_len, "--gen_len", GEN_LEN]
        words += ["--num_batches", NUM_BATCHES]
        if self.draft != NONE:
            words += ["--budget", self.budget, "--gamma", self.gamma or DEFAULT_GAMMA]
        return [*words, "--dataset", "demo" if self.model == DEMO else "pg19"]

    def at_demo_size(self) -> MagicDecSetting:
        """Shorter prefixes and smaller batches, on one rank."""
        prefix = int(self.prefix_len) // SHRINK_PREFIX
        return replace(
            self, model=DEMO, hardware="CPU", ranks="1", budget=DEMO_BUDGET,
            draft=self.draft if self.draft in (SELF, NONE) else DEMO_DRAFT,
            prefix_len=str(min(MOST_PREFIX, max(LEAST_PREFIX, prefix))),
            batch_size=str(max(1, int(self.batch_size or SHRINK_BATCH) // SHRINK_BATCH)),
        )  # fmt: skip

    def read(self, records: Path) -> Finding:
        name, digits = METRICS[self.quantity]
        metrics = load_records(records)[-1].metrics
        value = getattr(metrics, name, None)
        ends = getattr(metrics, f"{name}{INTERVAL}", None)
        if value is None:
            return Finding(why_not=f"the run has no {name}")
        shown = "" if ends is None else f"{ends[0]:.{digits}f} to {ends[1]:.{digits}f}"
        return Finding(f"{value:.{digits}f}", interval=shown)

    def predict(self, folder: Path) -> Finding:
        """The prediction of `magicdec plan`. The published acceptance is taken as a conditional
        rate, as in the formula of the paper."""
        rate = published_rates(folder).get((self.model, self.prefix_len))
        if self.quantity == "acceptance_rate":
            return Finding(why_not="the plan takes acceptance as given")
        if not self.ranks:
            return Finding(why_not="the number of GPUs is not published")
        if self.draft != NONE and (self.draft != SELF or rate is None):
            return Finding(why_not="no acceptance is published for this pair and prefix")
        S, B = int(self.prefix_len), int(self.batch_size)
        hardware = HARDWARE[self.hardware]
        target = Deployment(find_config("--model", self.model), hardware, 2, int(self.ranks))
        if rate is None or self.draft == NONE:
            step = target.seconds(B, 1, S)
            return Finding(f"{1e3 * step if self.quantity == 'tpot_ms' else B / step:.2f}")
        way = Speculation(target, target, int(self.budget), rate)
        return Finding(f"{way.predict_step(B, S, int(self.gamma)).speedup:.2f}")


def published_rates(folder: Path) -> dict[tuple[str, str], float]:
    """The published acceptance by model and prefix length."""
    with (folder / ACCEPTANCE).open(newline="", encoding="utf-8") as file:
        return {
            (row["model"], row["prefix_len"]): float(row["published"])
            for row in csv.DictReader(file)
            if row["published"]
        }
