"""Stage `stages`: the demo model divided among 2 ranks, by `magicdec serve` in every mode that has
stages. Where both ranks share a GPU, hidden states are copied through the host; where there are
two, `auto` sends them from GPU to GPU by NCCL."""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from gpu.in_process import words_of
from gpu.latency import run_magicdec
from gpu.scale import Suite

RANKS = 2
MODES = "sequential", "ring", "ring+draft", "pipeline", "pipeinfer"


def run(suite: Suite) -> None:
    """Float32, where tokens must be those of one process."""
    ways = ["auto"] if suite.is_tiny else ["auto", "gloo", "shared_memory"]
    for collectives in ways:
        suite.results.cell(collectives, partial(serve, suite, collectives))


def serve(suite: Suite, collectives: str) -> list[dict[str, Any]]:
    """The records of all modes. Raises RuntimeError if one of them has other tokens."""
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "records.jsonl"
        settings = {
            "--model": "demo",
            "--dataset": "demo",
            "--device": suite.device.type,
            "--dtype": "float32",
            "--nproc": RANKS,
            "--collectives": collectives,
            "--prefix_len": 64 if suite.is_tiny else 4096,
            "--num_requests": 4,
            "--gen_len": 8 if suite.is_tiny else 64,
            "--out": path,
            "--arrival": "burst",
            "--draft": "ngram",
            "--n_samples": 4,
            "--modes": MODES,
        }
        run_magicdec("serve", words_of(settings), suite.results.seconds_left)
        records: list[dict[str, Any]] = [json.loads(line) for line in path.open()]
    wrong = [
        record["name"] for record in records if record["status"] not in ("verified", "unverified")
    ]
    if wrong:
        raise RuntimeError(f"other tokens than one process: {', '.join(wrong)}")
    return records
