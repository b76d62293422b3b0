"""Compare int8 and bfloat16 draft KV caches: times of attention, and of self-speculation.

    python scripts/bench_int8_kv.py --threads 1          # about 5 minutes

The first table times single attention calls, alternately with each cache: cold, over more layers
than fit into the CPU cache, and over a few layers that stay in the last-level cache. The second
table times steps of self-speculation with SnapKV on the demo model. From the same position in the
same text, every combination of budget and cache drafts and is verified, in random order, and its
step is undone. So their acceptance and times are paired. Then one of them advances the text.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from rich.console import Console
from rich.table import Table

from magicdec.attention.native import NativeBackend, attention
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import DecodingSection, KVSection, ModelSection, WorkloadSection
from magicdec.console import make_progress
from magicdec.decoding.speculative import Speculative
from magicdec.decoding.steps import Steps
from magicdec.distributed.groups import Group, read_launch
from magicdec.drafting.draft_length import FixedLength
from magicdec.drafting.policies.snapkv import CopiedKV, SnapKV
from magicdec.drafting.self_drafter import SelfDrafter
from magicdec.kv.cache import KVCache
from magicdec.kv.pool import CacheShape
from magicdec.memory.model_plan import Kinds
from magicdec.prefill import prefill
from magicdec.records.metrics import percentile
from magicdec.request import Batch, Request, SamplingParams
from magicdec.runner import ModelRunner
from magicdec.scheduling.plan import Part
from magicdec.setup.loading import load_model, make_backend
from magicdec.setup.prepare import Prepared, prepare

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.int8)
COLD_BYTES, WARM_BYTES = 256 << 20, 8 << 20  # bfloat16 KV of all layers together
WINDOW = 32  # SnapKV's observation window, in tokens
Way = tuple[int, torch.dtype]  # KV budget and dtype of the draft KV cache


@dataclass
class Samples:
    """Seconds of drafting and of whole steps, and accepted draft tokens of each row and step."""

    draft: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


class Clock:
    """Seconds of the last phase of each name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started


def filled(dtype: torch.dtype, B: int, heads: int, size: int, tokens: int, layers: int) -> KVCache:
    """A KV cache with the same random K and V in every layer."""
    torch.manual_seed(0)
    room = -(-tokens // 64) * 64
    shape = CacheShape(layers, heads, size, room, B, NativeBackend().layout(dtype))
    cache = KVCache(shape, B, 1, dtype, CPU)
    for row in range(B):
        cache.allocate(row, room)
    k, v = (torch.randn(B, room, heads, size).to(torch.bfloat16) for _ in "kv")
    cache.write(0, cache.slots(torch.arange(B), torch.arange(room).expand(B, -1)), k, v)
    cache.k[1:], cache.v[1:] = cache.k[0], cache.v[0]
    return cache


def time_kernel(
    B: int, queries: int, heads: int, size: int, cached: int, T: int, is_cold: bool, seconds: float
) -> list[str]:
    one = 4 * B * heads * (cached + T) * size
    layers = -(-COLD_BYTES // one) if is_cold else max(1, WARM_BYTES // one)
    caches = [filled(dtype, B, heads, size, cached + T, layers) for dtype in DTYPES]
    q = torch.randn(B, T, queries, size).to(torch.bfloat16)
    k, v = (torch.randn(B, T, heads, size).to(torch.bfloat16) for _ in "kv")
    rows, lens = torch.arange(B), torch.full((B,), cached)
    ranges = torch.tensor([0, cached + T]).repeat(B, 1).view(B, 1, 1, 2).contiguous()
    samples: list[list[float]] = [[], []]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for way in random.sample((0, 1), 2):
            cache = caches[way]
            for turn in range(1 if is_cold else 4):  # the first turn only warms the cache
                for i in range(layers):
                    started = time.perf_counter()
                    attention(q, k, v, cache.k[i], cache.v[i], cache.block_table, rows, lens,
                              ranges, 0, False)  # fmt: skip
                    if is_cold or turn:
                        samples[way].append(time.perf_counter() - started)
    low, middle = zip(*(tenth_and_median(s) for s in samples), strict=True)
    cells = [f"{low[i] * 1e6:.0f} ({middle[i] * 1e6:.0f})" for i in range(2)]
    place = f"{'cold' if is_cold else 'cached'}, {queries // heads} queries a head, T={T}"
    gain = f"{low[0] / low[1]:.2f} ({middle[0] / middle[1]:.2f})"
    return [place, *map(str, (size, B, cached)), *cells, gain, f"{one / low[0] / 1e9:.1f}"]


def tenth_and_median(seconds: Sequence[float]) -> tuple[float, float]:
    tenth = percentile(seconds, 10)
    assert tenth is not None, "there are samples"
    return tenth, statistics.median(seconds)


def kernel_table(seconds: float) -> Table:
    names = ("attention, us: 10th percentile (median)", "D", "B", "cached", "bfloat16", "int8")
    table = Table(*names, "gain", "bfloat16, GB/s")
    for size in (64, 128):
        for cached in (257, 1025, 2049):
            for B in (1, 8, 32):
                for is_cold in (True, False):
                    if is_cold or 16 * B * (cached + 1) * size <= 2 * WARM_BYTES:
                        table.add_row(*time_kernel(B, 4, 4, size, cached, 1, is_cold, seconds))
    table.add_row(*time_kernel(8, 8, 2, 64, 2049, 1, True, seconds))
    table.add_row(*time_kernel(8, 8, 8, 64, 2049, 4, True, seconds))
    return table


def time_steps(args: argparse.Namespace, prepared: Prepared) -> dict[Way, Samples]:
    config, group = prepared.config, Group((0,), 0)
    kinds = replace(Kinds.of(config), weights="bfloat16")
    model = load_model(prepared.source, group, kinds, CPU, make_progress(False))
    found = {(budget, dtype): Samples() for budget in args.budget for dtype in DTYPES}
    prompts, room = prepared.workload.prompts, config.workload.num_new_tokens
    for first in range(0, len(prompts), args.B):
        runner = ModelRunner(
            model, make_backend("native"), group, args.B, args.prefix_len + room, max_following=room
        )
        requests = tuple(
            Request(first + row, prompts[first + row], SamplingParams(room), row=row)
            for row in range(args.B)
        )
        batch = Batch(requests)
        for row in batch.rows:
            runner.allocate(row)
        output = prefill(runner, Part.whole(requests), 512)
        for request, tokens in zip(requests, output.token_ids, strict=True):
            request.output_ids.extend(tokens)
        ways: dict[Way, Speculative] = {}
        for budget, dtype in found:
            own = None if dtype == torch.bfloat16 else dtype
            drafter = SelfDrafter(CopiedKV(runner, SnapKV(budget, WINDOW), own))
            steps = Steps(runner, drafter, Clock())
            ways[budget, dtype] = Speculative(runner, drafter, FixedLength(args.gamma), steps)
            ways[budget, dtype].admit(batch)
        for number in range(args.steps):
            one_step(batch, runner, ways, found, list(ways)[number % len(ways)], args.rounds)
    return found


def one_step(
    batch: Batch, runner: ModelRunner, ways: dict[Way, Speculative], found: dict[Way, Samples],
    ahead: Way, rounds: int,
) -> None:  # fmt: skip
    """Run and undo a step of every way `rounds` times; then a step of `ahead`, which is kept."""
    rows = batch.rows
    before = [runner.cache.lengths[row] for row in rows]
    order = [way for _ in range(rounds) for way in random.sample(list(ways), len(ways))]
    for number, way in enumerate([*order, ahead]):
        strategy, samples = ways[way], found[way]
        started = time.perf_counter()
        output = strategy.step(batch)
        seconds = time.perf_counter() - started
        if number < len(order):
            assert isinstance(strategy.steps.phase, Clock)
            samples.draft.append(strategy.steps.phase.seconds["draft"])
            samples.step.append(seconds)
            if number >= len(order) - len(ways):
                samples.accepted.extend(output.num_accepted or [])
            strategy.steps.undo(batch, before)
    for request, tokens in zip(batch.requests, output.token_ids, strict=True):
        request.output_ids.extend(tokens)
    lengths = [runner.cache.lengths[row] for row in rows]
    for other in ways.values():
        other.steps.undo(batch, lengths)


def step_table(args: argparse.Namespace, found: dict[Way, Samples]) -> Table:
    names = ("budget", "cache", "drafts, ms", "step, ms: 10th (median)", "acceptance", "difference")
    table = Table(*names, "tokens/s at the median", "step, paired")
    for (budget, dtype), samples in found.items():
        beside = found[budget, torch.bfloat16]
        pairs = zip(samples.accepted, beside.accepted, strict=True)
        off = [(a - b) / args.gamma for a, b in pairs]
        error = statistics.stdev(off) / len(off) ** 0.5
        accepted = statistics.mean(samples.accepted)
        drafts, steps = tenth_and_median(samples.draft), tenth_and_median(samples.step)
        ratios = [a / b for a, b in zip(samples.step, beside.step, strict=True)]
        table.add_row(
            str(budget), str(dtype).removeprefix("torch."),
            *(f"{low * 1e3:.2f} ({mid * 1e3:.2f})" for low, mid in (drafts, steps)),
            f"{accepted / args.gamma:.4f}", f"{statistics.mean(off):+.4f} ± {error:.4f}",
            f"{args.B * (1 + accepted) / steps[1]:.0f}", f"{statistics.median(ratios):.3f}",
        )  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = {"B": 8, "prefix_len": 8192, "gamma": 3, "num_batches": 2, "steps": 20, "rounds": 4}
    for name, default in {**numbers, "threads": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"[{default}]")
    parser.add_argument("--budget", type=int, nargs="+", default=[257, 1025, 2049])
    parser.add_argument(
        "--seconds", type=float, default=1.5, help="per row of the first table; 0: skip it [1.5]"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    console = Console()
    if args.seconds:
        console.print(kernel_table(args.seconds))
    config = RunConfig(
        model=ModelSection("demo", "bfloat16"),
        kv=KVSection("snapkv", min(args.budget), window_size=WINDOW, draft_kv_dtype="int8"),
        decoding=DecodingSection("speculative", "self", args.gamma),
        workload=WorkloadSection(
            batch_size=args.B, prefix_len=args.prefix_len, num_batches=args.num_batches,
            gen_len=(args.steps + 1) * (args.gamma + 1),
        ),
    )  # fmt: skip
    with torch.inference_mode():
        console.print(step_table(args, time_steps(args, prepare(config, read_launch()))))


if __name__ == "__main__":
    main()
