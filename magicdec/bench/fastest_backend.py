"""What `--attention auto` becomes on CUDA: the fastest, by measurement, of the backends that can be
loaded and agree with the reference.

Owns the choice and its reason, which goes into the record. It is made once a run, on the leader's
device, after the process group has started; the other ranks take it over. Must not know how a
backend computes.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from magicdec.attention.backend import AttentionBackend
from magicdec.bench.environment import missing_backends
from magicdec.bench.loading import make_backend
from magicdec.bench.timing import synchronize
from magicdec.bench.working_memory import max_tokens
from magicdec.config import RunConfig
from magicdec.distributed.groups import Group
from magicdec.distributed.tensor_parallel import Shard
from magicdec.kv.cache import CacheShape, KVCache
from magicdec.kv.full import FullKV
from magicdec.kv.policy import KVView, make_view
from magicdec.machine import (
    CUDA_ONLY,
    TO_BE_MEASURED,
    WITHOUT_MASS,
    WITHOUT_WINDOW,
    Machine,
    backend_obstacle,
)
from magicdec.model.config import ModelConfig
from magicdec.names import ATTENTION_BACKENDS

REFERENCE = "sdpa"
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # absolute, for keys and values of norm 1
REPEATS = 10
MOST_BYTES = 1 << 30  # of keys and values that a measurement makes


@dataclass(frozen=True)
class Shape:
    """Of the attention that is measured: one rank's heads of one layer."""

    rows: int
    context: int
    num_new: int  # of a verification; a decode step of one token is measured too
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Measured:
    """`seconds` of a decode step's attention and a verification's; `output` of the latter."""

    seconds: float
    output: Tensor


def settle(
    config: RunConfig, target: ModelConfig, draft: ModelConfig | None, group: Group,
    device: torch.device,
) -> RunConfig:  # fmt: skip
    """`config`, resolved, with measured names where a backend was left to be measured. Every rank
    of `group` calls it."""
    attention, section = config.attention, config.draft
    if attention.backend_reason == TO_BE_MEASURED:
        name, reason = _agreed(config, target, group, device)
        config = replace(config, attention=replace(attention, backend=name, backend_reason=reason))
    if section is not None and draft is not None and section.backend_reason == TO_BE_MEASURED:
        name, reason = _agreed(config, draft, group, device)
        config = replace(config, draft=replace(section, backend=name, backend_reason=reason))
    return config.resolve_graphs()


def _agreed(
    config: RunConfig, model: ModelConfig, group: Group, device: torch.device
) -> tuple[str, str]:
    """The leader's choice for a model, told to all and printed."""
    choice = None
    if group.index == 0:
        shape = measured_shape(config, model, group.size)
        candidates, left_out = list_candidates(config, model)
        choice = choose_fastest(candidates, left_out, lambda name: measure(name, shape, device))
        print(f"--attention {choice[1]}", file=sys.stderr, flush=True)
    found = group.all_gather_object(choice)[0]
    assert found is not None, "the leader has chosen"
    return found


def measured_shape(config: RunConfig, model: ModelConfig, num_ranks: int) -> Shape:
    """The run's own batch and context, with fewer rows where they would take too much memory."""
    w, drafted = config.workload, config.decoding.most_draft_tokens
    dtype = getattr(torch, config.model.dtype)
    (first, last), (kv_first, kv_last) = Shard(0, num_ranks).heads(
        model.num_heads, model.num_kv_heads
    )
    size, kv_heads = model.cached_head_dim, kv_last - kv_first
    row_bytes = 2 * (w.prefix_len + drafted + 1) * kv_heads * size * dtype.itemsize
    rows = max(1, min(w.batch_size, MOST_BYTES // row_bytes))
    return Shape(rows, w.prefix_len, drafted + 1, last - first, kv_heads, size, dtype)


def list_candidates(config: RunConfig, model: ModelConfig) -> tuple[list[str], dict[str, str]]:
    """(names to measure, why others are left out)."""
    device, dtype = config.parallel.device, config.model.dtype
    missing = missing_backends(("triton", *CUDA_ONLY))
    machine = Machine(num_cpus=1, has_compiler=True, missing_backends=missing)
    needs_mass = config.decoding.drafter == "self" and config.kv.policy == "verified"
    longest = max_tokens(config)
    candidates, left_out = [], {}
    for name in ATTENTION_BACKENDS:
        obstacle = backend_obstacle(name, device, machine, model.cached_head_dim, dtype)
        if needs_mass and name in WITHOUT_MASS:
            obstacle = obstacle or "it does not tell where the attention goes"
        if name in WITHOUT_WINDOW and (model.sliding_window or longest) < longest:
            obstacle = obstacle or "it does not keep to a sliding window"
        if name == "grouped" and (model.positions, dtype) == ("alibi", "bfloat16"):
            obstacle = "it rounds scores to bfloat16, too coarse for ALiBi"
        if obstacle is None:
            candidates.append(name)
        elif name != "native":
            left_out[name] = obstacle
    return candidates, left_out


def choose_fastest(
    candidates: Sequence[str],
    left_out: Mapping[str, str],
    measure_one: Callable[[str], Measured],
) -> tuple[str, str]:
    """(name, why) of the fastest candidate whose output is the reference's. What fails to load or
    to run is left out like `left_out`, and said."""
    reference = measure_one(REFERENCE)
    seconds, out = {REFERENCE: reference.seconds}, dict(left_out)
    for name in candidates:
        if name == REFERENCE:
            continue
        try:
            found = measure_one(name)
        except Exception as error:  # whatever a library or a compiler raises: it is no candidate
            out[name] = (str(error).strip() or type(error).__name__).splitlines()[0]
            continue
        off = float((found.output.float() - reference.output.float()).abs().max())
        if not off < TOLERANCE[reference.output.dtype]:  # not a number is no agreement either
            out[name] = f"its output is {off:.1e} away from that of {REFERENCE}"
            continue
        seconds[name] = found.seconds
    fastest = min(seconds, key=lambda name: seconds[name])
    ranked = sorted(seconds, key=lambda name: seconds[name])
    times = ", ".join(f"{name} {1e3 * seconds[name]:.3f} ms" for name in ranked)
    reasons = "".join(f"; {name}: {why}" for name, why in out.items())
    return fastest, f"auto: {times}{reasons}"


def measure(name: str, shape: Shape, device: torch.device) -> Measured:
    """Time a backend on random keys and values, the same for every backend."""
    backend = make_backend(name)
    generator = torch.Generator(device).manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=device).to(shape.dtype)

    cache = _filled_cache(backend, shape, device, random)
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    total, output = 0.0, torch.empty(0)
    for num_new in (1, shape.num_new):
        q, k, v = (random(shape.rows, num_new, n, shape.head_dim) for n in heads)
        view = make_view(cache, range(shape.rows), FullKV(), num_new)
        seconds, output = _time(backend, view, q, k, v)
        total += seconds
    return Measured(total, output)


def _filled_cache(
    backend: AttentionBackend, shape: Shape, device: torch.device, random: Callable[..., Tensor]
) -> KVCache:
    """One layer whose rows hold `context` tokens."""
    longest = shape.context + shape.num_new
    block = backend.block_size(longest)
    per_row = -(-longest // block)
    layout, num_blocks = backend.layout(shape.dtype), shape.rows * per_row
    sizes = CacheShape(1, shape.num_kv_heads, shape.head_dim, block, num_blocks, layout)
    cache = KVCache(sizes, shape.rows, per_row, shape.dtype, device)
    positions = torch.arange(shape.context, device=device).unsqueeze(0)
    for row in range(shape.rows):
        cache.allocate(row, longest)
        slots = cache.slots(torch.tensor([row], device=device), positions)
        k, v = (random(1, shape.context, shape.num_kv_heads, shape.head_dim) for _ in "kv")
        cache.write(0, slots, k, v)
        cache.advance([row], shape.context)
    return cache


def _time(
    backend: AttentionBackend, view: KVView, q: Tensor, k: Tensor, v: Tensor
) -> tuple[float, Tensor]:
    """(median seconds, output) of plan and one layer; the first calls, which may compile, are not
    counted."""
    device, seconds = q.device, []
    for repeat in range(REPEATS + 3):
        synchronize(device)
        started = time.perf_counter()
        backend.plan(view)
        output = backend.run(0, q, k, v, view)
        synchronize(device)
        if repeat >= 3:
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), output
