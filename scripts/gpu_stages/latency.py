"""Stages `llama31` and `llama2`: whole forwards of a model of random weights through `magicdec
latency`, one call a batch size, at the contexts that fit into memory."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpu_stages.scale import Suite
from magicdec.cost_model.costs import kv_bytes_per_token, weight_bytes
from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.config import ModelConfig
from magicdec.model.presets.named import find_config

CONSOLE = "from magicdec.cli.commands import console; console()"
ROOM = 16  # tokens that a row holds beside its context, at most
SPARE = 4 << 30  # bytes of working memory and what the libraries take
EVEN = 4  # a batch that is made smaller is a multiple of this


def run(suite: Suite, stage: str) -> None:
    scale = suite.scale
    name = scale.models[stage]
    config = find_config("--model", name.removeprefix("random:"))
    contexts = sorted({min(S, config.max_length - ROOM) for S in scale.contexts})
    places = fitting_places(scale.batch_sizes, contexts, config, free_bytes(suite.device))
    for B, fitting in places.items():
        # The contexts are part of the name: with more memory another call is another cell.
        cell = f"B{B}/S{'+'.join(map(str, fitting))}"
        suite.results.cell(cell, partial(measure, suite, name, B, fitting))


def free_bytes(device: torch.device) -> int | None:
    return torch.cuda.mem_get_info()[0] if device.type == "cuda" else None


def fitting_places(
    batch_sizes: tuple[int, ...], contexts: list[int], config: ModelConfig, free: int | None
) -> dict[int, list[int]]:
    """Contexts by batch size. Where a batch does not fit at a context, the largest smaller one that
    does is taken, if no batch size that was asked for lies between."""
    found: dict[int, list[int]] = {B: [] for B in batch_sizes}
    for S in contexts:
        most = most_rows(config, S, free)
        for B in batch_sizes:
            rows = B if most is None or most >= B else most // EVEN * EVEN
            smaller = [b for b in batch_sizes if b < B]
            if rows == B or rows > max(smaller, default=0):
                places = found.setdefault(rows, [])
                if S not in places:
                    places.append(S)
    return {B: places for B, places in found.items() if places}


def most_rows(config: ModelConfig, S: int, free: int | None) -> int | None:
    """That fit beside the weights, bfloat16; None where nobody knows what is free."""
    if free is None:
        return None
    embedding = config.vocab_size * config.hidden_size * 2
    left = free - SPARE - weight_bytes(config, Shard(), 2) - embedding
    return max(0, left // ((S + ROOM) * kv_bytes_per_token(config, Shard(), 2)))


def measure(suite: Suite, model: str, B: int, contexts: list[int]) -> dict[str, Any]:
    """What `magicdec latency --json` wrote. Raises RuntimeError with its last line."""
    scale = suite.scale
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "latency.json"
        flags = [
            *("--model", model, "--device", suite.device.type, "--dtype", "bfloat16"),
            *("--B", B, "--context", *contexts, "--T", *scale.new_tokens),
            *("--kv_policy", "streaming_llm", "--budget", *scale.budgets),
            *("--repeats", scale.repeats, "--warmup", min(3, scale.repeats), "--json", path),
        ]
        refusal = run_recorded("latency", flags, suite)
        found = json.loads(path.read_text())
    assert isinstance(found, dict), "the file of `magicdec latency`"
    return found | refusal


def run_recorded(command: str, flags: list[Any], suite: Suite) -> dict[str, Any]:
    """`magicdec <command>`, and once more without CUDA graphs where recording them failed: why it
    did, else nothing. Raises RuntimeError as `run_magicdec`."""
    try:
        run_magicdec(command, flags, suite.results.seconds_left)
    except RuntimeError as error:
        if "--cuda_graphs on:" not in str(error):
            raise
        run_magicdec(command, [*flags, "--cuda_graphs", "off"], suite.results.seconds_left)
        return {"without_graphs": str(error)}
    return {}


def run_magicdec(command: str, flags: list[Any], seconds: float) -> None:
    """`magicdec <command>`. Raises RuntimeError with the last line that it wrote to stderr, or
    where it takes longer."""
    call = [sys.executable, "-c", CONSOLE, command, *map(str, flags)]
    try:
        done = subprocess.run(call, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"stopped after {seconds:.0f} s: the stage's time") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["(no message)"])[-1]
        raise RuntimeError(f"magicdec {command} ended with {done.returncode}: {last}")
