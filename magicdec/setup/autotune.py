"""What `--attention auto` becomes on CUDA: the fastest, by measurement, of the backends that can be
loaded and agree with the reference, over what a step of the run reads: its drafts and its
verification, or its decode forward, on one rank and in one layer, on random keys and values.

The choice is made once a run, on the leader's device, after the process group has started; the
other ranks take it over. Its reason goes into the record.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from magicdec.attention.backend import AttentionBackend
from magicdec.config.capabilities import Capabilities, capabilities_of, policy_called
from magicdec.config.choices.choice import Choice, How
from magicdec.config.machine import Machine
from magicdec.config.resolved import ResolvedConfig
from magicdec.distributed.groups import Group
from magicdec.distributed.tensor_parallel import Shard
from magicdec.hardware.environment import missing_backends
from magicdec.hardware.timing import seconds_of, synchronize
from magicdec.kv.cache import BatchRows, KVCache
from magicdec.kv.pool import CacheShape
from magicdec.kv.view import FULL, WEIGHTS_BLOCK, KVView, Visible, make_view
from magicdec.model.config import ModelConfig
from magicdec.names import ATTENTION_BACKENDS, FULL_KV_POLICY, REFERENCE_BACKEND
from magicdec.setup.loading import make_backend
from magicdec.setup.model_plan import max_tokens
from magicdec.speculation.block_kv import BlockRanges, BlockSelection
from magicdec.speculation.policies.policy import load_policy, make_policy
from magicdec.speculation.steps.recorder import CudaGraphs, Eager, Recorder

MOST_BYTES = 1 << 30  # of keys and values that a measurement makes


@dataclass(frozen=True)
class Read:
    """Forwards of a step that are alike: `times` a step, `num_new` tokens a row attend to what
    `policy` shows of `context` tokens, and to those of the sliding `window`, if there is one."""

    times: int
    num_new: int
    context: int
    policy: Visible
    window: int | None = None
    returns_weights: bool = False  # where the attention goes is asked too


@dataclass(frozen=True)
class Step:
    """`reads` of `rows` by one rank's heads; `name` says what they are."""

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
    """The step of the run's own strategy. A speculative run's baseline goes by the same backend,
    which is therefore the fastest for what the run is about, and perhaps not for the baseline."""
    d, context = config.decoding, config.workload.prefix_len
    window, num_ranks = _window(config, model, context), len(config.parallel.rank_group)
    if d.strategy == "autoregressive":
        decode = Read(1, 1, context, FULL, window)
        return _make_step("a decode forward", (decode,), config, model, num_ranks)
    num_new, is_self = d.most_draft_tokens + 1, d.model_drafter == "self"
    watches = is_self and load_policy(config.kv.policy).needs_weights
    reads: tuple[Read, ...] = (Read(1, num_new, context, FULL, window, watches),)
    name = f"a verification of {num_new} tokens"
    if is_self:
        drafts_name, drafts = _drafts(config, model)
        name, reads = f"{drafts_name} and {name}", (drafts, *reads)
    return _make_step(name, reads, config, model, num_ranks)


def draft_step(config: ResolvedConfig, model: ModelConfig) -> Step:
    """The step of a standalone draft, which has heads and ranks of its own."""
    assert config.draft is not None
    name, drafts = _drafts(config, model)
    return _make_step(name, (drafts,), config, model, len(config.draft.rank_group))


def _drafts(config: ResolvedConfig, model: ModelConfig) -> tuple[str, Read]:
    """The draft forwards of a step, and their name. Each is counted as the first; the few tokens
    that later ones see more are left out."""
    kv, times, policy = config.kv, config.decoding.num_draft_steps, make_policy(config.kv)
    of = "" if kv.policy == FULL_KV_POLICY else f", budget {kv.budget}"
    context, visible = policy.draft_reads(config.workload.prefix_len)
    # The cache of a draft that rolls is no longer than its window.
    rolls = config.draft is not None and policy.can_roll
    window = None if rolls else _window(config, model, context)
    return f"{times} drafts ({kv.policy}{of})", Read(times, 1, context, visible, window)


def _window(config: ResolvedConfig, model: ModelConfig, num_cached: int) -> int | None:
    """The model's sliding window, if rows that hold so many tokens after the prompt grow past
    it."""
    longest = num_cached + max_tokens(config) - config.workload.prefix_len
    window = model.sliding_window
    return None if window is None or window >= longest else window


def _make_step(
    name: str, reads: tuple[Read, ...], config: ResolvedConfig, model: ModelConfig, num_ranks: int
) -> Step:
    """A step of the run's own batch, with fewer rows where they would take too much memory."""
    dtype, size = getattr(torch, config.model.dtype), model.cached_head_dim
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
class Measured:
    """`seconds` of a layer's attention in a step; `outputs`, one for each of the step's reads."""

    seconds: float
    outputs: tuple[Tensor, ...]


def measure(name: str, step: Step, device: torch.device, recorder: Recorder = Eager()) -> Measured:
    """Time a backend over each read of a step, replayed if the run records its steps and the
    backend lets it. Keys, queries and what is chosen of them are random, and the same for every
    backend."""
    recorder = recorder if capabilities_of(name).can_be_recorded else Eager()
    seconds, outputs = 0.0, []
    for read in step.reads:
        once, output = measure_read(make_backend(name), read, step, device, recorder)
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
    num_layers = min(step.num_layers, MOST_LAYERS)
    view = _make_view(cache, read, visible, recorder.captures)

    def forward() -> Tensor:
        """A plan and so many layers, all over the cache's only one."""
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
    """The view that a forward of the run would have."""
    tail = read.times + 1 if is_captured else None
    rows = BatchRows.of(range(len(cache.lengths)), cache.seq_lens.device, tail)
    # The tail of a draft is bounded too, where it is captured.
    committed = cache.lengths_of(rows) if is_captured and read.num_new == 1 else None
    return make_view(cache, rows, visible, read.num_new, committed, read.window)


def _choose(read: Read, cache: KVCache, random: Random) -> Visible:
    """What the rows of `cache` show; blocks as if each head had scored them otherwise."""
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


TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # of the largest output, or of 1


def settle(
    config: ResolvedConfig, target: ModelConfig, draft: ModelConfig | None, group: Group,
    device: torch.device,
) -> ResolvedConfig:  # fmt: skip
    """`config`, resolved, with measured names where a backend was left to be measured. Every rank
    of `group` calls it."""
    attention, section = config.attention, config.draft
    if attention.backend.settled is None:
        choice = _agreed(config, target, target_step(config, target), group, device)
        config = replace(config, attention=replace(attention, backend=choice))
    if section is not None and draft is not None and section.backend.settled is None:
        choice = _agreed(config, draft, draft_step(config, draft), group, device)
        config = replace(config, draft=replace(section, backend=choice))
    return config.resolve_graphs()


def _agreed(
    config: ResolvedConfig, model: ModelConfig, step: Step, group: Group, device: torch.device
) -> Choice:
    """The leader's choice for a step of a model, told to all and printed."""
    choice = Choice("")
    if group.index == 0:
        captures = config.decoding.cuda_graphs == "on"
        recorder: Recorder = CudaGraphs(device) if captures else Eager()
        candidates, left_out = list_candidates(config, model)
        choice = choose_fastest(
            candidates, left_out, step.name, lambda name: measure(name, step, device, recorder)
        )
        print(f"--attention {choice.why}", file=sys.stderr, flush=True)
    parts = choice, choice.why, choice.how.value
    by_rank = group.all_gather_values(parts, tuple[str, str, str])
    name, why, how = next(of_leader for of_leader in by_rank if of_leader[0])
    return Choice(name, why, How(how))


def list_candidates(config: ResolvedConfig, model: ModelConfig) -> tuple[list[str], dict[str, str]]:
    """(names to measure, why others are left out). Backends for other devices are in neither."""
    missing = missing_backends(tuple(ATTENTION_BACKENDS))
    machine = Machine(num_cpus=1, has_compiler=True, missing_backends=missing)
    candidates, left_out = [], {}
    for capabilities in map(capabilities_of, ATTENTION_BACKENDS):
        obstacle = _obstacle(capabilities, machine, config, model)
        if obstacle is None:
            candidates.append(capabilities.name)
        elif config.parallel.device in capabilities.devices:
            left_out[capabilities.name] = obstacle
    recordable = [name for name in candidates if capabilities_of(name).can_be_recorded]
    graphs = config.decoding.cuda_graphs == "on"
    if graphs and (not config.decoding.cuda_graphs.is_auto or len(recordable) > 1):
        why = "it needs lengths on the host, and no CUDA graph could hold it"
        left_out |= {name: why for name in candidates if name not in recordable}
        candidates = recordable
    return candidates, left_out


def _obstacle(
    capabilities: Capabilities, machine: Machine, config: ResolvedConfig, model: ModelConfig
) -> str | None:
    """Why a backend cannot serve this run; None where it can."""
    dtype, longest = config.model.dtype, max_tokens(config)
    is_self = config.decoding.model_drafter == "self"
    needs_weights = is_self and policy_called(config.kv.policy).needs_weights
    obstacles = {
        "it rounds scores to bfloat16, too coarse for ALiBi": (
            capabilities.rounds_scores and (model.positions, dtype) == ("alibi", "bfloat16")
        ),
        "it does not return attention weights": (
            needs_weights and not capabilities.returns_weights
        ),
        "it computes no draft trees": (
            config.decoding.tree is not None and not capabilities.supports_trees
        ),
        "it does not keep to a sliding window": (
            not capabilities.keeps_window and (model.sliding_window or longest) < longest
        ),
    }
    here = capabilities.obstacle(machine, config.parallel.device, model.cached_head_dim, dtype)
    return here or next((reason for reason, applies in obstacles.items() if applies), None)


def choose_fastest(
    candidates: Sequence[str],
    left_out: Mapping[str, str],
    step_name: str,
    measure_one: Callable[[str], Measured],
) -> Choice:
    """The fastest candidate over what `step_name` says, whose outputs are the
    reference's. What fails to load or to run is left out like `left_out`, and said."""
    reference = measure_one(REFERENCE_BACKEND)
    seconds, out = {REFERENCE_BACKEND: reference.seconds}, dict(left_out)
    for name in candidates:
        if name == REFERENCE_BACKEND:
            continue
        try:
            measurement = measure_one(name)
            check_outputs(measurement.outputs, reference.outputs)
            seconds[name] = measurement.seconds
        except Exception as error:  # whatever a library or a compiler raises: it is no candidate
            out[name] = (str(error).strip() or type(error).__name__).splitlines()[0]
    ranked = sorted(seconds, key=lambda name: seconds[name])
    times = ", ".join(f"{name} {1e3 * seconds[name]:.3f} ms" for name in ranked)
    reasons = "".join(f"; {name}: {why}" for name, why in out.items())
    why = f"auto: {times} a layer, for {step_name}{reasons}"
    return Choice(ranked[0], why, How.MEASURED)


def check_outputs(outputs: Sequence[Tensor], reference: Sequence[Tensor]) -> None:
    """Raises ValueError if outputs are not the reference's."""
    for ours, theirs in zip(outputs, reference, strict=True):
        off = float((ours.float() - theirs.float()).abs().max())
        largest = max(1.0, float(theirs.abs().max()))  # above 1 where few keys are averaged
        if not off < TOLERANCE[theirs.dtype] * largest:  # not a number is no agreement either
            raise ValueError(f"its output is {off:.1e} away from that of {REFERENCE_BACKEND}")
