"""Compare the times of linear layers with bfloat16 and with int8 weights.

    python scripts/bench_int8.py --threads 2            # about a minute and a half on 2 cores
    python scripts/bench_int8.py --json int8.json

In the first table activations are bfloat16. The kinds of layers are timed in turn for each shape,
after their outputs are compared. For large shapes there are enough layers that their weights are
never in the CPU cache. The second table times the int8 layer that torch computes, which is used for
CPUs and dtypes without the kernel.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peers.measuring import describe_machine, interleaved
from rich.console import Console
from rich.table import Table
from torch import Tensor

from magicdec.model.checkpoint.quantization import quantized
from magicdec.model.linear.grouped import GroupedLinear
from magicdec.model.linear.packed import PackedLinear
from magicdec.model.linear.quantizers import INT8

SHAPES = ((512, 1024), (2048, 2048), (4096, 4096), (14336, 4096))  # outputs, inputs
ROWS = (1, 2, 4, 8, 20)
COLD_BYTES = 256 << 20  # bfloat16 weights of all layers of one shape
TOLERANCE = 2e-2
Layer = Callable[[Tensor], Tensor]


def make_layers(num_outputs: int, width: int, copies: int) -> dict[str, list[Layer]]:
    """Layers of each kind, with the same weights except for rounding."""
    layers: dict[str, list[Layer]] = {"bfloat16": [], "packed bfloat16": [], "packed int8": []}
    for _ in range(copies):
        weight = torch.randn(num_outputs, width) * width**-0.5
        narrow = weight.to(torch.bfloat16)
        layers["bfloat16"].append(partial(multiply, narrow))
        layers["packed bfloat16"].append(PackedLinear(narrow))
        layers["packed int8"].append(PackedLinear(quantized(weight, INT8), rounds=True))
    return layers


def multiply(weight: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, weight)


def in_turn(layers: Sequence[Layer], x: Tensor) -> Callable[[], Tensor]:
    """A function that applies the next layer on each call."""
    order = cycle(layers)
    return lambda: next(order)(x)


def measure(seconds: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for num_outputs, width in SHAPES:
        size = 2 * num_outputs * width
        copies = 1 if size <= 8 << 20 else max(1, COLD_BYTES // size)
        layers = make_layers(num_outputs, width, copies)
        for num_rows in ROWS:
            x = torch.randn(num_rows, width).to(torch.bfloat16)
            expected = layers["packed bfloat16"][0](x).float()
            for layer in layers.values():
                assert (layer[0](x).float() - expected).norm() < TOLERANCE * expected.norm()
            timings = interleaved({n: in_turn(way, x) for n, way in layers.items()}, seconds)
            for way, timing in timings.items():
                entry = {"out": num_outputs, "in": width, "copies": copies, "rows": num_rows}
                rows.append({**entry, "way": way, **timing.as_json()})
    return rows


def measure_torch(seconds: float) -> list[dict[str, Any]]:
    """Times of `GroupedLinear` and of torch's own layer, in both dtypes."""
    rows: list[dict[str, Any]] = []
    size = 4096
    weights = [torch.randn(size, size) * size**-0.5 for _ in range(COLD_BYTES // (4 * size**2))]
    ours = [GroupedLinear(quantized(weight, INT8), None) for weight in weights]
    for dtype in (torch.float32, torch.bfloat16):
        plain = [partial(multiply, weight.to(dtype)) for weight in weights]
        for num_rows in (1, 8, 64):
            x = torch.randn(num_rows, size).to(dtype)
            ways = {"weights as x": in_turn(plain, x), "int8 by torch": in_turn(ours, x)}
            for way, timing in interleaved(ways, seconds).items():
                entry = {"dtype": str(dtype).removeprefix("torch."), "rows": num_rows}
                rows.append({**entry, "way": way, **timing.as_json()})
    return rows


def print_torch(rows: list[dict[str, Any]]) -> None:
    table = Table(title="4096 x 4096 without the kernel; ms, median")
    for column in ("x", "rows", "weights as x", "int8 by torch"):
        table.add_column(column, justify="right")
    for plain, ours in zip(rows[::2], rows[1::2], strict=True):
        table.add_row(plain["dtype"], str(plain["rows"]), f"{plain['ms']:.2f}", f"{ours['ms']:.2f}")
    Console(width=128).print(table)


def print_table(measured: dict[str, Any]) -> None:
    machine = measured["machine"]
    title = f"{machine['cpu']}, {machine['threads']} threads, reads "
    table = Table(title=f"{title}{machine['read_bytes_per_s'] / 1e9:.1f} GB/s; ms, median")
    ways = list(dict.fromkeys(row["way"] for row in measured["rows"]))
    for column in ("out", "in", "copies", "rows", *ways, "int8 reads, GB/s", "int8 faster"):
        table.add_column(column, justify="right")
    for i in range(0, len(measured["rows"]), len(ways)):
        cell = {row["way"]: row for row in measured["rows"][i : i + len(ways)]}
        one, ms = measured["rows"][i], {way: cell[way]["ms"] for way in ways}
        rate = one["out"] * one["in"] / ms["packed int8"] / 1e6
        labels = [str(one[key]) for key in ("out", "in", "copies", "rows")]
        times = [f"{ms[way]:.3f}" for way in ways]
        faster = f"{ms['packed bfloat16'] / ms['packed int8']:.2f}"
        table.add_row(*labels, *times, f"{rate:.1f}", faster)
    Console(width=128).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0, help="per shape and rows [3]")
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        measured: dict[str, Any] = {
            "rows": measure(args.seconds),
            "torch": measure_torch(args.seconds),
        }
        measured["machine"] = describe_machine()
    print_table(measured)
    print_torch(measured["torch"])
    if args.json:
        args.json.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
