"""Measures a machine file's ceilings on all ranks at once, as they work in a run: memory bandwidth,
GEMM rate, all-reduce, attention over a long KV cache, and the overhead of a forward. An interrupted
probe keeps its finished dtypes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from magicdec.config.machine import Machine
from magicdec.config.resolve import Placement, resolve
from magicdec.config.resolved import ResolvedConfig
from magicdec.config.sections import ModelSection
from magicdec.distributed.groups import Group, Launch
from magicdec.distributed.tensor_parallel import Shard
from magicdec.hardware.ceiling_file import BY_DTYPE, Hardware, Link, MachineFile
from magicdec.hardware.costs import attention_flops, kv_bytes_per_token
from magicdec.hardware.other_load import LoadWatch
from magicdec.hardware.timing import read_bandwidths, seconds_of
from magicdec.model.checkpoint.random_weights import RandomWeights
from magicdec.model.checkpoint.source import ModelSource, find_model
from magicdec.model.checkpoint.weight_map import expected_shapes
from magicdec.model.config import ModelConfig
from magicdec.names import ATTENTION_BACKENDS, DTYPES, load_named
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.runner.model_runner import ModelRunner, greedy
from magicdec.setup.loading import load_kind, make_executor
from magicdec.setup.model_plan import Kinds
from magicdec.setup.session import RankSession

# all-reduces bound by latency and by bandwidth
SMALL_BYTES = 1 << 10
LARGE_BYTES = 1 << 24
STRETCHES = 5
# Calls in a stretch: as many as take STRETCH_S seconds, but between these two.
FEWEST_ROUNDS = 5
ROUNDS = 30
STRETCH_S = 0.5
# cached tokens per row: attention takes almost no time, or most of it
CACHED = 32
CONTEXT = 8192
# New tokens per row in a verification of the 8 drafts of a plan. With fewer, attention still waits
# for memory, whose rate would be taken for the most that attention computes.
MANY = 9
# Models whose layers take hardly any time but their overhead: they have 28,672 weights each.
FEW, SEVERAL = (ModelConfig("small", 64, layers, 64, 64, 1, 1, 64, 64) for layers in (2, 10))


class Spreads(dict[str, float]):
    """The spread of each measurement's repetitions by its name: slowest / fastest - 1, without the
    first, which warms up."""

    def note(self, name: str, values: Sequence[float]) -> None:
        later = values[1:] or values
        self[name] = max(later) / min(later) - 1


def measure_hardware(
    group: Group, device: torch.device, dtype: str, bandwidth: float, spreads: Spreads
) -> Hardware:
    """Bandwidth and GEMM rate of the slowest rank; `measure_forwards` adds the rest."""
    rates = gemm_rates(getattr(torch, dtype), device)
    spreads.note(f"flops_per_s {dtype}", rates)
    return Hardware(bandwidth, min(group.all_gather_values(max(rates), float)))


def gemm_rates(dtype: torch.dtype, device: torch.device, size: int | None = None) -> list[float]:
    size = size or (8192 if device.type == "cuda" else 1024)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in "ab")
    return [2 * size**3 / seconds_of(lambda: a @ b, device) for _ in range(8)]


def measure_link(group: Group, device: torch.device, spreads: Spreads) -> Link | None:
    """The latency of a small all-reduce, and the bandwidth from a large one's additional time. None
    for one rank."""
    if group.size == 1:
        return None
    small, large = (torch.zeros(n // 4, device=device) for n in (SMALL_BYTES, LARGE_BYTES))
    latencies = stretch_seconds(lambda: group.all_reduce(small), group, device)
    spreads.note("link", latencies)
    latency = min(latencies)
    seconds = min(stretch_seconds(lambda: group.all_reduce(large), group, device))
    num_bytes = 2 * (group.size - 1) / group.size * LARGE_BYTES
    return Link(latency, num_bytes / max(seconds - latency, 1e-9))


def stretch_seconds(call: Callable[[], Any], group: Group, device: torch.device) -> list[float]:
    """Seconds of a call in each of several stretches: the median of its rounds on the slowest rank.
    Callers take the minimum, as other load rarely slows all stretches. A second call after the
    warm-up determines the number of rounds, equal on all ranks."""
    call()
    once = max(group.all_gather_values(seconds_of(call, device), float))
    rounds = min(ROUNDS, max(FEWEST_ROUNDS, int(STRETCH_S / once)))
    medians = []
    for _ in range(STRETCHES):
        samples = [seconds_of(call, device) for _ in range(rounds)]
        medians.append(max(group.all_gather_values(statistics.median(samples), float)))
    return medians


def measure_forwards(
    group: Group,
    device: torch.device,
    hardware: Hardware,
    kinds: Kinds,
    backend: str,
    spreads: Spreads,
) -> Hardware:
    """`hardware` with rates of attention over a long KV cache, from forwards of the demo model, and
    overheads of a layer, by which `SEVERAL` takes longer than `FEW`: the demo's weights may lie in
    a processor's cache, which outruns the memory. All models are whole on each rank."""
    num_rows = 32 if device.type == "cuda" else 4  # their KV exceeds the last-level cache
    load = partial(load_runner, group, device, kinds, backend)
    demo = load(find_model("--model", "demo"), num_rows, CONTEXT + MANY)
    small = [load(random_model(config), num_rows, CACHED + MANY) for config in (FEW, SEVERAL)]
    config = demo.model.config
    size = demo.cache.k.element_size()

    def fastest(name: str, runner: ModelRunner, num_rows: int, cached: int, num_new: int) -> float:
        """The fastest stretch; its spread is noted under `name`, if any."""
        stretches = forward_stretches(runner, range(num_rows), cached, num_new, group)
        if name:
            spreads.note(f"{name} {kinds.dtype}", stretches)
        return min(stretches)

    short = fastest("", demo, num_rows, CACHED, 1)
    long = fastest("kv_bytes_per_s", demo, num_rows, CONTEXT, 1)
    kv_bytes = num_rows * (CONTEXT - CACHED) * kv_bytes_per_token(config, Shard(), size)
    # Noise must not make attention look faster than memory.
    rate = min(hardware.read_bytes_per_s, kv_bytes / max(long - short, 1e-9))
    short = fastest("", demo, num_rows, CACHED, MANY)
    long = fastest("attention_flops_per_s", demo, num_rows, CONTEXT, MANY)
    flops = [num_rows * attention_flops(config, Shard(), MANY, n) for n in (CACHED, CONTEXT)]
    num_layers = SEVERAL.num_layers - FEW.num_layers
    few, several = (fastest("layer_overhead_s", runner, 1, CACHED, 1) for runner in small)
    layer_s = max(0.0, several - few) / num_layers
    few, several = (fastest("", runner, num_rows, CACHED, MANY) for runner in small)
    more_s = max(0.0, (several - few) / num_layers - layer_s)
    return replace(
        hardware,
        kv_bytes_per_s=rate,
        attention_flops_per_s=(flops[1] - flops[0]) / max(long - short, 1e-9),
        layer_overhead_s=layer_s,
        token_overhead_s=more_s / (num_rows * MANY - 1),
    )


def random_model(config: ModelConfig) -> ModelSource:
    weights = RandomWeights(expected_shapes(config))
    return ModelSource(config.name, config, weights, tokenizer_path=None, is_random=True)


def load_runner(
    group: Group,
    device: torch.device,
    kinds: Kinds,
    backend: str,
    source: ModelSource,
    num_rows: int,
    max_tokens: int,
) -> ModelRunner:
    """A whole model on this rank, with a cache full of equal numbers."""
    model = load_kind(source, Shard(), kinds, device)
    alone = Group((group.ranks[group.index],), 0)
    runner = ModelRunner(
        model,
        load_named(ATTENTION_BACKENDS, backend)(),
        alone,
        num_rows,
        max_tokens,
        executor=make_executor(kinds, model, alone),
    )
    for row in range(num_rows):
        runner.allocate(row)
    runner.caches.fill(0.1)
    return runner


def forward_stretches(
    runner: ModelRunner, rows: Sequence[int], cached: int, num_new: int, group: Group
) -> list[float]:
    """`stretch_seconds` of a forward with greedy sampling: `num_new` tokens for each of `rows`,
    which hold `cached` tokens."""
    runner.truncate(rows, [0] * len(rows))
    runner.cache.advance(rows, cached)
    new = torch.ones(len(rows), num_new, dtype=torch.long, device=runner.device)

    def step() -> None:
        logits = runner.forward(ForwardBatch(new, rows))
        greedy(logits, runner.model.head_rows[0], runner.group)[0].tolist()
        runner.truncate(rows, [cached] * len(rows))

    return stretch_seconds(step, group, runner.device)


def measure(config: ResolvedConfig, machine: Machine, launch: Launch) -> MachineFile:
    """Measures all ceilings. All ranks must call this together."""
    with RankSession(launch, config.parallel) as session:
        return measure_in(session, config, machine)


def measure_in(session: RankSession, config: ResolvedConfig, machine: Machine) -> MachineFile:
    """`measure` in an open session."""
    spreads = Spreads()
    by_dtype = dict[str, Hardware]()
    group = session.groups.target
    device = session.device
    launch = session.launch
    load = LoadWatch(launch.rank == 0)
    load.begin()
    rates = read_bandwidths(group, device)
    spreads.note("read_bytes_per_s", rates)
    bandwidth = max(rates) / group.size  # of one rank, while all read
    link = measure_link(group, device, spreads)
    # Between ranks of several hosts, the all-reduce was limited by their network.
    spans_nodes = launch.world_size > launch.local_world_size
    for dtype in DTYPES:
        hardware = measure_hardware(group, device, dtype, bandwidth, spreads)
        run_config = replace(config.run_config, model=ModelSection(dtype=dtype))
        alone = resolve(run_config, machine, placement=Placement(is_alone=True))
        kinds = replace(Kinds.of(alone), weights=dtype)
        by_dtype[dtype] = measure_forwards(
            group, device, hardware, kinds, config.attention.backend, spreads
        )
    load.end()
    description = asdict(load.add_to(session.describe_environment()))
    description["collectives"] = config.parallel.collectives
    del description["read_bandwidth_bytes_per_s"]  # a record's, of all ranks together
    by_name: dict[str, Any] = {
        name: {dtype: getattr(ceilings, name) for dtype, ceilings in by_dtype.items()}
        for name in BY_DTYPE
    }
    return MachineFile(
        description,
        bandwidth,
        link=None if spans_nodes else link,
        node_link=link if spans_nodes else None,
        spreads=dict(spreads),
        **by_name,
    )
