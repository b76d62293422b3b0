"""Stage `peers`: the decode step of other decoders with the same model, batch, prefix and device:
transformers (sdpa, static cache, compiled) and a compiled loop in the style of gpt-fast.

Both have the same random weights and prompts, and the summary says which share of their greedy
tokens is equal. Each peer at each place is a cell of its own, because compiling takes longer than
all steps, and the stage may be ended meanwhile. This project's own step is in `llama31.json`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu.plain_loop import PlainLoop
from gpu.scale import Suite
from magicdec.model.config import ModelConfig
from magicdec.model.families.hf_config import to_hf_config
from magicdec.model.presets.presets import PRESETS
from magicdec.records.computing import percentile

TINY_MODEL = ModelConfig("tiny", 97, 2, 64, 96, 4, 2, 16, 1024)
CHUNK = 1024  # prefill tokens per row and forward
WARMUP = 5
STEPS = 20
Step = Callable[[Tensor, Tensor], Tensor]
Start = Callable[[Any, int, int], tuple[Step, Step]]


def run(suite: Suite) -> None:
    scale = suite.scale
    config = TINY_MODEL if suite.is_tiny else PRESETS[scale.peer_model].config
    dtype = torch.float32 if suite.is_tiny else torch.bfloat16
    models: list[Any] = []  # made when the first cell is measured

    def measure(start: Start, B: int, S: int) -> dict[str, Any]:
        if not models:
            models.append(make_model(config, suite.device, dtype))
        return time_peer(start, models[0], suite.device, B, S)

    for B, S in scale.peer_places:
        for name, start in STARTS.items():
            suite.results.cell(f"{config.name}/B{B}/S{S}/{name}", partial(measure, start, B, S))


def make_model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Any:
    """transformers' Llama with random weights, created on the device."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    fields = to_hf_config(config)
    with device:
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(**fields), dtype=dtype, attn_implementation="sdpa"
        )
    return model.eval().requires_grad_(False)


def time_peer(start: Start, model: Any, device: torch.device, B: int, S: int) -> dict[str, Any]:
    """Milliseconds of a step, the seconds until the first one was compiled, and the greedy tokens
    of each row."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(model.config.vocab_size, (B, S), generator=generator).to(device)
    try:
        with torch.no_grad():
            return time_steps(start(model, B, S + WARMUP + STEPS + 1), prompts, device)
    finally:
        torch.compiler.reset()


def start_transformers(model: Any, B: int, room: int) -> tuple[Step, Step]:
    """(eager, compiled) forward with one static cache: ids [B, T] at positions [T] -> the greedy
    ids [B, 1] after the last."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=room)

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        out = model(
            ids,
            past_key_values=cache,
            position_ids=positions.unsqueeze(0).expand(len(ids), -1),
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits.argmax(-1)

    return forward, compiled(forward, model.device)


def start_plain(model: Any, B: int, room: int) -> tuple[Step, Step]:
    loop = PlainLoop(model, B, room)
    return loop.forward, compiled(loop.forward, model.device)


# The one worth most first.
STARTS: dict[str, Start] = {"gpt_fast_style": start_plain, "transformers": start_transformers}


def compiled(forward: Step, device: torch.device) -> Step:
    """Compiled with CUDA graphs on a GPU. On a CPU only traced, to test that it can be."""
    if device.type == "cuda":
        return torch.compile(forward, mode="reduce-overhead")
    return torch.compile(forward, backend="eager")


def time_steps(
    forwards: tuple[Step, Step], prompts: Tensor, device: torch.device
) -> dict[str, Any]:
    """As `time_peer`."""
    eager, step = forwards
    positions = torch.arange(prompts.shape[1] + WARMUP + STEPS, device=device)
    for part, at in zip(
        prompts.split(CHUNK, dim=1), positions[: prompts.shape[1]].split(CHUNK), strict=True
    ):
        newest = eager(part, at)
    emitted = [newest]
    seconds = []
    for position in positions[prompts.shape[1] :].split(1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        torch.compiler.cudagraph_mark_step_begin()
        emitted.append(step(emitted[-1], position).clone())
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(1e3 * (time.perf_counter() - started))
    measured = seconds[WARMUP:]
    names = {"ms_median": 50, "ms_p10": 10, "ms_p90": 90}
    times: dict[str, Any] = {name: percentile(measured, p) for name, p in names.items()}
    tokens = torch.cat(emitted, dim=1).tolist()
    return times | {"compile_s": seconds[0] / 1e3, "tokens": tokens}
