"""Measures attention for `magicdec probe --attention`: every backend that can serve a run, over the
reads of one step (drafts and verification, or decode forward), in one layer, on random K and V, on
all ranks at once.

A run measures none of this: `--attention auto` is a table (`config/choices/backend.py`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from magicdec.attention.backend import AttentionBackend
from magicdec.config.capabilities import Capabilities, capabilities_of
from magicdec.config.choices.backend import AttentionCase
from magicdec.config.resolved import ResolvedConfig
from magicdec.config.sections import SELF
from magicdec.distributed.groups import Group
from magicdec.distributed.tensor_parallel import Shard
from magicdec.hardware.timing import seconds_of, synchronize
from magicdec.kv.cache import BatchRows, KVCache
from magicdec.kv.layer_views import LayerWindows
from magicdec.kv.pool import CacheShape
from magicdec.kv.view import FULL, WEIGHTS_BLOCK, KVView, Visible, make_view
from magicdec.model.config import ModelConfig
from magicdec.names import ATTENTION_BACKENDS, BASELINE, FULL_KV_POLICY, REFERENCE_BACKEND
from magicdec.setup.loading import make_backend
from magicdec.setup.model_plan import max_tokens
from magicdec.setup.prepare import ResolvedRun, traits_of
from magicdec.speculation.block_kv import BlockRanges, BlockSelection
from magicdec.speculation.policies.policy import load_policy, make_policy
from magicdec.speculation.steps.recorder import Eager, Recorder, make_recorder

MOST_BYTES = 1 << 30  # of keys and values that a measurement makes


@dataclass(frozen=True)
class Read:
    """Equal forwards of a step: `times` a step, `num_new` tokens a row attend to what `policy`
    shows of `context` tokens, within the sliding `window`, if any, in a `share` of the layers."""

    times: int
    num_new: int
    context: int
    policy: Visible
    window: int | None = None
    returns_weights: bool = False  # where the attention goes is asked too
    share: float = 1.0


@dataclass(frozen=True)
class Step:
    """A step of `rows` with one rank's heads."""

    name: str
    reads: tuple[Read, ...]
    rows: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    num_layers: int
    room: int  # tokens that rows may come to hold after the context


def target_step(config: ResolvedConfig, model: ModelConfig) -> Step:
    """The step of the run's own strategy. Its baseline uses the same backend, which may not be its
    fastest."""
    d = config.decoding
    context = config.workload.prefix_len
    num_ranks = len(config.parallel.rank_group)
    if d.strategy == BASELINE:
        decode = _of_layers(Read(1, 1, context, FULL), config, model)
        return _make_step("a decode forward", decode, config, model, num_ranks)
    num_new = d.max_gamma + 1
    is_self = d.model_drafter == SELF
    watches = is_self and load_policy(config.kv.policy).needs_weights
    reads = _of_layers(Read(1, num_new, context, FULL, None, watches), config, model)
    name = f"a verification of {num_new} tokens"
    if is_self:
        drafts_name, drafts = _drafts(config, model)
        name = f"{drafts_name} and {name}"
        reads = (*drafts, *reads)
    return _make_step(name, reads, config, model, num_ranks)


def draft_step(config: ResolvedConfig, model: ModelConfig) -> Step:
    assert config.draft is not None
    name, drafts = _drafts(config, model)
    return _make_step(name, drafts, config, model, len(config.draft.rank_group))


def _drafts(config: ResolvedConfig, model: ModelConfig) -> tuple[str, tuple[Read, ...]]:
    """The draft forwards of a step, and their name. All count as the first, which sees a few tokens
    fewer."""
    kv = config.kv
    times = config.decoding.max_draft_forwards
    policy = make_policy(config.kv)
    of = "" if kv.policy == FULL_KV_POLICY else f", budget {kv.budget}"
    context, visible = policy.draft_reads(config.workload.prefix_len)
    reads = _of_layers(Read(times, 1, context, visible), config, model)
    if config.draft is not None and policy.can_roll:
        # A cache that rolls is no longer than the widest window (`RollingRunner.layer_windows`).
        reads = (replace(reads[0], window=None), *reads[1:])
    return f"{times} drafts ({kv.policy}{of})", reads


def _of_layers(read: Read, config: ResolvedConfig, model: ModelConfig) -> tuple[Read, ...]:
    """`read` in the layers with each window that rows grow past, the widest first."""
    longest = read.context + max_tokens(config) - config.workload.prefix_len
    windows = LayerWindows.make([kind.window for kind in model.kinds], longest)
    reads = list[Read]()
    for window, count in zip(windows.distinct, windows.num_layers, strict=True):
        policy = read.policy.in_narrow_layers() if reads else read.policy
        share = count / model.num_layers
        reads.append(replace(read, policy=policy, window=window, share=share))
    return tuple(reads)


def _make_step(
    name: str, reads: tuple[Read, ...], config: ResolvedConfig, model: ModelConfig, num_ranks: int
) -> Step:
    """A step of the run's batch, with fewer rows where memory is short."""
    dtype = getattr(torch, config.model.dtype)
    size = model.cached_head_dim
    heads = Shard(0, num_ranks).heads(model.num_heads, model.num_kv_heads)
    num_heads, kv_heads = (last - first for first, last in heads)
    room = max_tokens(config) - config.workload.prefix_len
    longest = max(read.context for read in reads) + room
    row_bytes = 2 * longest * kv_heads * size * dtype.itemsize
    rows = max(1, min(config.workload.batch_size, MOST_BYTES // row_bytes))
    return Step(name, reads, rows, num_heads, kv_heads, size, dtype, model.num_layers, room)


REPEATS = 10
WARMUPS = 3  # forwards before: kernels are compiled
MOST_LAYERS = 8  # that share one `plan` here; a model's further layers take as long each

Random = Callable[..., Tensor]


@dataclass(frozen=True)
class MeasuredAttention:
    """Seconds of a layer's attention in a step, on average, and an output for each of its reads."""

    seconds: float
    outputs: tuple[Tensor, ...]


def measure(
    name: str, step: Step, device: torch.device, recorder: Recorder = Eager()
) -> MeasuredAttention:
    """Times a backend over a step, replayed if the run records its steps and the backend can be
    recorded. Random keys, queries and choices are the same for all backends."""
    recorder = recorder if capabilities_of(name).can_be_recorded else Eager()
    seconds = 0.0
    outputs = []
    for read in step.reads:
        once, output = measure_read(make_backend(name), read, step, device, recorder)
        seconds += read.share * read.times * once
        outputs.append(output)
    return MeasuredAttention(seconds, tuple(outputs))


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
    num_layers = min(step.num_layers, MOST_LAYERS)
    view = _make_view(cache, read, visible, recorder.captures)

    def forward() -> Tensor:
        """A plan and `num_layers` layers, all over the cache's only one."""
        backend.plan(view)
        output = q
        for _ in range(num_layers):
            if read.returns_weights:
                output, _ = backend.run_with_weights(0, q, k, v, view)
            else:
                output = backend.run(0, q, k, v, view)
        return output

    for _ in range(WARMUPS):
        output = forward()
    synchronize(device)
    repeat = recorder.record(forward)

    def keep_output() -> None:
        nonlocal output
        output = repeat()

    seconds = [seconds_of(keep_output, device) for _ in range(REPEATS)]
    return statistics.median(seconds) / num_layers, output.clone()


def _make_view(cache: KVCache, read: Read, visible: Visible, is_captured: bool) -> KVView:
    tail = read.times + 1 if is_captured else None
    rows = BatchRows.of(range(len(cache.lengths)), cache.seq_lens.device, tail)
    # The tail of a draft is bounded too, where it is captured.
    committed = cache.lengths_of(rows) if is_captured and read.num_new == 1 else None
    return make_view(cache, rows, visible, read.num_new, committed, read.window)


def _choose(read: Read, cache: KVCache, random: Random) -> Visible:
    """The visible part of the rows; blocks as if heads had scored them at random."""
    policy = read.policy
    if not isinstance(policy, BlockSelection):
        return policy
    policy = replace(policy, sliding_window=read.window)
    blocks = -(-max(cache.lengths) // WEIGHTS_BLOCK)
    scores = random(1, len(cache.lengths), cache.shape.num_kv_heads, blocks).abs()
    most = max(policy.split(length)[1] for length in cache.lengths)
    return BlockRanges(policy, policy.top_blocks(cache.seq_lens, scores, most))


def _filled_cache(
    backend: AttentionBackend, read: Read, step: Step, device: torch.device, random: Random
) -> KVCache:
    """A cache of one layer whose rows hold the context."""
    longest = read.context + step.room
    block = backend.block_size(longest)
    per_row = -(-longest // block)
    layout = backend.layout(step.dtype)
    num_blocks = step.rows * per_row
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


TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # of the largest output, or of 1


@dataclass(frozen=True)
class BackendTime:
    """Seconds of a layer in each step, or the obstacle that prevented them."""

    name: str
    seconds: tuple[float, ...] = ()
    obstacle: str = ""


def steps_of(run: ResolvedRun) -> list[tuple[ModelConfig, Step]]:
    models = run.models
    config = run.config
    steps = [(models.target, target_step(config, models.target))]
    if models.draft is not None:
        steps.append((models.draft, draft_step(config, models.draft)))
    return steps


def measure_backends(run: ResolvedRun, group: Group, device: torch.device) -> Iterator[BackendTime]:
    """The times of every backend for this device, on the slowest rank, the reference first. A
    backend that cannot serve, fails or computes other outputs has its obstacle instead. Every rank
    of `group` calls this."""
    recorder = make_recorder(run.config.decoding, device)
    steps = [step for _, step in steps_of(run)]

    def measure_one(name: str) -> list[MeasuredAttention]:
        return [measure(name, step, device, recorder) for step in steps]

    candidates, left_out = list_candidates(run)
    reference = measure_one(REFERENCE_BACKEND)
    for name in [REFERENCE_BACKEND, *(name for name in candidates if name != REFERENCE_BACKEND)]:
        own = time_backend(name, measure_one, reference)
        parts = list(own.seconds), own.obstacle
        by_rank = group.all_gather_values(parts, tuple[list[float], str])
        obstacle = next((why for _, why in by_rank if why), "")
        slowest = map(max, zip(*(seconds for seconds, _ in by_rank), strict=True))
        yield BackendTime(name, () if obstacle else tuple(slowest), obstacle)
    for name, obstacle in left_out.items():
        yield BackendTime(name, obstacle=obstacle)


def time_backend(
    name: str,
    measure_one: Callable[[str], Sequence[MeasuredAttention]],
    reference: Sequence[MeasuredAttention],
) -> BackendTime:
    """The times of a backend on this rank. Its outputs must be the reference's."""
    if name == REFERENCE_BACKEND:
        return BackendTime(name, tuple(each.seconds for each in reference))
    try:
        found = measure_one(name)
        for ours, theirs in zip(found, reference, strict=True):
            check_outputs(ours.outputs, theirs.outputs)
    except Exception as error:  # whatever a library or a compiler raises: it is no candidate
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        return BackendTime(name, obstacle=line)
    return BackendTime(name, tuple(each.seconds for each in found))


def list_candidates(run: ResolvedRun) -> tuple[list[str], dict[str, str]]:
    """(names to measure, obstacles of the others), among backends for this device."""
    config = run.config
    models = run.models
    policy = config.kv.policy if config.decoding.model_drafter == SELF else None
    cases = [case_of(config, models.target, policy)]
    if models.draft is not None:
        cases.append(case_of(config, models.draft, None))
    candidates = list[str]()
    left_out = dict[str, str]()
    for capabilities in map(capabilities_of, ATTENTION_BACKENDS):
        if config.parallel.device not in capabilities.devices:
            continue
        obstacles = (each.obstacle(capabilities, run.machine) for each in cases)
        obstacle = next(filter(None, obstacles), None) or _keeps_from_graphs(capabilities, config)
        if obstacle is None:
            candidates.append(capabilities.name)
        else:
            left_out[capabilities.name] = obstacle
    return candidates, left_out


def case_of(config: ResolvedConfig, model: ModelConfig, policy: str | None) -> AttentionCase:
    device = config.parallel.device
    dtype = config.model.dtype
    return AttentionCase(device, dtype, traits_of(model), max_tokens(config), policy)


def _keeps_from_graphs(capabilities: Capabilities, config: ResolvedConfig) -> str | None:
    """The obstacle to capturing the run's steps with this backend, if any."""
    if capabilities.can_be_recorded or config.decoding.cuda_graphs == "off":
        return None
    return f"{capabilities.name} needs lengths on the host; --cuda_graphs off measures it"


def fastest_of(times: Sequence[BackendTime], num_layers: Sequence[int]) -> BackendTime:
    served = [each for each in times if each.seconds]
    return min(served, key=lambda each: step_seconds(each, num_layers))


def step_seconds(time: BackendTime, num_layers: Sequence[int]) -> float:
    return sum(n * seconds for n, seconds in zip(num_layers, time.seconds, strict=True))


def check_outputs(outputs: Sequence[Tensor], reference: Sequence[Tensor]) -> None:
    """Raises ValueError if outputs are not the reference's."""
    for ours, theirs in zip(outputs, reference, strict=True):
        off = float((ours.float() - theirs.float()).abs().max())
        largest = max(1.0, float(theirs.abs().max()))  # above 1 where few keys are averaged
        if not off < TOLERANCE[theirs.dtype] * largest:  # not a number is no agreement either
            raise ValueError(f"its output is {off:.1e} away from that of {REFERENCE_BACKEND}")
