"""Stage `tiles`: attention of one layer by our Triton kernels with other tiles and compiler options
than `choose_tile` takes, so that a choice that only a time can justify is made by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from gpu.attention import DTYPE, filled_cache, num_layers, prepare_call
from gpu.device_clock import copy_bandwidth, median_seconds
from gpu.scale import Heads, Suite
from magicdec.attention import triton
from magicdec.kv.cache import KVCache
from magicdec.kv.view import FULL, SinksAndWindow, make_view
from magicdec.speculation.steps.recorder import CudaGraphs

REPEATS = (30, 1)  # of a GPU, and of a rehearsal, which is interpreted
# Of the keys that a draft reads from a list.
SINKS = 4
BUDGET = 513
# New tokens, whether the keys are listed, and the options to try: BLOCK_N, num_warps, num_stages
# and maxnreg.
PROBLEMS: tuple[tuple[int, bool, tuple[tuple[int, ...], ...]], ...] = (
    (5, False, ((64, 32), (4, 8), (3, 2), (255, 168))),
    (9, False, ((32, 64), (4, 8), (3, 2), (255, 168))),
    (1, True, ((64, 32), (4, 2), (3, 4), (168, 128))),
)


def run(suite: Suite) -> None:
    scale = suite.scale
    suite.results.cell(
        "copy_bandwidth", lambda: {"bytes_per_s": copy_bandwidth(suite.device, scale.copied_bytes)}
    )
    triton.TritonBackend.load(suite.device.type)
    B, S = scale.places[0]
    heads = next(iter(scale.heads.values()))
    caches: list[KVCache] = []
    for T, is_listed, options in PROBLEMS:
        tiles = [] if suite.is_tiny else product(*options)
        for tile in [None, *tiles]:
            words = "chosen" if tile is None else "N{}/warps{}/stages{}/registers{}".format(*tile)
            name = f"B{B}/S{S}/T{T}/{'listed' if is_listed else 'full'}/{words}"
            measure = partial(time_tile, suite, caches, heads, B, S, T, is_listed, tile)
            suite.results.cell(name, measure)


def time_tile(
    suite: Suite,
    caches: list[KVCache],
    heads: Heads,
    B: int,
    S: int,
    T: int,
    is_listed: bool,
    tile: tuple[int, ...] | None,
) -> dict[str, Any]:
    """Milliseconds of a layer, and the bytes of K and V that it reads as a share of the copy's."""
    device = suite.device
    num_keys = min(S, BUDGET) if is_listed else S
    layers = num_layers(4 * B * num_keys * heads.G * heads.D, device)
    if not caches or caches[0].shape.num_layers < layers:
        caches.clear()
        most = max(T for T, _, _ in PROBLEMS)
        caches.append(filled_cache(triton.TritonBackend(), heads, B, S, most, device, layers))
    cache = caches[0]
    backend = triton.TritonBackend()
    _, _, q = prepare_call(backend, cache, heads, B, T, DTYPE)
    k, v = (torch.randn(B, T, heads.G, heads.D, device=device).to(q.dtype) for _ in "kv")
    rule = SinksAndWindow(SINKS, BUDGET) if is_listed else FULL
    view = make_view(cache, range(B), rule, T)
    backend.plan(view)

    def attend() -> Tensor:
        for layer in range(layers):
            out = backend.run(layer, q, k, v, view)
        return out

    with patch.object(triton, "choose_tile", with_options(tile)):
        attend()
        again = CudaGraphs(device).record(attend) if device.type == "cuda" else attend
        seconds = median_seconds(device, again, repeats=REPEATS[suite.is_tiny], calls=1) / layers
    num_bytes = 4 * B * heads.G * heads.D * (num_keys + T)
    copied = suite.results.cells["copy_bandwidth"]["bytes_per_s"]
    (capacity,) = backend._capacities.values()
    return {"ms": 1e3 * seconds, "of_copy": num_bytes / seconds / copied, "at_once": capacity}


def with_options(tile: tuple[int, ...] | None) -> Callable[..., dict[str, int]]:
    chosen = triton.choose_tile
    names = ("BLOCK_N", "num_warps", "num_stages", "maxnreg")
    options = {} if tile is None else dict(zip(names, tile, strict=True))
    return lambda *sizes: chosen(*sizes) | options
