"""The lines of PipeInfer's published speedups: pipelined speculation beside synchronous
speculation on the same stages, by `magicdec pipeline`.

Owns what a line means, what the published models are called on the Hub, and the demo size. Must not
know the tables' files.

Source: Butler et al. 2024 (arXiv 2407.11798), and the README, the models and the launch scripts of
PipeInfer at 123a824. No published speedup belongs to one pair: each is a bound over several.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from magicdec.names import SEQUENTIAL
from magicdec.reproduce.setting import DEMO, Finding, Setting

HUB = {
    "dolphin-70b": "cognitivecomputations/dolphin-2.2-70b",
    "tinyllama-openorca-1.1b": "jeff31415/TinyLlama-1.1B-1T-OpenOrca",
    "orca-2-7b": "microsoft/Orca-2-7b",
    "goliath-120b": "alpindale/goliath-120b",
    "xwin-7b": "Xwin-LM/Xwin-LM-7B-V0.2",
    "xwin-13b": "Xwin-LM/Xwin-LM-13B-V0.2",
    "falcon-180b": "tiiuae/falcon-180B",
    "falcon-7b": "tiiuae/falcon-7b",
    "falcon-40b": "tiiuae/falcon-40b",
}
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


@dataclass(frozen=True)
class PipeInferSetting(Setting):
    """`alignment` is how well the draft guesses the target, `well` or `poor`. `bound` says what the
    published number is a bound of. `quantity` is the speedup of a request over synchronous
    speculation. The other fields are flags of `magicdec pipeline`."""

    model: str
    draft: str
    alignment: str
    nodes: str
    layer_split: str
    draft_tokens: str
    pa: str
    ps: str
    pr: str
    np: str
    gen_len: str
    quantity: str
    bound: str

    @property
    def num_gpus(self) -> int:
        return 0

    @property
    def num_hosts(self) -> int:
        return 1 if self.model == DEMO else int(self.shipped("nodes"))

    @property
    def needs(self) -> str:
        return "a run" if self.model == DEMO else f"{self.shipped('nodes')} nodes"

    def shipped(self, field: str) -> str:
        """The published value of a field, or that of the launch script."""
        value: str = getattr(self, field)
        return value or SHIPPED[field]

    def command(self) -> list[str]:
        is_demo, drafter = self.model == DEMO, self.draft
        words = ["pipeline", "--model", HUB.get(self.model, self.model), "--draft"]
        if drafter == LOOKUP:
            words += [drafter]
        else:  # whose drafts read all of their context
            words += [f"model:{HUB.get(drafter, drafter)}", "--budget", "-1"]
        words += ["--nproc", self.shipped("nodes"), "--layer_split", self.shipped("layer_split")]
        words += ["--gamma", self.shipped("draft_tokens")]
        for name in ("pa", "ps", "pr", "np"):
            words += [f"--{name}", self.shipped(name)]
        words += ["--num_requests", DEMO_REQUESTS if is_demo else "1", "--prefix_len", PROMPT_LEN]
        words += ["--gen_len", self.shipped("gen_len"), "--ignore_eos"]
        # No node has room for a whole target. A core for each rank of the demo.
        reference = [SEQUENTIAL] if is_demo else []
        words += ["--threads", "1"] if is_demo else []
        return [*words, "--modes", *reference, *MODES]

    def at_demo_size(self) -> PipeInferSetting:
        """Four ranks, half the tokens. In place of a draft that guesses poorly but is sure of
        itself, prompt lookup."""
        return replace(
            self, model=DEMO, draft=LOOKUP if self.alignment == POOR else DEMO_DRAFT, alignment="",
            nodes=DEMO_NODES, layer_split=DEMO_SPLIT, draft_tokens="", pa="", ps="", pr="", np="",
            gen_len=DEMO_TOKENS, bound="",
        )  # fmt: skip

    def read(self, records: Path) -> Finding:
        lines = records.read_text(encoding="utf-8").splitlines()
        found = {record["name"]: record["metrics"] for record in map(json.loads, lines)}
        if found["sync"] is None or found["async"] is None:
            return Finding(why_not="the tokens of its run were wrong")
        speeds = [found[name]["request_tokens_per_s"] for name in ("async", "sync")]
        return Finding(f"{speeds[0] / speeds[1]:.2f}")

    def predict(self, folder: Path) -> Finding:
        """`magicdec simulate` predicts it from the times of stages, links and drafts and from the
        acceptance. None of them was found."""
        return Finding(why_not="the times of the nodes and links and the acceptance were not found")
