"""Stage `peers`: the decode step of other decoders with the same model, batch, prefix and device:
transformers (sdpa, static cache, compiled) and a compiled loop in the style of gpt-fast.

Both have the same random weights and prompts, and the share of equal greedy tokens is reported with
the times. This project's own step is in `llama31.json`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu_stages.plain_loop import PlainLoop
from gpu_stages.scale import Suite
from magicdec.model.config import ModelConfig
from magicdec.model.families.hf_config import to_hf_config
from magicdec.model.presets.presets import PRESETS
from magicdec.records.metrics import percentile

TINY_MODEL = ModelConfig("tiny", 97, 2, 64, 96, 4, 2, 16, 1024)
CHUNK = 1024  # prefill tokens per row and forward
WARMUP, STEPS = 5, 20
Step = Callable[[Tensor, Tensor], Tensor]


def run(suite: Suite) -> None:
    scale = suite.scale
    config = TINY_MODEL if suite.is_tiny else PRESETS[scale.peer_model].config
    dtype = torch.float32 if suite.is_tiny else torch.bfloat16
    models: list[Any] = []  # made when the first cell is measured

    def measure(B: int, S: int) -> dict[str, Any]:
        if not models:
            models.append(make_model(config, suite.device, dtype))
        return compare(models[0], suite.device, B, S)

    for B, S in scale.peer_places:
        suite.results.cell(f"{config.name}/B{B}/S{S}", partial(measure, B, S))


def make_model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Any:
    """transformers' Llama with random weights, created on the device."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    fields = to_hf_config(config)
    with device:
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(**fields), dtype=dtype, attn_implementation="sdpa"
        )
    return model.eval().requires_grad_(False)


def compare(model: Any, device: torch.device, B: int, S: int) -> dict[str, Any]:
    """Milliseconds of a step by peer, and the share of tokens in which the peers agree."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(model.config.vocab_size, (B, S), generator=generator).to(device)
    room = S + WARMUP + STEPS + 1
    found: dict[str, Any] = {}
    emitted = {}
    for name, start in (("transformers", start_transformers), ("gpt_fast_style", start_plain)):
        step = start(model, B, room)
        with torch.no_grad():
            found[name], emitted[name] = time_steps(step, prompts, device)
        del step
        torch.compiler.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    agreed = emitted["transformers"] == emitted["gpt_fast_style"]
    found["agreeing_tokens"] = agreed.float().mean().item()
    return found


def start_transformers(model: Any, B: int, room: int) -> tuple[Step, Step]:
    """(eager, compiled) forward with one static cache: ids [B, T] at positions [T] -> the greedy
    ids [B, 1] after the last."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=room)

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        out = model(
            ids, past_key_values=cache, position_ids=positions.unsqueeze(0).expand(len(ids), -1),
            use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        return out.logits.argmax(-1)

    return forward, compiled(forward, model.device)


def start_plain(model: Any, B: int, room: int) -> tuple[Step, Step]:
    loop = PlainLoop(model, B, room)
    return loop.forward, compiled(loop.forward, model.device)


def compiled(forward: Step, device: torch.device) -> Step:
    """Compiled with CUDA graphs on a GPU. On a CPU only traced, to test that it can be."""
    if device.type == "cuda":
        return torch.compile(forward, mode="reduce-overhead")
    return torch.compile(forward, backend="eager")


def time_steps(
    forwards: tuple[Step, Step], prompts: Tensor, device: torch.device
) -> tuple[dict[str, Any], Tensor]:
    """Milliseconds of a compiled step, and the greedy ids [B, steps]."""
    eager, step = forwards
    positions = torch.arange(prompts.shape[1] + WARMUP + STEPS, device=device)
    for part, at in zip(
        prompts.split(CHUNK, dim=1), positions[: prompts.shape[1]].split(CHUNK), strict=True
    ):
        newest = eager(part, at)
    emitted, seconds = [newest], []
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
    times = {name: percentile(measured, share) for name, share in names.items()}
    return times, torch.cat(emitted, dim=1)
