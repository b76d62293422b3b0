"""Stage `llama31`: whole forwards of a model with random weights, measured by
`magicdec latency`, once per batch size, for the contexts that fit into memory."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from gpu.in_process import call_magicdec, words_of
from gpu.scale import Suite
from magicdec.distributed.ranks import STARTER, package_command
from magicdec.distributed.tensor_parallel import Shard
from magicdec.hardware.costs import kv_bytes_per_token, weight_bytes
from magicdec.model.config import ModelConfig
from magicdec.model.presets.presets import find_config

ROOM = 16  # most tokens of a row in addition to its context
SPARE = 4 << 30  # bytes for working memory and libraries
NOTHING: Mapping[str, Any] = MappingProxyType({})
EVEN = 4  # a reduced batch size is a multiple of this


def run(suite: Suite) -> None:
    scale = suite.scale
    name = suite.scale.model
    config = find_config("--model", name.removeprefix("random:"))
    contexts = sorted({min(S, config.max_length - ROOM) for S in scale.contexts})
    places = fitting_places(scale.batch_sizes, contexts, config, free_bytes(suite.device))
    for B, fitting in places.items():
        # The contexts are part of the name, because they depend on the free memory.
        cell = f"B{B}/S{'+'.join(map(str, fitting))}"
        suite.results.cell(cell, partial(measure, suite, name, B, fitting))


def free_bytes(device: torch.device) -> int | None:
    return torch.cuda.mem_get_info()[0] if device.type == "cuda" else None


def fitting_places(
    batch_sizes: tuple[int, ...], contexts: list[int], config: ModelConfig, free: int | None
) -> dict[int, list[int]]:
    """Contexts by batch size. If a batch size does not fit with a context, it is reduced to the
    largest that fits, unless that is at or below the next smaller requested batch size."""
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


def most_rows(config: ModelConfig, S: int, free: int | None, copy_bytes: int = 0) -> int | None:
    """The most rows whose KV cache fits in memory besides the weights, in bfloat16, and a copy that
    drafts; None if the free memory is unknown."""
    if free is None:
        return None
    embedding = config.vocab_size * config.hidden_size * 2
    left = free - SPARE - weight_bytes(config, Shard(), 2) - embedding - copy_bytes
    return max(0, left // ((S + ROOM) * kv_bytes_per_token(config, Shard(), 2)))


def measure(
    suite: Suite, model: str, B: int, contexts: list[int], more: Mapping[str, Any] = NOTHING
) -> dict[str, Any]:
    """The JSON of `magicdec latency`, with flags that are `more` or replace others. Raises
    RuntimeError with its last line if it fails."""
    scale = suite.scale
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "latency.json"
        settings = {
            "--model": model,
            "--device": suite.device.type,
            "--dtype": "bfloat16",
            "--B": B,
            "--prefix_len": contexts,
            "--T": scale.new_tokens,
            "--kv_policy": "streaming_llm",
            "--budget": scale.budgets,
            "--repeats": scale.repeats,
            "--warmup": min(3, scale.repeats),
            "--out": path,
            **more,
        }
        refusal = run_recorded("latency", words_of(settings), suite)
        found = json.loads(path.read_text())
    assert isinstance(found, dict), "the file of `magicdec latency`"
    return found | refusal


def run_recorded(command: str, flags: list[Any], suite: Suite) -> dict[str, Any]:
    """Run `magicdec <command>`, and if capturing CUDA graphs failed, run it again without them.
    Returns the reason of that failure, if any. Raises RuntimeError like `run_magicdec`. `quick` has
    no time for processes of their own."""

    def start(words: list[Any]) -> None:
        if suite.is_quick:
            call_magicdec(command, words)
        else:
            run_magicdec(command, words, suite.results.seconds_left)

    try:
        start(flags)
    except RuntimeError as error:
        if "--cuda_graphs on:" not in str(error):
            raise
        start([*flags, "--cuda_graphs", "off"])
        return {"without_graphs": str(error)}
    return {}


def run_magicdec(command: str, flags: list[Any], seconds: float) -> None:
    """Run `magicdec <command>`. Raises RuntimeError if it fails, with the last line of its stderr,
    or if it takes longer than `seconds`."""
    call = [*package_command(), command, *map(str, flags)]
    environment = os.environ | {STARTER: str(os.getpid())}
    try:
        done = subprocess.run(
            call, capture_output=True, text=True, timeout=seconds, env=environment
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"stopped after {seconds:.0f} s: the stage's time limit") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["(no message)"])[-1]
        raise RuntimeError(f"magicdec {command} ended with {done.returncode}: {last}")
