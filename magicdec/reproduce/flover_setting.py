"""The lines of Flover's published tables: requests that arrive over time, served in flight by
`magicdec inflight`.

Owns what a line means, and what arrivals alone predict. Must not know the tables' files, but for
the one that holds the published times of lone requests.

Source: Flover (Yao et al. 2023, arXiv 2305.13484) and the figures of its repository.
"""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

from magicdec.reproduce.setting import DEMO, Finding, Setting

CONSTANT_TABLE = "flover_constant.csv"
POISSON_LONE_S = 5.8  # published beside the table: a lone request
HUB = {
    "gpt-j-6b": "EleutherAI/gpt-j-6b",
    "llama-13b": "huggyllama/llama-13b",
    "llama-33b": "huggyllama/llama-30b",
    "llama-65b": "huggyllama/llama-65b",
}
CONSTANT, POISSON = "constant", "poisson"
SPEEDUP = "speedup_over_instances"
# A quantity of the tables: the metric of a record, and the digits that are written.
METRICS = {"makespan_s": 2, "mean_in_flight": 1, "num_steps": 0}
SHRINK_INTERVAL, SHRINK_OUTPUT = 100, 8


@dataclass(frozen=True)
class FloverSetting(Setting):
    """`arrival` is a process of `--arrival` with its mean time in ms. Requests have `prompt_len`
    tokens and emit `output_len`; all of them may be in flight together."""

    model: str
    hardware: str
    ranks: str
    num_requests: str
    arrival: str
    prompt_len: str
    output_len: str
    quantity: str

    @property
    def num_gpus(self) -> int:
        return 0 if self.model == DEMO else int(self.ranks)

    @property
    def needs(self) -> str:
        return "a run" if self.model == DEMO else f"{self.ranks} {self.hardware} GPUs"

    @property
    def mean_s(self) -> float:
        return float(self.arrival.partition(":")[2]) / 1e3

    def command(self) -> list[str]:
        words = ["inflight", "--model", HUB.get(self.model, self.model), "--nproc", self.ranks]
        words += ["--num_requests", self.num_requests, "--arrival", self.arrival]
        words += ["--prefix_len", self.prompt_len, "--gen_len", self.output_len]
        return [*words, "--B", self.num_requests, "--modes", "inflight", "--dataset", "demo"]

    def at_demo_size(self) -> FloverSetting:
        """Outputs an eighth as long, and arrivals a hundred times as fast, on one rank."""
        process, _, mean_ms = self.arrival.partition(":")
        return replace(
            self, model=DEMO, hardware="CPU", ranks="1",
            arrival=f"{process}:{float(mean_ms) / SHRINK_INTERVAL:g}",
            output_len=str(int(self.output_len) // SHRINK_OUTPUT),
        )  # fmt: skip

    def read(self, records: Path) -> Finding:
        if self.quantity == SPEEDUP:
            return Finding(why_not="there is no baseline of concurrent instances here")
        line = records.read_text(encoding="utf-8").splitlines()[-1]
        metrics = json.loads(line)["metrics"]
        if metrics is None:
            return Finding(why_not="the tokens of its run were wrong")
        return Finding(f"{metrics[self.quantity]:.{METRICS[self.quantity]}f}")

    def predict(self, folder: Path) -> Finding:
        """What arrivals alone give, if requests never slow each other down: each takes as long as a
        lone one, `lone` seconds."""
        count = int(self.num_requests)
        if self.quantity == SPEEDUP:
            return Finding(why_not="there is no model of concurrent instances here")
        if self.arrival.startswith(CONSTANT):
            if count == 1:
                return Finding(why_not="it is what the other lines are predicted from")
            makespan_s = lone_s(folder, self.model) + (count - 1) * self.mean_s
            return Finding(f"{makespan_s:.2f}")
        lone = POISSON_LONE_S
        # Between two arrivals something runs for the shorter of the gap and `lone`.
        busy_s = lone + (count - 1) * self.mean_s * (1 - math.exp(-lone / self.mean_s))
        if self.quantity == "mean_in_flight":
            return Finding(f"{count * lone / busy_s:.1f}")
        tokens = int(self.prompt_len) + int(self.output_len)  # published steps count the prompt too
        return Finding(f"{tokens * busy_s / lone:.0f}")


def lone_s(folder: Path, model: str) -> float:
    """The published time of one request of that model alone."""
    with (folder / CONSTANT_TABLE).open(newline="", encoding="utf-8") as file:
        return next(
            float(row["published"])
            for row in csv.DictReader(file)
            if (row["model"], row["num_requests"], row["quantity"]) == (model, "1", "makespan_s")
        )
