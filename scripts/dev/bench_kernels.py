"""Time attention, linear layers, states and prompts of linear attention, and collectives, and
compare them with this machine's ceilings.

    python scripts/dev/bench_kernels.py            # about 7 minutes on 2 cores
    python scripts/dev/bench_kernels.py --quick    # about one
    python scripts/dev/bench_kernels.py --only states --json kernels.json

For each problem the implementations are timed in turn, after their outputs are compared. Tensors
are larger than the CPU caches, so a decode step reads the KV cache from memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
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

from magicdec.attention.backend import AttentionBackend
from magicdec.attention.grouped import GroupedBackend
from magicdec.attention.native import NativeBackend
from magicdec.distributed.groups import read_launch
from magicdec.distributed.start import close_groups, make_groups
from magicdec.distributed.tensor_parallel import Shard
from magicdec.kv.cache import KVCache
from magicdec.kv.layout import POOL_DTYPES
from magicdec.kv.pool import CacheShape
from magicdec.kv.view import KVView, make_view
from magicdec.model.elementwise.delta import CHUNK, DeltaTokens, StatePlaces, convolve
from magicdec.model.elementwise.operators import Elementwise
from magicdec.model.linear.packed import PackedLinear
from magicdec.model.mixers import LinearAttention
from magicdec.names import ELEMENTWISE, load_named
from magicdec.runner.layer_states import LayerStates, StateRoom, StateShape
from magicdec.speculation.policies.policy import FullKV

COLUMNS = (
    ("attention", "backend", "dtype", "batch", "heads", "kv_heads", "head_size", "seq_len", "T"),
    ("linear", "call", "dtype", "out", "in", "rows"),
    ("states", "call", "batch", "gamma", "MB"),
    ("prompts", "call", "batch", "tokens"),
    ("collectives", "backend", "collective", "ranks", "bytes"),
)
COLD_BYTES = 256 << 20  # K and V of all layers together
TOLERANCE = 2e-2  # between implementations, in bfloat16, for means over thousands of tokens
BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "grouped": GroupedBackend,
    "native": NativeBackend,
}
LINEAR: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "F.linear(x, w)": F.linear,
    "mm(w, x.T).T": lambda x, w: torch.mm(w, x.T).T,
}


@dataclass(frozen=True)
class Cell:
    """One attention problem: T is 1 for decoding, a few for verification, hundreds for prefill."""

    dtype: str
    batch: int
    heads: int
    kv_heads: int
    head_size: int
    seq_len: int
    T: int

    @property
    def bytes(self) -> int:
        """Bytes of K and V that must be read."""
        dtype = getattr(torch, self.dtype)
        return self.bytes_of(NativeBackend(), dtype)

    def bytes_of(self, backend: AttentionBackend, stored: torch.dtype) -> int:
        """Those of a cache in this dtype."""
        token = backend.layout(stored).token_size(self.head_size) * stored.itemsize
        return 2 * self.batch * self.kv_heads * token * (self.seq_len + self.T)

    @property
    def flops(self) -> int:
        """FLOPs of both products over the visible tokens."""
        seen = self.T * self.seq_len + self.T * (self.T + 1) // 2
        return 4 * self.batch * self.heads * self.head_size * seen


def cells(quick: bool) -> list[Cell]:
    decode = [
        Cell("bfloat16", 4, 8, kv_heads, 64, 16384, num_new)
        for kv_heads in (8, 2)
        for num_new in ((1, 4) if quick else (1, 4, 5, 8))
    ]
    prefill = [Cell("bfloat16", 1, 8, 8, 64, 4096, 1024)]
    if quick:
        return decode + prefill
    more = [
        Cell("float32", 4, 8, 8, 64, 16384, 1),
        Cell("float32", 4, 8, 8, 64, 16384, 5),
        Cell("bfloat16", 4, 8, 8, 64, 4096, 1),
        Cell("bfloat16", 4, 8, 2, 128, 16384, 1),
        Cell("bfloat16", 4, 8, 2, 128, 16384, 5),
        Cell("bfloat16", 1, 8, 8, 64, 15360, 1024),
        Cell("bfloat16", 1, 8, 2, 128, 4096, 1024),
    ]
    return decode + prefill + more


def attention_cell(cell: Cell, seconds: float) -> list[dict[str, Any]]:
    """One row per backend. `torch_sdpa` is torch's own call on dense tensors, without the cache.
    Short forwards in bfloat16 are also timed over caches of codes."""
    torch.manual_seed(0)
    dtype = getattr(torch, cell.dtype)
    layers = max(1, -(-COLD_BYTES // cell.bytes))
    total = cell.seq_len + cell.T
    q = torch.randn(cell.batch, cell.T, cell.heads, cell.head_size).to(dtype)
    k, v = (torch.randn(cell.batch, cell.T, cell.kv_heads, cell.head_size).to(dtype) for _ in "kv")
    ways: dict[str, Callable[[], Tensor]] = {}
    views: dict[str, KVView] = {}
    for name, build in BACKENDS.items():
        backend = build()
        views[name] = view = filled_view(backend, cell, layers, dtype)
        backend.plan(view)
        ways[name] = call_backend(backend, view, layers, q, k, v)
    num_bytes = dict.fromkeys([*ways, "torch_sdpa"], cell.bytes)
    for kv_dtype, stored in POOL_DTYPES.items() if dtype == torch.bfloat16 and cell.T < 32 else ():
        native = NativeBackend()
        view = filled_view(native, cell, layers, dtype, stored)
        ways[f"native {kv_dtype}"] = call_backend(native, view, layers, q, k, v)
        num_bytes[f"native {kv_dtype}"] = cell.bytes_of(native, stored)
    numbers = torch.zeros(2 * COLD_BYTES // 4).split(cell.bytes // 4)[:-1]
    reading = {"reading as much": over(numbers, torch.sum)}
    dense = views["grouped"].cache  # its pools are plain [batch, heads, tokens, size] tensors
    mask = torch.ones(cell.T, total, dtype=torch.bool).tril(cell.seq_len) if cell.T > 1 else None
    ways["torch_sdpa"] = call_sdpa(dense, total, layers, q, mask)
    outputs = {name: way().float() for name, way in ways.items()}
    for name, output in outputs.items():
        error = (output - outputs["grouped"]).abs().max().item()
        assert error < TOLERANCE, f"{name} differs from grouped by {error} on {cell}"
    timings = interleaved(ways | reading, seconds)
    rate = cell.bytes / (timings["reading as much"].ms / 1e3)
    return [
        {"backend": name, **asdict(cell), **timing.as_json()}
        | {"bytes": num_bytes[name], "flops": cell.flops, "read_bytes_per_s": rate}
        for name, timing in timings.items()
        if name in ways
    ]


def filled_view(
    backend: AttentionBackend,
    cell: Cell,
    layers: int,
    dtype: torch.dtype,
    stored: torch.dtype | None = None,
) -> KVView:
    """`stored`: the dtype of the cache, if it is another than that of what is written."""
    block = backend.block_size(cell.seq_len + cell.T)
    per_row = -(-(cell.seq_len + cell.T) // block)
    blocks = cell.batch * per_row
    layout = backend.layout(stored or dtype)
    shape = CacheShape(layers, cell.kv_heads, cell.head_size, block, blocks, layout)
    cache = KVCache(shape, cell.batch, per_row, stored or dtype, torch.device("cpu"))
    rows = range(cell.batch)
    for row in rows:
        cache.allocate(row, cell.seq_len + cell.T)
    generator = torch.Generator().manual_seed(1)
    size = (1, cell.seq_len, cell.kv_heads, cell.head_size)
    for row in rows:  # one row at a time to save memory
        slots = cache.slots(torch.tensor([row]), torch.arange(cell.seq_len).view(1, -1))
        k, v = (torch.randn(size, generator=generator).to(dtype) for _ in "kv")
        for layer in range(layers):
            cache.write(layer, slots, k, v)
    cache.advance(rows, cell.seq_len)
    return replace(make_view(cache, rows, FullKV(), cell.T), is_of_prompt=cell.T > 32)


def call_backend(
    backend: AttentionBackend, view: KVView, layers: int, q: Tensor, k: Tensor, v: Tensor
) -> Callable[[], Tensor]:
    order = cycle(range(layers))
    return lambda: backend.run(next(order), q, k, v, view)


def call_sdpa(
    cache: KVCache, total: int, layers: int, q: Tensor, mask: Tensor | None
) -> Callable[[], Tensor]:
    order = cycle(range(layers))
    heads_first = q.transpose(1, 2)

    def call() -> Tensor:
        layer = next(order)
        k = cache.k[layer][:, :, :total]
        v = cache.v[layer][:, :, :total]
        out = F.scaled_dot_product_attention(heads_first, k, v, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2)

    return call


def linear_rows(quick: bool, seconds: float) -> list[dict[str, Any]]:
    """Weights [out, in] times a few rows: as the model calls it, transposed, and packed."""
    shapes = [(2048, 256), (4096, 4096)] if quick else [(2048, 256), (1152, 384), (4096, 4096)]
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for out, width in shapes:
            copies = max(1, (COLD_BYTES // 2) // (out * width * dtype.itemsize))
            weights = [torch.randn(out, width).to(dtype) for _ in range(min(copies, 64))]
            packed = [PackedLinear(w) for w in weights]
            for num_rows in (1, 4) if quick else (1, 4, 8, 20):
                x = torch.randn(num_rows, width).to(dtype)
                ways = {name: over(weights, partial(form, x)) for name, form in LINEAR.items()}
                ways["packed"] = over(packed, partial(apply_packed, x))
                timings = interleaved(ways, seconds)
                size = {"dtype": str(dtype).removeprefix("torch."), "out": out, "in": width}
                size |= {"rows": num_rows, "bytes": out * width * dtype.itemsize}
                rows += [{"call": name, **size, **t.as_json()} for name, t in timings.items()]
    return rows


def apply_packed(x: Tensor, linear: PackedLinear) -> Tensor:
    out: Tensor = linear(x)
    return out


def over(weights: Sequence[Any], call: Callable[[Any], Tensor]) -> Callable[[], Tensor]:
    """A function that calls `call` with the next of `weights` each time."""
    order = cycle(weights)

    def next_call() -> Tensor:
        return call(next(order))

    return next_call


STATES = LinearAttention(16, 32, 128, 128, 4)  # of Qwen3.5


def state_rows(quick: bool, seconds: float) -> list[dict[str, Any]]:
    """The states of a layer in verifications whose drafts are all accepted: their steps, the
    convolution before them, and reading as many bytes as the steps read and write, which are those
    of a plan."""
    shape = StateShape.of([STATES], Shard())
    state = STATES.state_bytes(Shard(), 4)
    rows = []
    for batch in (1, 8):
        for gamma in (1, 4) if quick else (1, 2, 4, 8):
            num_new = gamma + 1
            tokens = new_tokens(shape, batch, num_new)
            layers = max(1, COLD_BYTES // 2 // (batch * state))
            moved = 2 * batch * (state + num_new * STATES.written_bytes(Shard()))
            numbers = torch.zeros(COLD_BYTES // 4).split(moved // 4)[:-1]
            ways: dict[str, Callable[[], Any]] = {
                name: steps_in_turn(load_named(ELEMENTWISE, name)(), shape, layers, tokens)
                for name in ("torch", "native")
            }
            plain, native = (way() for way in ways.values())
            torch.testing.assert_close(native, plain, atol=1e-5, rtol=1e-5)
            ways |= convolutions(tokens, shape)
            ways["reading as much"] = over(numbers, torch.sum)
            size: dict[str, Any] = {"dtype": "float32", "batch": batch, "gamma": gamma}
            size |= {"bytes": moved, "MB": round(moved / 1e6, 1)}
            timings = interleaved(ways, seconds)
            rows += [{"call": name, **size, **t.as_json()} for name, t in timings.items()]
    return rows


def prompt_rows(quick: bool, seconds: float) -> list[dict[str, Any]]:
    """The tokens of a prompt in a layer with linear attention: the convolution, then chunks, with
    the FLOPs that these need at least."""
    shape = StateShape.of([STATES], Shard())
    rows = []
    for num_tokens in (512,) if quick else (64, 512, 2048):
        tokens = new_tokens(shape, 1, num_tokens)
        ways: dict[str, Callable[[], Any]] = dict(convolutions(tokens, shape))
        parts = ways["native convolution"]()
        state = torch.randn(1, shape.num_values, shape.key_dim, shape.value_dim)
        for name in ("torch", "native"):
            chunks = load_named(ELEMENTWISE, name)().delta_chunks
            ways[f"{name} chunks"] = partial(chunks, state, *parts, tokens)
        for part in ("convolution", "chunks"):
            plain, native = (ways[f"{name} {part}"]() for name in ("torch", "native"))
            torch.testing.assert_close(native, plain, atol=1e-5, rtol=1e-5)
        value_flops = STATES.num_value_heads * (3 * STATES.key_dim + CHUNK) * STATES.value_dim
        flops = 2 * num_tokens * (value_flops + STATES.num_key_heads * STATES.key_dim * CHUNK)
        size: dict[str, Any] = {"dtype": "float32", "batch": 1, "tokens": num_tokens}
        size |= {"bytes": 4 * num_tokens * shape.channels, "flops": flops}
        timings = interleaved(ways, seconds)
        rows += [{"call": name, **size, **t.as_json()} for name, t in timings.items()]
    return rows


def convolutions(tokens: DeltaTokens, shape: StateShape) -> dict[str, Callable[[], Any]]:
    before = torch.zeros(len(tokens.channels), shape.length - 1, shape.channels)
    return {
        f"{name} convolution": partial(
            load_named(ELEMENTWISE, name)().delta_convolve, tokens, before
        )
        for name in ("torch", "native")
    }


def new_tokens(shape: StateShape, batch: int, num_new: int) -> DeltaTokens:
    num_values = shape.num_values
    return DeltaTokens(
        channels=torch.randn(batch, num_new, shape.channels),
        weight=torch.randn(shape.channels, shape.length),
        decay=-torch.rand(batch, num_new, num_values),
        rate=torch.rand(batch, num_new, num_values),
        sizes=(shape.num_keys, num_values, shape.key_dim, shape.value_dim),
    )


def steps_in_turn(
    elementwise: Elementwise, shape: StateShape, num_layers: int, tokens: DeltaTokens
) -> Callable[[], Tensor]:
    """A function that computes the steps of the next layer each time, and after the last layer
    those of the next tokens."""
    batch, num_new = tokens.channels.shape[:2]
    cpu = torch.device("cpu")
    states = LayerStates(shape, num_layers, batch, StateRoom(num_new), torch.float32, cpu)
    q, k, v = convolve(tokens, torch.zeros(batch, shape.length - 1, shape.channels))

    def outputs() -> Iterator[Tensor]:
        rows = torch.arange(batch)
        base = torch.zeros(batch, dtype=torch.int64)
        while True:
            first = base + num_new  # of tokens that another call has written, but the first time
            for layer in range(num_layers):
                places = StatePlaces(rows, base, first, first)
                yield elementwise.delta_steps(states.now.layer(layer), places, q, k, v, tokens)
            base = first

    return outputs().__next__


def collective_rows(seconds: float) -> list[dict[str, Any]]:
    """All-reduce and all-gather between 2 ranks with one thread each, in separate processes."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rows.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc_per_node=2", __file__, "--collectives_to", str(path)]
        command += ["--seconds", str(seconds)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        rows: list[dict[str, Any]] = json.loads(path.read_text())
        return rows


def collective_rank(path: Path, seconds: float) -> None:
    """One rank of `collective_rows`. Rank 0 writes its measurements to `path`."""
    torch.set_num_threads(1)
    launch = read_launch()
    rows = []
    rounds = max(20, int(400 * seconds))
    for name in ("gloo", "shared_memory"):
        everyone = tuple(range(launch.world_size))
        group = make_groups(launch, everyone, torch.device("cpu"), name).target
        for num_bytes in (256, 4 * 256 * 4, 20 * 4096 * 4):
            x = torch.zeros(num_bytes // 4)  # repeated sums of zeros do not overflow
            ways: dict[str, Callable[[], Any]] = {
                "all_reduce": partial(group.all_reduce, x),
                "all_gather": partial(group.all_gather, x),
            }
            # Ranks must agree on the number of rounds, so it is fixed and not timed.
            for way, timing in interleaved(ways, 0.0, at_least=rounds).items():
                rows.append(
                    {"collective": way, "backend": name, "ranks": launch.world_size}
                    | {"bytes": num_bytes, **timing.as_json()}
                )
    if launch.rank == 0:
        path.write_text(json.dumps(rows))
    close_groups()


def print_tables(measured: dict[str, Any]) -> None:
    console = Console(width=128)
    machine = measured["machine"]
    console.print(
        f"{machine['cpu']}, {machine['threads']} threads: reads "
        f"{machine['read_bytes_per_s'] / 1e9:.1f} GB/s, multiplies "
        f"{machine['float32_flops'] / 1e9:.0f} GFLOP/s in float32, "
        f"{machine['bfloat16_flops'] / 1e9:.0f} in bfloat16"
    )
    for kind, way, *problem in COLUMNS:
        if kind not in measured:
            continue
        table = Table(title=kind)
        for column in (*problem, way, "ms", "10-90 %", "of peak"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in measured[kind]:
            timing = (f"{row['ms']:.3f}", f"{row['ms_p10']:.3f}-{row['ms_p90']:.3f}")
            labels = [str(row[column]) for column in (*problem, way)]
            table.add_row(*labels, *timing, share_of_peak(kind, row, machine))
        console.print(table)


def share_of_peak(kind: str, row: dict[str, Any], machine: dict[str, Any]) -> str:
    """The share of the read bandwidth, where it was measured in turns that which was there then, or
    of the FLOP/s if those are the limit."""
    if kind == "collectives" or "convolution" in row.get("call", ""):
        return ""  # whose bytes are not counted
    dtype = row["dtype"]
    by_bytes = row["bytes"] / row.get("read_bytes_per_s", machine["read_bytes_per_s"])
    by_flops = row.get("flops", 0) / machine[f"{dtype}_flops"]
    bound = "FLOP/s" if by_flops > by_bytes else "bandwidth"
    return f"{max(by_bytes, by_flops) / (row['ms'] / 1e3):.0%} {bound}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer cells, under a minute")
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, help="per cell (default 4, with --quick 1)")
    parser.add_argument("--collectives_to", type=Path, help=argparse.SUPPRESS)
    kinds = [kind for kind, *_ in COLUMNS]
    parser.add_argument("--only", choices=kinds, nargs="+", default=kinds, help="these tables")
    args = parser.parse_args()
    seconds = args.seconds or (1.0 if args.quick else 4.0)
    if args.collectives_to:
        collective_rank(args.collectives_to, seconds)
        return
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        measured: dict[str, Any] = {"machine": describe_machine()}
        if "attention" in args.only:
            problems = cells(args.quick)
            measured["attention"] = [row for c in problems for row in attention_cell(c, seconds)]
        if "linear" in args.only:
            measured["linear"] = linear_rows(args.quick, seconds / 4)
        if "states" in args.only:
            measured["states"] = state_rows(args.quick, seconds)
        if "prompts" in args.only:
            measured["prompts"] = prompt_rows(args.quick, seconds)
    if "collectives" in args.only:
        measured["collectives"] = collective_rows(seconds / 4)
    print_tables(measured)
    if args.json:
        args.json.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
