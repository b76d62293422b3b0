"""The lines of PipeInfer's published speedups: pipelined speculation beside synchronous
speculation on the same stages, by `magicdec pipeline`.

Owns what a line means, what the published models are called on the Hub, and the demo size. Must not
know the tables' files.

Source: Butler et al. 2024 (arXiv 2407.11798), and the README, the models and the launch scripts of
PipeInfer at 123a824. No published speedup belongs to one pair: each is a bound over several.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from magicdec.names import SEQUENTIAL
from magicdec.reproduce.setting import DEMO, Finding, Setting, hub_name

# Of the only launch script for speculation, which other pairs take where nothing is published.
SHIPPED = {
    "nodes": "8", "layer_split": "0.1,0.15,0.15,0.15,0.15,0.15,0.15/1.0", "draft_tokens": "3",
    "pa": "0.1", "ps": "0.9", "pr": "0", "np": "3", "gen_len": "128",
}  # fmt: skip
PROMPT_LEN = "64"  # about that of the script's prompt
MODES = ("iterative", "sync", "async")
POOR, LOOKUP = "poor", "ngram"
# The example of the README, whose head has the fewest layers.
DEMO_NODES, DEMO_SPLIT = "4", "0.1,0.4,0.5/1.0"
DEMO_DRAFT, DEMO_TOKENS, DEMO_REQUESTS = "demo-draft", "64", "4"


class PipeInferSetting(Setting):
    """`alignment` is how well the draft guesses the target, `well` or `poor`. `bound` says what the
    published number is a bound of. `quantity` is the speedup of a request over synchronous
    speculation. The other columns are flags of `magicdec pipeline`."""

    COLUMNS = ("model", "draft", "alignment", "nodes", "layer_split", "draft_tokens", "pa", "ps",
               "pr", "np", "gen_len", "quantity", "bound")  # fmt: skip
    NEEDED = ("sync", "async")

    @property
    def size(self) -> tuple[str, str]:
        return self.shipped("nodes"), "nodes"

    def shipped(self, column: str) -> str:
        """The published value of a column, or that of the launch script."""
        return self.to_dict()[column] or SHIPPED[column]

    def command(self) -> list[str]:
        is_demo, drafter = self.is_demo, self.draft
        words = ["pipeline", "--model", hub_name(self.model), "--draft"]
        # A model drafts from all of its context.
        words += [LOOKUP] if drafter == LOOKUP else [f"model:{hub_name(drafter)}", "--budget", "-1"]
        words += ["--nproc", self.shipped("nodes"), "--layer_split", self.shipped("layer_split")]
        words += ["--gamma", self.shipped("draft_tokens")]
        for name in ("pa", "ps", "pr", "np"):
            words += [f"--{name}", self.shipped(name)]
        words += ["--num_requests", DEMO_REQUESTS if is_demo else "1", "--prefix_len", PROMPT_LEN]
        words += ["--gen_len", self.shipped("gen_len"), "--ignore_eos"]
        # No node has room for a whole target. A core for each rank of the demo.
        words += ["--threads", "1"] if is_demo else []
        return [*words, "--modes", *([SEQUENTIAL] if is_demo else []), *MODES]

    def at_demo_size(self) -> PipeInferSetting:
        """Four ranks, half the tokens. In place of a draft that guesses poorly but is sure of
        itself, prompt lookup."""
        return self.but(
            model=DEMO, draft=LOOKUP if self.alignment == POOR else DEMO_DRAFT, alignment="",
            nodes=DEMO_NODES, layer_split=DEMO_SPLIT, draft_tokens="", pa="", ps="", pr="", np="",
            gen_len=DEMO_TOKENS, bound="",
        )  # fmt: skip

    def number(self, passes: dict[str, Any]) -> Finding:
        speeds = [passes[name]["request_tokens_per_s"] for name in ("async", "sync")]
        return Finding(f"{speeds[0] / speeds[1]:.2f}")

    def predict(self, folder: Path) -> Finding:
        """`magicdec simulate` predicts it from the times of stages, links and drafts and from the
        acceptance. None of them was found."""
        return Finding(why_not="the times of the nodes and links and the acceptance were not found")
