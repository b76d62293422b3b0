"""The lines of MDI-LLM's published table: samples that circulate through one to three boards, by
`magicdec recurrent`.

Owns what a line means, and what the layers of the boards alone predict. Must not know the tables'
files, but for the one that holds the published times.

Source: the figures in the README of MDI-LLM at d647b97 (Macario et al. 2025, arXiv 2505.18164).
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, replace
from pathlib import Path

from magicdec.distributed.layer_split import MDI_LLM, split_layers
from magicdec.reproduce.setting import DEMO, Finding, Setting

TABLE = "mdi_llm_generation_time.csv"
NUM_LAYERS = {"nanollama-304m": 12, "tinyllama-1.1b": 22, "gpt2-large": 36, "gpt2-xl": 48}
HUB = {
    "tinyllama-1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-xl": "openai-community/gpt2-xl",
}
SECONDS, SPEEDUP = "seconds", "speedup"
PROMPT_LEN = "32"  # that of the paper's runs is not published; its default is a short question
DEMO_SAMPLES, DEMO_TOKENS = "3", "240"


@dataclass(frozen=True)
class MDILLMSetting(Setting):
    """`num_tokens` tokens of all samples together, on `num_nodes` boards. `quantity` is the time of
    all tokens, or the speedup over one board, which decodes one sample after the other."""

    model: str
    kv_cache: str
    hardware: str
    num_nodes: str
    num_samples: str
    num_tokens: str
    quantity: str

    @property
    def num_gpus(self) -> int:
        return 0

    @property
    def num_hosts(self) -> int:
        return 1 if self.model == DEMO else int(self.num_nodes)

    @property
    def needs(self) -> str:
        boards = f"{self.hardware} board{'s' * (self.num_nodes != '1')}"
        return "a run" if self.model == DEMO else f"{self.num_nodes} {boards}"

    def command(self) -> list[str]:
        samples = self.num_samples or "1"
        words = ["recurrent", "--model", HUB.get(self.model, self.model), "--nproc", self.num_nodes]
        words += ["--layer_split", MDI_LLM, "--n_samples", samples, "--num_requests", samples]
        words += ["--B", "1", "--prefix_len", PROMPT_LEN, "--modes", "sequential", "ring"]
        words += ["--threads", "1"] if self.model == DEMO else []  # a core for each board
        return [*words, "--gen_len", str(int(self.num_tokens) // int(samples))]

    def at_demo_size(self) -> MDILLMSetting:
        """A tenth of the tokens, always with a KV cache. Only times, because on one host the
        baseline has the cores of all ranks, not those of one board."""
        return replace(
            self, model=DEMO, kv_cache="yes", hardware="CPU", num_samples=DEMO_SAMPLES,
            num_tokens=DEMO_TOKENS, quantity=SECONDS,
        )  # fmt: skip

    def read(self, records: Path) -> Finding:
        lines = records.read_text(encoding="utf-8").splitlines()
        found = {r["name"]: r["metrics"] for r in map(json.loads, lines)}
        ring = found["ring"]
        if ring is None:
            return Finding(why_not="the tokens of its run were wrong")
        seconds = ring["makespan_s"]
        if self.quantity == SECONDS:
            return Finding(f"{seconds:.2f}")
        return Finding(f"{found['sequential']['makespan_s'] / seconds:.2f}")

    def predict(self, folder: Path) -> Finding:
        """From the run of the same model on the fewest boards, if all time is spent in layers of
        equal cost, and links take none."""
        base, base_s = fewest_nodes(folder, self.model)
        if base.num_nodes == self.num_nodes:
            return Finding(why_not="no run of its model on fewer boards is published")
        if self.kv_cache == "no" and not self.num_samples:
            return Finding(why_not="the number of samples is not published")
        seconds = base_s * self.cost() / base.cost()
        if self.quantity == SECONDS:
            return Finding(f"{seconds:.1f}")
        return Finding(f"{base_s / seconds:.2f}")

    def cost(self) -> float:
        """The time of all tokens in units of one layer and one token. Without a KV cache a token
        costs as much as all tokens before it, together with it."""
        layers, nodes = NUM_LAYERS[self.model], int(self.num_nodes)
        samples, tokens = int(self.num_samples or 1), int(self.num_tokens)
        each = [len(part) for part in split_layers(MDI_LLM if nodes > 1 else None, nodes, layers)]
        a_round = max(samples * max(each), layers)  # in which every sample gains a token
        length = tokens / samples
        return length * a_round * (1 if self.kv_cache == "yes" else length / 2)


def fewest_nodes(folder: Path, model: str) -> tuple[MDILLMSetting, float]:
    """The published run of that model on the fewest boards, and its seconds."""
    with (folder / TABLE).open(newline="", encoding="utf-8") as file:
        rows = [r for r in csv.DictReader(file) if (r["model"], r["quantity"]) == (model, SECONDS)]
    row = min(rows, key=lambda row: int(row["num_nodes"]))
    names = MDILLMSetting.__dataclass_fields__
    return MDILLMSetting(**{name: row[name] for name in names}), float(row["published"])
