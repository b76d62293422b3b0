"""Measures what one rank of this machine can do at most: read, multiply, exchange, and what a
forward costs that reads next to nothing. All ranks measure at once, since in a run they work at
once.

Owns the clocks of `magicdec probe`. Must not know what the figures are used for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from magicdec.bench.costs import Deployment
from magicdec.bench.hardware import Hardware, Link
from magicdec.bench.timing import read_bandwidth, synchronize
from magicdec.config import ATTENTION_BACKENDS, load_named
from magicdec.distributed.groups import Group
from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.checkpoint import find_model, load_transformer
from magicdec.runner import ModelRunner

SMALL_BYTES, LARGE_BYTES = 1 << 10, 1 << 24  # all-reduces bound by latency and by bandwidth
STRETCHES, ROUNDS = 5, 30
CACHED = 32  # tokens of the tiny forward: attention runs, and costs next to nothing


def measure_hardware(group: Group, device: torch.device, dtype: str, bandwidth: float) -> Hardware:
    """Ceilings in `dtype`, of the slowest rank; the overhead is left to `layer_overhead`."""
    rate = gemm_flops(getattr(torch, dtype), device)
    return Hardware(bandwidth, min(group.all_gather_object(rate)))


def rank_bandwidth(group: Group, device: torch.device) -> float:
    """Bytes a second that one rank reads while all do."""
    return read_bandwidth(group, device) / group.size


def gemm_flops(
    dtype: torch.dtype, device: torch.device = torch.device("cpu"), size: int | None = None
) -> float:
    """Floating-point operations a second of a square matrix product: the best of several."""
    size = size or (8192 if device.type == "cuda" else 1024)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in "ab")
    best = float("inf")
    for _ in range(8):
        synchronize(device)
        started = time.perf_counter()
        a @ b
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def measure_link(group: Group, device: torch.device) -> Link | None:
    """Latency from a small all-reduce; bandwidth from what a large one takes beyond it. None for
    one rank."""
    if group.size == 1:
        return None
    small, large = (torch.zeros(n // 4, device=device) for n in (SMALL_BYTES, LARGE_BYTES))
    latency = median_seconds(lambda: group.all_reduce(small), group, device)
    seconds = median_seconds(lambda: group.all_reduce(large), group, device)
    moved = 2 * (group.size - 1) / group.size * LARGE_BYTES
    return Link(latency, moved / max(seconds - latency, 1e-9))


def median_seconds(call: Callable[[], Any], group: Group, device: torch.device) -> float:
    """The slowest rank's median, in the best of several stretches: a busy host slows one of them,
    not all as likely. The first stretch warms up as well."""
    medians = []
    for _ in range(STRETCHES):
        samples = []
        for _ in range(ROUNDS):
            synchronize(device)
            started = time.perf_counter()
            call()
            synchronize(device)
            samples.append(time.perf_counter() - started)
        medians.append(max(group.all_gather_object(statistics.median(samples))))
    return min(medians)


def layer_overhead(
    group: Group, device: torch.device, hardware: Hardware, dtype: str, backend: str, linear: str
) -> float:
    """Seconds a layer of a tiny forward (the demo model on each rank by itself, one row, one token)
    beyond what its bytes account for; 0 where nothing is left."""
    source = find_model("--model", "demo")
    torch_dtype: torch.dtype = getattr(torch, dtype)
    model = load_transformer(source.config, source.weights, Shard(), None, torch_dtype, device)
    if linear == "packed":
        model.pack()
    alone = Group((group.ranks[group.index],), 0)
    runner = ModelRunner(model, load_named(ATTENTION_BACKENDS, backend)(), alone, 1, 2 * CACHED)
    runner.cache.allocate(0, 2 * CACHED)
    runner.forward(torch.ones(1, CACHED, dtype=torch.long, device=device), [0])
    last = torch.ones(1, 1, dtype=torch.long, device=device)

    def step() -> None:
        runner.forward(last, [0])
        runner.truncate([0], [CACHED])

    seconds = median_seconds(step, group, device)
    bare = replace(hardware, layer_overhead_s=0.0)
    accounted = Deployment(source.config, bare, torch_dtype.itemsize).seconds(1, 1, CACHED)
    return max(0.0, seconds - accounted) / source.config.num_layers
