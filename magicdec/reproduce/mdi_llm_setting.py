"""The lines of MDI-LLM's published table: samples that circulate through one to three boards, by
`magicdec recurrent`.

Owns what a line means, and what the layers of the boards alone predict. Must not know the tables'
files, but for the one that holds the published times.

Source: the figures in the README of MDI-LLM at d647b97 (Macario et al. 2025, arXiv 2505.18164).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from magicdec.distributed.layer_split import MDI_LLM, split_layers
from magicdec.reproduce.setting import DEMO, Finding, Setting, hub_name, published

TABLE = "mdi_llm_generation_time"
NUM_LAYERS = {"nanollama-304m": 12, "tinyllama-1.1b": 22, "gpt2-large": 36, "gpt2-xl": 48}
SECONDS = "seconds"
PROMPT_LEN = "32"  # that of the paper's runs is not published; its default is a short question
DEMO_SAMPLES, DEMO_TOKENS = "3", "240"


class MDILLMSetting(Setting):
    """`num_tokens` tokens of all samples together, on `num_nodes` boards. `quantity` is the time of
    all tokens, or the speedup over one board, which decodes one sample after the other."""

    COLUMNS = ("model", "kv_cache", "hardware", "num_nodes", "num_samples", "num_tokens",
               "quantity")  # fmt: skip
    NEEDED = ("ring",)

    @property
    def size(self) -> tuple[str, str]:
        return self.num_nodes, f"{self.hardware} board{'s' * (self.num_nodes != '1')}"

    def command(self) -> list[str]:
        samples = self.num_samples or "1"
        words = ["recurrent", "--model", hub_name(self.model), "--nproc", self.num_nodes]
        words += ["--layer_split", MDI_LLM, "--n_samples", samples, "--num_requests", samples]
        words += ["--B", "1", "--prefix_len", PROMPT_LEN, "--modes", "sequential", "ring"]
        words += ["--threads", "1"] if self.is_demo else []  # a core for each board
        return [*words, "--gen_len", str(int(self.num_tokens) // int(samples))]

    def at_demo_size(self) -> MDILLMSetting:
        """A tenth of the tokens, always with a KV cache. Only times, because on one host the
        baseline has the cores of all ranks, not those of one board."""
        return self.but(
            model=DEMO, kv_cache="yes", hardware="CPU", num_samples=DEMO_SAMPLES,
            num_tokens=DEMO_TOKENS, quantity=SECONDS,
        )  # fmt: skip

    def number(self, passes: dict[str, Any]) -> Finding:
        seconds = passes["ring"]["makespan_s"]
        if self.quantity == SECONDS:
            return Finding(f"{seconds:.2f}")
        return Finding(f"{passes['sequential']['makespan_s'] / seconds:.2f}")

    def predict(self, folder: Path) -> Finding:
        """From the published run of the same model on the fewest boards, if all time is spent in
        layers of equal cost, and links take none."""
        rows = published(folder, TABLE, model=self.model, quantity=SECONDS)
        row = min(rows, key=lambda row: int(row["num_nodes"]))
        base, base_s = self.of(row), float(row["published"])
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
