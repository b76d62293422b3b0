"""OutputSection: what a run writes, and where. Imports no torch.

Owns these fields and their flags. Must not know what is written.
"""

from __future__ import annotations

from dataclasses import dataclass

from magicdec.config.options import option


@dataclass(frozen=True)
class OutputSection:
    results: str = option(
        "results/runs.jsonl",
        "The file that records are appended to, one JSON line for each run.",
        "--out",
        "--results",
    )
    save_tokens: str | None = option(
        None,
        "Write prompt and output ids to this file, one JSON line for each sequence.",
        "--save_tokens",
    )
    printoutput: bool = option(False, "Print the generated text.", "--printoutput")
    benchmark: bool = option(
        False,
        "Time draft and verify separately on CUDA too, by events on its stream.",
        "--benchmark",
    )
    profile: str | None = option(
        None, "Trace an unmeasured pass of each strategy into this directory, a file per rank.",
        "--profile",
    )  # fmt: skip
