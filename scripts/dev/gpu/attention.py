"""Stage `attention`: attention of one layer in decoding and verification, with every backend. The
bytes of K and V read per second are compared with the bandwidth of a copy. A call goes through as
many layers as it takes until the GPU's cache (L2) has lost the first one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu.device_clock import copy_bandwidth, median_seconds
from gpu.scale import Heads, Suite
from magicdec.attention.backend import AttentionBackend
from magicdec.config.capabilities import capabilities_of
from magicdec.config.machine import Machine
from magicdec.hardware.environment import missing_backends
from magicdec.kv.cache import KVCache
from magicdec.kv.layout import POOL_DTYPES
from magicdec.kv.pool import CacheShape
from magicdec.kv.view import make_view
from magicdec.setup.loading import make_backend
from magicdec.speculation.policies.policy import FullKV
from magicdec.speculation.steps.recorder import CudaGraphs

DTYPE = torch.bfloat16


def run(suite: Suite) -> None:
    scale = suite.scale
    device = suite.device
    results = suite.results
    results.cell(
        "copy_bandwidth",
        lambda: {"bytes_per_s": copy_bandwidth(device, scale.copied_bytes)},
    )
    for place in scale.places:
        for model, heads in scale.heads.items():
            for backend in scale.backends:
                for kind, stored in stored_by(backend).items():
                    name = f"{model}/B{place[0]}/S{place[1]}/{backend}{kind}"
                    results.cell(name, partial(time_backend, suite, backend, heads, *place, stored))


def stored_by(backend: str) -> dict[str, torch.dtype]:
    """The dtypes of caches that are measured, by the ends of their cells' names."""
    codes = POOL_DTYPES if backend == "triton" else {}
    return {"": DTYPE} | {f", {name} KV": dtype for name, dtype in codes.items()}


def time_backend(
    suite: Suite, name: str, heads: Heads, B: int, S: int, stored: torch.dtype = DTYPE
) -> dict[str, Any]:
    """For each number of new tokens T: milliseconds of `run` of one layer (replayed from a CUDA
    graph if it can be captured) and of `plan`, and the share of the copy's bandwidth, over a cache
    in the dtype `stored`. Raises RuntimeError if the backend does not support this problem or it
    does not fit."""
    device = suite.device
    tokens = suite.scale.attention_tokens
    capabilities = capabilities_of(name)
    machine = Machine(1, has_compiler=True, missing_backends=missing_backends((name,)))
    obstacle = capabilities.obstacle(machine, device.type, heads.D, "bfloat16")
    if obstacle:
        raise RuntimeError(obstacle)
    backend = make_backend(name)
    token_bytes = backend.layout(stored).token_size(heads.D) * stored.itemsize
    per_layer = 2 * B * (S + max(tokens)) * heads.G * token_bytes
    layers = num_layers(per_layer, device)
    needed = layers * per_layer
    if device.type == "cuda":
        torch.cuda.empty_cache()  # else an earlier cell's memory counts as used
        if 1.3 * needed > torch.cuda.mem_get_info()[0]:
            raise RuntimeError(f"{needed / 1e9:.1f} GB of keys and values do not fit")
    copied = suite.results.cells["copy_bandwidth"]["bytes_per_s"]
    cache = filled_cache(backend, heads, B, S, max(tokens), device, layers, stored)
    found = {}
    for T in tokens:
        call, plan, _ = prepare_call(backend, cache, heads, B, T, DTYPE)
        again: Callable[[], Tensor] = call
        if device.type == "cuda" and capabilities.can_be_recorded:
            call()
            again = CudaGraphs(device).record(call)
        seconds = median_seconds(device, again, calls=3) / layers
        num_bytes = 2 * B * heads.G * token_bytes * (S + T)
        found[str(T)] = {
            "ms": 1e3 * seconds,
            "layers": layers,
            "from_graph": again is not call,
            "plan_ms": 1e3 * median_seconds(device, plan),
            "bytes_per_s": num_bytes / seconds,
            "of_copy": num_bytes / seconds / copied,
        }
    return found


def num_layers(layer_bytes: int, device: torch.device) -> int:
    """The number of layers to go through in turn, so that more bytes than twice the L2 cache are
    read before a layer is read again."""
    if device.type != "cuda":
        return 1
    return 1 + 2 * torch.cuda.get_device_properties(device).L2_cache_size // layer_bytes


def filled_cache(
    backend: AttentionBackend,
    heads: Heads,
    B: int,
    S: int,
    room: int,
    device: torch.device,
    layers: int,
    dtype: torch.dtype = DTYPE,
) -> KVCache:
    """A cache with B rows of S random tokens, generated on the device."""
    block = backend.block_size(S + room)
    per_row = -(-(S + room) // block)
    shape = CacheShape(layers, heads.G, heads.D, block, B * per_row, backend.layout(dtype))
    cache = KVCache(shape, B, per_row, dtype, device)
    for row in range(B):
        cache.allocate(row, S + room)
    generator = torch.Generator(device).manual_seed(0)
    for pool in (cache.k, cache.v):
        shape.layout.fill_randomly(pool, generator)
    cache.advance(range(B), S)
    return cache


def prepare_call(
    backend: AttentionBackend, cache: KVCache, heads: Heads, B: int, T: int, dtype: torch.dtype
) -> tuple[Callable[[], Tensor], Callable[[], None], Tensor]:
    """Returns two calls, the attention of all layers over T new tokens and their plan, and the
    queries. The plan has been made once."""
    generator = torch.Generator(cache.k.device).manual_seed(1)
    q, k, v = (
        torch.randn(B, T, n, heads.D, generator=generator, device=cache.k.device).to(dtype)
        for n in (heads.H, heads.G, heads.G)
    )
    view = make_view(cache, range(B), FullKV(), T)
    backend.plan(view)

    def run() -> Tensor:
        for layer in range(cache.shape.num_layers):
            out = backend.run(layer, q, k, v, view)
        return out

    return run, partial(backend.plan, view), q
