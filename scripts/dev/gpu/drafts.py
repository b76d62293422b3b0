"""Stage `drafts`: matrices of drafts in few bits. Products of the sizes of the model, by every tile
of our kernel and by torch's own operators, each compared with its weights in float32; draft steps;
and whole steps of self-speculation with such drafts, whose acceptance is emulated."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpu.device_clock import copy_bandwidth, median_seconds
from gpu.kernels import matrices
from gpu.latency import measure
from gpu.results import Incomplete
from gpu.scale import Suite
from gpu.whole_runs import fitting_rows
from gpu.whole_runs import measure as measure_run
from magicdec.distributed.tensor_parallel import Shard
from magicdec.hardware.costs import low_bit_bytes
from magicdec.model.linear import triton
from magicdec.model.linear.fp8 import Fp8Linear
from magicdec.model.linear.grouped import GroupedLinear
from magicdec.model.linear.quantizers import INT4_G128
from magicdec.model.linear.tiles import Tile, tiles_for
from magicdec.model.presets.presets import find_config
from magicdec.names import SAME
from magicdec.setup.loading import LoadedModels
from magicdec.speculation.steps.recorder import CudaGraphs

WEIGHTS = ("int4_g128", "fp8")
EMULATED = ("published", "0.8")  # rates, of which the first that is known at a context is taken
INNER_TILES = 8  # of `_convert_weight_to_int4pack`


@dataclass(frozen=True)
class Product:
    """A matrix in some storage: its layer, its bytes, and by which functions of x [M, K] so many
    rows may be multiplied. `bound`: of the error, relative to products of its `dense` weights."""

    layer: nn.Module
    num_bytes: int
    functions: Callable[[nn.Module, int], dict[str, Callable[[Tensor], Tensor]]]
    bound: float = 0.01


class Int4Pack(nn.Module):
    """Numbers in groups by torch's kernel for 4 bits."""

    def __init__(self, layer: GroupedLinear) -> None:
        super().__init__()
        numbers = layer.numbers()
        self.group = layer.format.group
        self.weights = numbers.dense()
        codes = (numbers.numbers + 8).to(torch.uint8)
        self.on_gpu = codes.device.type == "cuda"
        if self.on_gpu:
            both = codes[:, ::2] << 4 | codes[:, 1::2]
            self.packed = torch._convert_weight_to_int4pack(both, INNER_TILES)
        else:
            self.packed = torch._convert_weight_to_int4pack_for_cpu(codes.int(), INNER_TILES)
        scale = numbers.scale.T.contiguous()
        self.scale_and_zero = torch.stack([scale, torch.zeros_like(scale)], dim=2)

    def dense(self) -> Tensor:
        return self.weights

    def forward(self, x: Tensor) -> Tensor:
        multiply = torch._weight_int4pack_mm if self.on_gpu else torch._weight_int4pack_mm_for_cpu
        out: Tensor = multiply(x, self.packed, self.group, self.scale_and_zero)
        return out


def run(suite: Suite) -> None:
    cell = suite.results.cell
    copied = suite.scale.copied_bytes
    cell("copy_bandwidth", lambda: {"bytes_per_s": copy_bandwidth(suite.device, copied)})
    name = suite.scale.model
    config = find_config("--model", name.removeprefix("random:"))
    # Before anything lies in memory.
    rows = {}
    for weights in WEIGHTS:
        copy = low_bit_bytes(config, Shard(), weights)
        for B, S in suite.scale.draft_places:
            rows[weights, B, S] = fitting_rows(suite, B, S, copy)
    products = matrices(config)
    if suite.is_tiny:  # whose kernel may be interpreted, for seconds
        products = {"qkv": products["qkv"]}
    for matrix, sizes in products.items():
        for storage in PRODUCTS:
            cell(f"product/{matrix}/{storage}", partial(time_product, suite, storage, *sizes))
    flags = {"--draft_weights": [SAME, *WEIGHTS], "--T": 1, "--budget": suite.scale.run_budget}
    for B in suite.scale.draft_batch_sizes:
        contexts = list(suite.scale.contexts[:1])
        cell(f"step/B{B}", partial(measure, suite, name, B, contexts, flags))
    for weights in WEIGHTS:
        models: list[LoadedModels] = []
        for B, S in suite.scale.draft_places:
            place = rows[weights, B, S], S, suite.scale.draft_gamma
            label = f"run/{weights}/B{place[0]}/S{S}/gamma{place[2]}"
            cell(label, partial(measure_run, suite, models, *place, weights, EMULATED))


def in_bfloat16(weight: Tensor) -> Product:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.bfloat16(), requires_grad=False)
    return Product(linear, 2 * weight.numel(), lambda layer, rows: {"torch": layer})


def in_int4(weight: Tensor) -> Product:
    numbers = INT4_G128(weight)
    layer = GroupedLinear(numbers, None)
    num_bytes = round(weight.numel() * numbers.format.bytes_per_weight)
    return Product(layer, num_bytes, by_tiles)


def by_tiles(layer: nn.Module, rows: int) -> dict[str, Callable[[Tensor], Tensor]]:
    assert isinstance(layer, GroupedLinear)
    return {
        f"{tile.rows}x{tile.outputs}, {tile.warps} warps": partial(multiply, layer, tile)
        for tile in tiles_for(rows, layer.format, is_bfloat16=True)
    }


def multiply(layer: GroupedLinear, tile: Tile, x: Tensor) -> Tensor:
    stored = layer.weight, layer.scale, layer.minimum
    return triton.multiply_groups(x, *stored, layer.format, tile)


def in_fp8(weight: Tensor) -> Product:
    layer = Fp8Linear(weight, None)
    # Activations have 3 bits of a fraction.
    return Product(layer, weight.numel(), lambda layer, rows: {"scaled_mm": layer}, bound=0.05)


def in_int4pack(weight: Tensor) -> Product:
    product = in_int4(weight)
    assert isinstance(product.layer, GroupedLinear)
    layer = Int4Pack(product.layer)
    return Product(layer, product.num_bytes, lambda layer, rows: {"int4pack_mm": layer})


PRODUCTS = {
    "int4_g128": in_int4,
    "fp8": in_fp8,
    "int4pack": in_int4pack,
    "bfloat16": in_bfloat16,
}


@torch.inference_mode()
def time_product(suite: Suite, storage: str, outputs: int, inputs: int) -> dict[str, Any]:
    """By number of rows and function: milliseconds, the weights' bytes as a share of the copy's,
    and the relative error. As many matrices are multiplied in turn as a GPU's cache does not hold.
    Raises Incomplete if a product is wrong."""
    device = suite.device
    torch.manual_seed(0)
    made = PRODUCTS[storage](torch.randn(outputs, inputs, device=device))
    count = 1
    if device.type == "cuda":
        cached = torch.cuda.get_device_properties(device).L2_cache_size
        count = 1 + int(2 * cached // made.num_bytes)
    layers = [made.layer, *(deepcopy(made.layer) for _ in range(count - 1))]
    layer: Any = made.layer
    dense = layer.weight.float() if storage == "bfloat16" else layer.dense()
    copied = suite.results.cells["copy_bandwidth"]["bytes_per_s"]
    found: dict[str, Any] = {}
    wrong = []
    for rows in suite.scale.draft_rows:
        x = torch.randn(rows, inputs, device=device).bfloat16()
        expected = F.linear(x.float(), dense)
        found[str(rows)] = {}
        for name in made.functions(made.layer, rows):
            functions = [made.functions(layer, rows)[name] for layer in layers]
            error = float((functions[0](x).float() - expected).norm() / expected.norm())
            if not error <= made.bound:
                wrong.append(f"{name} of {rows} rows by {error:.3f}")
            seconds = seconds_of(device, functions, x)
            share = made.num_bytes / seconds / copied
            found[str(rows)][name] = {"ms": 1e3 * seconds, "of_copy": share, "error": error}
    if wrong:
        raise Incomplete(f"{storage} is wrong: {'; '.join(wrong)}", found)
    return found


def seconds_of(
    device: torch.device, functions: list[Callable[[Tensor], Tensor]], x: Tensor
) -> float:
    """Of one function, replayed from a graph on a GPU; on a CPU, where kernels may be interpreted,
    of one call."""

    def multiply_all() -> Tensor:
        for function in functions:
            out = function(x)
        return out

    if device.type == "cpu":
        started = time.perf_counter()
        multiply_all()
        return time.perf_counter() - started
    multiply_all()
    replayed = CudaGraphs(device).record(multiply_all)
    return median_seconds(device, replayed, repeats=10, calls=3) / len(functions)
