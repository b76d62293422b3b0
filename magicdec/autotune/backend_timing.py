"""How long a backend takes over the attention of a step, on random keys and values.

Owns the measurement. Must not know who is compared, nor what a step is made of.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from magicdec.attention.backend import AttentionBackend
from magicdec.autotune.attention_step import Read, Step
from magicdec.config.capabilities import capabilities_of
from magicdec.decoding.recorder import Eager, Recorder
from magicdec.drafting.block_kv import BlockSelection, ChosenBlocks
from magicdec.hardware.timing import synchronize
from magicdec.kv.cache import BatchRows, KVCache
from magicdec.kv.pool import CacheShape
from magicdec.kv.view import WEIGHTS_BLOCK, KVView, make_view
from magicdec.kv.visible import Visible
from magicdec.setup.loading import make_backend

REPEATS = 10
WARMUPS = 3  # forwards before: kernels are compiled
MOST_LAYERS = 8  # that share one `plan` here; a model's further layers take as long each

Random = Callable[..., Tensor]


@dataclass(frozen=True)
class Measured:
    """`seconds` of a layer's attention in a step; `outputs`, one for each of the step's reads."""

    seconds: float
    outputs: tuple[Tensor, ...]


def measure(name: str, step: Step, device: torch.device, recorder: Recorder = Eager()) -> Measured:
    """Time a backend over each read of a step, replayed if the run records its steps and the
    backend lets it. Keys, queries and what is chosen of them are random, and the same for every
    backend."""
    seconds, outputs = 0.0, []
    for read in step.reads:
        kept = recorder if capabilities_of(name).can_be_recorded else Eager()
        once, output = measure_read(make_backend(name), read, step, device, kept)
        seconds += read.times * once
        outputs.append(output)
    return Measured(seconds, tuple(outputs))


def measure_read(
    backend: AttentionBackend,
    read: Read,
    step: Step,
    device: torch.device,
    recorder: Recorder = Eager(),
) -> tuple[float, Tensor]:
    """(seconds a layer of one forward, output [B,T,H,D])."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=device)

    cache = _filled_cache(backend, read, step, device, random)
    visible = _choose(read, cache, random)
    heads = (step.num_heads, step.num_kv_heads, step.num_kv_heads)
    q, k, v = (random(step.rows, read.num_new, n, step.head_dim).to(step.dtype) for n in heads)
    attend = _with_weights(backend) if read.returns_weights else backend.run
    num_layers = min(step.num_layers, MOST_LAYERS)
    view = _make_view(cache, read, visible, recorder.captures)

    def forward() -> Tensor:
        """A plan and so many layers, all over the cache's only one."""
        backend.plan(view)
        output = q
        for _ in range(num_layers):
            output = attend(0, q, k, v, view)
        return output

    seconds, output = _time(forward, device, recorder)
    return seconds / num_layers, output


def _time(
    work: Callable[[], Tensor], device: torch.device, recorder: Recorder
) -> tuple[float, Tensor]:
    """(median seconds, result) of `work`, recorded after a warm-up."""
    for _ in range(WARMUPS):
        output = work()
    synchronize(device)
    work = recorder.record(work)
    seconds = []
    for _ in range(REPEATS):
        synchronize(device)
        started = time.perf_counter()
        output = work()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), output.clone()


def _make_view(cache: KVCache, read: Read, visible: Visible, is_captured: bool) -> KVView:
    """As a forward of the run makes it."""
    tail = read.times + 1 if is_captured else None
    rows = BatchRows.of(range(len(cache.lengths)), cache.seq_lens.device, tail)
    # The tail of a draft is bounded too, where it is captured.
    committed = cache.lengths_of(rows) if is_captured and read.num_new == 1 else None
    return make_view(cache, rows, visible, read.num_new, committed, read.window)


def _with_weights(backend: AttentionBackend) -> Callable[..., Tensor]:
    """As the backend's `run`, where the attention went being asked too."""

    def run(layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView) -> Tensor:
        return backend.run_with_weights(layer, q, k, v, view)[0]

    return run


def _choose(read: Read, cache: KVCache, random: Random) -> Visible:
    """What the rows of `cache` show; blocks as if each head had scored them otherwise."""
    policy = read.policy
    if not isinstance(policy, BlockSelection):
        return policy
    policy = replace(policy, sliding_window=read.window)
    blocks = -(-max(cache.lengths) // WEIGHTS_BLOCK)
    scores = random(1, len(cache.lengths), cache.shape.num_kv_heads, blocks).abs()
    most = max(policy.split(length)[1] for length in cache.lengths)
    return ChosenBlocks(policy, policy.top_blocks(cache.seq_lens, scores, most))


def _filled_cache(
    backend: AttentionBackend, read: Read, step: Step, device: torch.device, random: Random
) -> KVCache:
    """One layer whose rows hold the context."""
    longest = read.context + step.room
    block = backend.block_size(longest)
    per_row = -(-longest // block)
    layout, num_blocks = backend.layout(step.dtype), step.rows * per_row
    sizes = CacheShape(1, step.num_kv_heads, step.head_dim, block, num_blocks, layout)
    cache = KVCache(sizes, step.rows, per_row, step.dtype, device)
    positions = torch.arange(read.context, device=device).unsqueeze(0)
    for row in range(step.rows):
        cache.allocate(row, longest)
        slots = cache.slots(torch.tensor([row], device=device), positions)
        k, v = (random(1, read.context, step.num_kv_heads, step.head_dim) for _ in "kv")
        cache.write(0, slots, k.to(step.dtype), v.to(step.dtype))
        cache.advance([row], read.context)
    return cache
