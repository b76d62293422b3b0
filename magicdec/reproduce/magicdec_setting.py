"""The lines of MagicDec's published tables: runs of `magicdec run`, and predictions of `magicdec
plan` for the published peak rates of the GPUs.

Owns what the published hardware and models are called elsewhere, and the demo size. Must not know
the tables' files, but for the one that holds the published acceptance.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from magicdec.cost_model.costs import Deployment
from magicdec.cost_model.speculation import Speculation
from magicdec.hardware.ceiling_file import Hardware, Link
from magicdec.model.presets.presets import find_config
from magicdec.records.performance import SUFFIX as INTERVAL
from magicdec.reproduce.setting import DEMO, Finding, Setting, hub_name, published

ACCEPTANCE = "magicdec_acceptance"
OVERHEAD_S = 160e-6 / 32  # of a layer; every published target has 32; assumed as in docs/plan.md
# Published peak rates of one GPU in bfloat16. The links are assumed.
HARDWARE = {
    "A100": Hardware(2039e9, 312e12, OVERHEAD_S, link=Link(15e-6, 300e9)),
    "H100": Hardware(3352e9, 989e12, OVERHEAD_S, link=Link(15e-6, 450e9)),
}
SELF, NONE = "self", "none"
GEN_LEN, DEFAULT_GAMMA, NUM_BATCHES = "64", "4", "4"  # enough batches for intervals
DEMO_BUDGET, DEMO_DRAFT = "129", "demo-draft"
SHRINK_PREFIX, SHRINK_BATCH, LEAST_PREFIX, MOST_PREFIX = 16, 32, 512, 4096
# A quantity of the tables: the metric of a record, and the digits that are written.
METRICS = {
    "speedup": ("speedup", 3),
    "acceptance_rate": ("acceptance_rate", 3),
    "tpot_ms": ("mean_tpot_ms", 2),
    "tokens_per_s": ("decode_tokens_per_s", 1),
}


class MagicDecSetting(Setting):
    """`draft` is `self`, `none` or a model; `budget` is the KV budget of the draft."""

    COLUMNS = ("model", "draft", "hardware", "ranks", "budget", "prefix_len", "batch_size",
               "gamma", "quantity")  # fmt: skip
    ON_GPUS = True

    @property
    def size(self) -> tuple[str, str]:
        return self.ranks, f"{self.hardware} GPUs"

    def command(self) -> list[str]:
        draft = self.draft if self.draft in (SELF, NONE) else f"model:{hub_name(self.draft)}"
        words = ["run", "--model", hub_name(self.model), "--draft", draft]
        words += ["--nproc", self.ranks or "1", "--B", self.batch_size or "1"]
        words += ["--prefix_len", self.prefix_len, "--gen_len", GEN_LEN]
        words += ["--num_batches", NUM_BATCHES]
        if self.draft != NONE:
            words += ["--budget", self.budget, "--gamma", self.gamma or DEFAULT_GAMMA]
        return [*words, "--dataset", "demo" if self.is_demo else "pg19"]

    def at_demo_size(self) -> MagicDecSetting:
        """Shorter prefixes and smaller batches, on one rank."""
        prefix = int(self.prefix_len) // SHRINK_PREFIX
        return self.but(
            model=DEMO, hardware="CPU", ranks="1", budget=DEMO_BUDGET,
            draft=self.draft if self.draft in (SELF, NONE) else DEMO_DRAFT,
            prefix_len=str(min(MOST_PREFIX, max(LEAST_PREFIX, prefix))),
            batch_size=str(max(1, int(self.batch_size or SHRINK_BATCH) // SHRINK_BATCH)),
        )  # fmt: skip

    def number(self, passes: dict[str, Any]) -> Finding:
        name, digits = METRICS[self.quantity]
        (*_, metrics) = passes.values()
        if metrics[name] is None:
            return Finding(why_not=f"the run has no {name}")
        ends = [f"{end:.{digits}f}" for end in metrics.get(f"{name}{INTERVAL}") or ()]
        return Finding(f"{metrics[name]:.{digits}f}", interval=" to ".join(ends))

    def predict(self, folder: Path) -> Finding:
        """The prediction of `magicdec plan`. The published acceptance is taken as a conditional
        rate, as in the formula of the paper."""
        place = {"model": self.model, "prefix_len": self.prefix_len}
        rates = [float(row["published"]) for row in published(folder, ACCEPTANCE, **place)]
        if self.quantity == "acceptance_rate":
            return Finding(why_not="the plan takes acceptance as given")
        if not self.ranks:
            return Finding(why_not="the number of GPUs is not published")
        if self.draft != NONE and (self.draft != SELF or not rates):
            return Finding(why_not="no acceptance is published for this pair and prefix")
        S, B = int(self.prefix_len), int(self.batch_size)
        hardware = HARDWARE[self.hardware]
        target = Deployment(find_config("--model", self.model), hardware, 2, int(self.ranks))
        if self.draft == NONE:
            step = target.seconds(B, 1, S)
            return Finding(f"{1e3 * step if self.quantity == 'tpot_ms' else B / step:.2f}")
        way = Speculation(target, target, int(self.budget), rates[-1])
        return Finding(f"{way.predict_step(B, S, int(self.gamma)).speedup:.2f}")
