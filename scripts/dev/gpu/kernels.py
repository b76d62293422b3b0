"""Stage `kernels`: where the time of a step goes. Matrix products alone, of the sizes of the model
and in each storage that the suite has, as a share of a copy; and the kernels that one step of
decoding and of self-speculation launches, by time."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpu.device_clock import copy_bandwidth, median_seconds
from gpu.scale import Suite
from gpu.whole_runs import (
    WARM_UP,
    emulated,
    filled_runner,
    find_run,
    fitting_rows,
    new_batch,
    take_step,
)
from magicdec.model.config import ModelConfig
from magicdec.model.linear.grouped import GroupedLinear, GroupedNumbers
from magicdec.model.presets.presets import find_config
from magicdec.names import QUANTIZERS, load_named
from magicdec.runner.request import Batch
from magicdec.setup.loading import LoadedModels
from magicdec.speculation.steps.build import build_decoder
from magicdec.speculation.steps.recorder import CudaGraphs
from magicdec.speculation.steps.strategy import DecodingStrategy

ROWS = (1, 8, 32, 140)  # of matrix products; 140 = 28 rows of 5 tokens
BITS = {"bfloat16": 16, "int8": 8.125, "int4": 4.5}
MOST_KERNELS = 25
PROFILED = 3  # steps


def run(suite: Suite) -> None:
    copied = suite.scale.copied_bytes
    suite.results.cell(
        "copy_bandwidth", lambda: {"bytes_per_s": copy_bandwidth(suite.device, copied)}
    )
    config = find_config("--model", suite.scale.model.removeprefix("random:"))
    for name, sizes in matrices(config).items():
        for storage in BITS:
            suite.results.cell(f"{name}/{storage}", partial(time_products, suite, storage, *sizes))
    if suite.device.type != "cuda":
        return  # there are no kernels to list
    models: list[LoadedModels] = []
    for B, S in ((1, 4096), (32, 16384)):
        rows = fitting_rows(suite, B, S)
        suite.results.cell(f"step/B{rows}/S{S}", partial(list_kernels, suite, models, rows, S))


def matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the products of a layer, and of the head."""
    hidden = config.hidden_size
    size = config.head_dim
    heads = config.num_heads + 2 * config.num_kv_heads
    return {
        "qkv": (heads * size, hidden),
        "out": (hidden, config.num_heads * size),
        "gate_up": (2 * config.intermediate_size, hidden),
        "down": (hidden, config.intermediate_size),
        "head": (config.vocab_size, hidden),
    }


def make_linear(storage: str, outputs: int, inputs: int, device: torch.device) -> nn.Module:
    if storage == "bfloat16":
        linear = nn.Linear(inputs, outputs, bias=False, device=device, dtype=torch.bfloat16)
        return linear.requires_grad_(False)
    kind = load_named(QUANTIZERS, storage).format(inputs)
    most = 127 if storage == "int8" else 7
    numbers = torch.randint(-most, most + 1, (outputs, inputs), dtype=torch.int8, device=device)
    scale = torch.ones(outputs, inputs // kind.group, dtype=torch.bfloat16, device=device)
    return GroupedLinear(GroupedNumbers(kind, numbers, scale, None), None)


@torch.inference_mode()
def time_products(suite: Suite, storage: str, outputs: int, inputs: int) -> dict[str, Any]:
    """By number of rows: milliseconds of a product, and its weights' bytes as a share of the
    copy's. As many matrices are multiplied in turn as a GPU's cache does not hold."""
    device = suite.device
    num_bytes = outputs * inputs * BITS[storage] / 8
    count = 1
    if device.type == "cuda":
        cached = torch.cuda.get_device_properties(device).L2_cache_size
        count = 1 + int(2 * cached // num_bytes)
    linears = [make_linear(storage, outputs, inputs, device) for _ in range(count)]
    copied = suite.results.cells["copy_bandwidth"]["bytes_per_s"]
    found = {}
    for rows in ROWS:
        x = torch.randn(rows, 1, inputs, device=device).to(torch.bfloat16)

        def multiply(x: Tensor = x) -> Tensor:
            for linear in linears:
                out: Tensor = linear(x)
            return out

        multiply()
        again = CudaGraphs(device).record(multiply) if device.type == "cuda" else multiply
        seconds = median_seconds(device, again, repeats=10, calls=3) / count
        found[str(rows)] = {"ms": 1e3 * seconds, "of_copy": num_bytes / seconds / copied}
    return found


def list_kernels(suite: Suite, models: list[LoadedModels], B: int, S: int) -> dict[str, Any]:
    """The kernels of a step by strategy: microseconds a step and launches a step, the longest
    first, and the time in which no kernel ran."""
    run = find_run(suite, B, S, gamma=4)
    config = run.config
    found = {}
    with filled_runner(models, run, S) as (runner, filled):
        for name in ("autoregressive", "speculative"):
            batch = new_batch(filled, config.workload.gen_len)
            strategy = build_decoder(runner, config.decoding, config.kv, name=name)
            with emulated(0.8, 4, B, runner.device):
                strategy.admit(batch)
                found[name] = kernels_of(strategy, batch)
                strategy.release(batch.rows)
            runner.truncate(batch.rows, [S] * B)
    return found


def kernels_of(strategy: DecodingStrategy, batch: Batch) -> dict[str, Any]:
    for _ in range(WARM_UP):
        take_step(strategy, batch)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(PROFILED):
            take_step(strategy, batch)
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    spans = []
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name[:90]].append(event.time_range.end - event.time_range.start)
            spans.append((event.time_range.start, event.time_range.end))
    spans.sort()
    whole = spans[-1][1] - spans[0][0] if spans else 0.0
    busy = sum(map(sum, times.values()))
    longest = sorted(times, key=lambda name: -sum(times[name]))[:MOST_KERNELS]
    kernels = {
        name: {"us": sum(times[name]) / PROFILED, "launches": len(times[name]) / PROFILED}
        for name in longest
    }
    return {"us": whole / PROFILED, "busy_us": busy / PROFILED, "kernels": kernels}
