"""Times single forwards at fixed cache lengths, for `magicdec latency`: decode steps, verifications
and drafts, started by the host or captured and replayed, and a part of a prefill.

At each (B, context) all rows hold `context` tokens of random K and V, in new caches, truncated
after each forward. Forwards take turns in alternating order, so that drift favours none.

Shapes: B rows, T new tokens a row.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from magicdec.bench.latency.record import LatencyCell, LatencyGrid, LatencyRow, TimedCell, summarise
from magicdec.bench.roofline import bytes_read
from magicdec.config.capacity import Capacity
from magicdec.config.resolved import ResolvedConfig
from magicdec.config.sections import KVSection
from magicdec.distributed.groups import Group, Launch
from magicdec.hardware.other_load import LoadWatch
from magicdec.hardware.timing import read_bandwidth, seconds_of, synchronize
from magicdec.kv.cache import BatchRows
from magicdec.kv.forward_counts import ForwardCounts
from magicdec.kv.view import FULL
from magicdec.model.checkpoint.source import ModelSource
from magicdec.model.config import ModelConfig
from magicdec.model.experts import Experts
from magicdec.model.linear.packed import Linear, first_outputs
from magicdec.model.positions import split_heads
from magicdec.model.transformer import Transformer
from magicdec.output.console import make_progress
from magicdec.records.environment import Environment
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.request import Batch, NotFinite, Request, SamplingParams, naming
from magicdec.runner.sampling.metadata import SamplingMetadata
from magicdec.runner.sampling.model_tokens import greedy_tokens
from magicdec.setup.loading import LoadedModels, runner_of, with_copy
from magicdec.setup.memory_check import MemoryBudget, describe_place, needed
from magicdec.setup.memory_plan import MemoryPlan, Models
from magicdec.setup.model_plan import ModelPlan
from magicdec.setup.session import RankSession
from magicdec.speculation.draft_kv import DraftKV
from magicdec.speculation.policies.policy import make_draft_kv
from magicdec.speculation.steps.recorder import Eager, RecordedWork, Recorder, make_recorder, record

GREEDY = SamplingParams(max_new_tokens=1)
# Bytes of weights that a core's second-level cache keeps from one call to the next.
IN_CACHE = 1 << 19
# Of a product by itself: calls that are timed together, and how often.
CALLS = 2
TRIES = 30
ATTENTION_TRIES = 5  # of all layers' attention by itself


MeasuredLatency = tuple[Environment, list[LatencyRow]]


def measure(
    configs: Sequence[ResolvedConfig], grid: LatencyGrid, source: ModelSource, launch: Launch
) -> Iterator[MeasuredLatency]:
    """(environment, rows) of each config, the same on every rank. The configs differ in their
    attention backend. All ranks iterate in lockstep."""
    with RankSession(launch, configs[0].parallel) as session:
        models = LoadedModels(session.device, make_progress(launch.rank == 0))
        for config in configs:
            session.begin()
            yield measure_grid(session, models, config, grid, source)


def measure_grid(
    session: RankSession,
    models: LoadedModels,
    config: ResolvedConfig,
    grid: LatencyGrid,
    source: ModelSource,
) -> MeasuredLatency:
    group = session.groups.target
    largest = place_config(config, grid, max(grid.batch_sizes), max(grid.contexts))
    plan = ModelPlan(largest, source.config, group.ranks, session.launch.rank)
    model = models.get(source, group, plan.kinds)
    copies = {
        weights: models.get_copy(source, group, with_weights(plan, weights))
        for weights in grid.draft_weights
    }
    bandwidth = read_bandwidth(group, session.device)
    timings = list[TimedCell]()
    load = LoadWatch(session.launch.rank == 0)
    load.begin()
    for B, context in itertools.product(grid.batch_sizes, grid.contexts):
        name = f"{config.attention.backend}, B {B}, context {context}"
        with models.progress.task(name, grid.warmup + grid.repeats) as advance:
            timings += time_place(model, group, config, grid, B, context, advance, copies)
    load.end()
    # The ceiling is the larger of two measurements, as in a run.
    bandwidth = max(bandwidth, read_bandwidth(group, session.device))
    rank_timings = group.all_gather_values(timings, list[TimedCell])
    rows = summarise(rank_timings, bandwidth, source.config.experts)
    return load.add_to(session.describe_environment(bandwidth)), rows


def time_place(
    model: Transformer,
    group: Group,
    config: ResolvedConfig,
    grid: LatencyGrid,
    B: int,
    context: int,
    advance: Callable[[], None],
    copies: Mapping[str | None, Transformer | None] = MappingProxyType({None: None}),
) -> list[TimedCell]:
    """Times all forwards at one (B, context) and frees their caches. `copies` of the model draft,
    by the grid's `draft_weights`; None: the model itself does."""
    place = place_config(config, grid, B, context)
    plan = ModelPlan(place, model.config, group.ranks, group.ranks[group.index])
    runner = runner_of(plan, model, group)
    batch = fill(runner, context)
    recorder = make_recorder(config.decoding, runner.device)
    drafting = {}
    for weights, copy in copies.items():
        drafting[weights] = with_copy(with_weights(plan, weights), runner, copy).drafting_runner
    forwards = list(make_forwards(runner, batch, grid, context, recorder, drafting))
    for number in range(grid.warmup + grid.repeats):
        for forward in forwards if number % 2 == 0 else reversed(forwards):
            seconds = time_once(forward, forward.runner, group)
            if number >= grid.warmup:
                forward.seconds.append(seconds)
        advance()
    for forward in forwards:
        check_finite(forward, batch)
    products: dict[tuple[int, int, bool], float] = {}
    timings = list[TimedCell]()
    for f in forwards:
        if f.counts is not None:
            model = f.runner.model
            tokens = f.cell.B * f.cell.T
            has_logits = f.cell.phase != "prefill"
            if (key := (id(model), tokens, has_logits)) not in products:
                products[key] = seconds_of_products(model, tokens, runner.device, has_logits)
            timed = TimedCell(
                cell=f.cell,
                seconds=f.seconds,
                num_bytes=bytes_read(model, f.counts),
                products_s=products[key],
                experts_read=experts_of_a_layer(model.config, f.counts),
                attention_s=seconds_of_attention(f) if f.is_of_target else None,
            )
            timings.append(timed)
    return timings


def experts_of_a_layer(config: ModelConfig, counts: ForwardCounts) -> float | None:
    """Those that a forward has read, on average over the layers that have experts."""
    num_layers = config.num_mixtures * counts.num_forwards
    return counts.experts_read / num_layers if num_layers else None


@torch.inference_mode()
def seconds_of_products(
    model: Transformer, tokens: int, device: torch.device, has_logits: bool = True
) -> float:
    """Seconds that the products of this rank's linear layers would take for so many tokens, at the
    rate of the fastest of them on weights that stay in the processor's cache: a forward without
    memory. Without logits the head is left out."""
    layers = [m for m in model.modules() if isinstance(m, Linear)]
    if not has_logits:
        layers = [layer for layer in layers if layer is not getattr(model, "head", None)]
    dtype = next(model.parameters()).dtype
    fastest = 0.0
    for inputs, layer in {layer.in_features: layer for layer in layers}.items():
        part = first_outputs(layer, IN_CACHE * torch.get_num_threads())
        x = torch.randn(tokens, inputs, device=device).to(dtype)
        # The least of several times: a program beside this one can only add to them.
        seconds = min(seconds_of(partial(part, x), device, CALLS) for _ in range(TRIES))
        fastest = max(fastest, tokens * inputs * part.out_features / seconds)
    sizes: float = sum(layer.in_features * layer.out_features for layer in layers)
    for experts in (module for module in model.modules() if isinstance(module, Experts)):
        own = [m for m in (*experts.gate_up, *experts.down) if isinstance(m, Linear)]
        expert_weights = sum(m.in_features * m.out_features for m in own)
        sizes -= expert_weights * (1 - experts.num_used / len(experts.down))
    has_tied_head = has_logits and model.has_head and model.head is None
    head = model.tied_head.numel() if has_tied_head else 0
    return tokens * (sizes + head) / fastest


@torch.inference_mode()
def seconds_of_attention(forward: TimedForward) -> float:
    """Seconds of the attention of this rank's layers alone, one after the other as in a forward of
    the target, over the cache as that finds it."""
    runner = forward.runner
    cell = forward.cell
    config = runner.model.config
    (first, last), (kv_first, kv_last) = runner.model.shard.heads(
        config.num_heads, config.num_kv_heads
    )
    forward.prepare()
    rows = BatchRows.of(range(cell.B), runner.device)
    views = runner.make_views(FULL, rows, cell.T, None, cell.phase == "prefill").distinct
    dtype = next(runner.model.parameters()).dtype
    size = (cell.B, cell.T, last - first + 2 * (kv_last - kv_first), config.cached_head_dim)
    heads = torch.randn(size, device=runner.device).to(dtype)
    q, k, v = split_heads(heads, last - first, kv_last - kv_first)

    def attend() -> None:
        for backend, view in zip(runner.backends, views, strict=True):
            backend.plan(view)
        for index, number in zip(
            runner.windows.window_indices, runner.windows.numbers, strict=True
        ):
            runner.backends[index].run(number, q, k, v, views[index])

    attend()
    # The least of several times: a program beside this one can only add to them.
    least = min(seconds_of(attend, runner.device) for _ in range(ATTENTION_TRIES))
    if cell.phase == "prefill":
        runner.cache.advance(rows, cell.T)  # it ends at the context
    return least


def check_finite(forward: TimedForward, batch: Batch) -> None:
    """Raises NotFinite if logits were not finite: times would be those of other numbers."""
    cell = forward.cell
    sampling = forward.sampling
    with naming(f"{cell.phase}, B {cell.B}, context {cell.context}, T {cell.T}"):
        if forward.runner.has_flaws:
            raise NotFinite("the logits are not finite numbers")
        lines = [] if sampling.flaws is None else sampling.with_flaws([]).tolist()
        for request, line in zip(batch.requests, lines, strict=False):
            sampling.check(request, line)


def with_weights(plan: ModelPlan, draft_weights: str | None) -> ModelPlan:
    decoding = replace(plan.config.decoding, draft_weights=draft_weights)
    return replace(plan, config=replace(plan.config, decoding=decoding))


def time_once(forward: TimedForward, runner: ModelRunner, group: Group) -> float:
    """Seconds of one forward on this rank. All ranks start together; the forward is undone in the
    cache."""
    forward.prepare()
    before = runner.counts.copy()
    synchronize(runner.device)
    group.barrier()
    started = time.perf_counter()
    forward.run()
    synchronize(runner.device)
    seconds = time.perf_counter() - started
    forward.undo()
    used = runner.counts.minus(before)
    assert forward.counts in (None, used), "a forward at fixed lengths reads the same every time"
    forward.counts = used
    return seconds


def fill(runner: ModelRunner, context: int) -> Batch:
    """A batch of all rows, in the state after a prompt of `context` tokens and one emitted
    token."""
    vocab_size = runner.model.config.vocab_size
    rows = range(runner.num_rows)
    generator = torch.Generator().manual_seed(0)  # the same prompts on every rank
    ids = torch.randint(vocab_size, (runner.num_rows, context + 1), generator=generator).tolist()
    for row in rows:
        runner.allocate(row)
    # Random numbers, the same in every layer. Pages that were never written would all be one page
    # of zeros, which is read from the processor's cache; equal keys would give a policy no choice.
    cache = runner.cache
    generator = torch.Generator(cache.k.device).manual_seed(0)
    cache.shape.layout.fill_randomly(cache.k[:1], generator)
    cache.k[1:] = cache.k[0]
    cache.v[:] = cache.k[0]
    requests = []
    for row, tokens in zip(rows, ids, strict=True):
        requests.append(Request(row, tuple(tokens[:-1]), GREEDY, tokens[-1:], row=row))
    cache.advance(rows, context)
    if runner.states is not None:
        runner.states.assume(rows, context)
    return Batch(tuple(requests))


@dataclass
class TimedForward:
    """A repeatable forward: `run` computes up to the chosen tokens, `undo` restores the cache's
    length. `prepare` and `undo` are not timed. `sampling` knows whether logits were finite."""

    cell: LatencyCell
    runner: ModelRunner
    run: Callable[[], Tensor]
    undo: Callable[[], None]
    sampling: SamplingMetadata
    prepare: Callable[[], None] = lambda: None
    is_of_target: bool = False  # over the whole cache
    seconds: list[float] = field(default_factory=list)
    counts: ForwardCounts | None = None  # of one forward, the same each time


def make_forwards(
    runner: ModelRunner,
    batch: Batch,
    grid: LatencyGrid,
    context: int,
    recorder: Recorder = Eager(),
    drafting: Mapping[str | None, ModelRunner] | None = None,
) -> Iterator[TimedForward]:
    """Decode, verify by T, and draft forwards, in the order of the grid. A policy that needs
    attention weights has its own: a verify forward that also returns them, and a first draft after
    it, which makes the choice for the step. `drafting` has the runners by `draft_weights`."""
    drafting = drafting or {None: runner}
    pairs = [(kv, weights) for kv in grid.drafts for weights in grid.draft_weights]
    drafts = [(kv, make_draft_kv(drafting[weights], kv), weights) for kv, weights in pairs]
    watching = {kv.policy: draft_kv for kv, draft_kv, _ in reversed(drafts) if watches(draft_kv)}
    for T in grid.new_tokens:
        cell = LatencyCell("decode" if T == 1 else "verify", runner.num_rows, context, T)
        yield target_forward(runner, batch, cell, None, recorder)
        for policy, draft_kv in watching.items() if T > 1 else ():
            watched = LatencyCell(cell.phase, cell.B, context, T, kv_policy=policy)
            yield target_forward(runner, batch, watched, draft_kv, recorder)
    if grid.prefill_chunk is not None and runner.num_rows == grid.batch_sizes[0]:
        yield prefill_forward(runner, batch, min(grid.prefill_chunk, context), context)
    for kv, draft_kv, weights in drafts:
        draft_kv.admit(batch.requests)
        for phase in ("first_draft", "draft") if watches(draft_kv) else ("draft",):
            forward = draft_forward(draft_kv, batch, kv, context, phase, recorder)
            yield replace(forward, cell=replace(forward.cell, draft_weights=weights))


def watches(draft_kv: DraftKV) -> bool:
    return bool(draft_kv.observers)


def new_ids(runner: ModelRunner, T: int) -> Tensor:
    """Random tokens [B, T], the same on every rank."""
    generator = torch.Generator().manual_seed(T)
    shape = runner.num_rows, T
    ids = torch.randint(runner.model.config.vocab_size, shape, generator=generator)
    return ids.to(runner.device)


def target_forward(
    runner: ModelRunner,
    batch: Batch,
    cell: LatencyCell,
    watching: DraftKV | None,
    recorder: Recorder,
) -> TimedForward:
    """The target over its full cache; `watching` sees its attention."""
    ids = new_ids(runner, cell.T)
    held = list(runner.cache.lengths)
    rows = rows_of(batch, runner, recorder)
    sampling = sampling_of(batch, runner)
    observers = () if watching is None else watching.observers

    def run() -> Tensor:
        logits = runner.forward(ForwardBatch(ids, rows, observers=observers))
        return greedy_tokens(runner, logits, sampling)

    repeatable = record_work(run, runner, recorder)
    return TimedForward(
        cell,
        runner,
        repeatable,
        lambda: runner.truncate(batch.rows, held),
        sampling,
        is_of_target=True,
    )


def prefill_forward(runner: ModelRunner, batch: Batch, T: int, context: int) -> TimedForward:
    """The last `T` tokens of a prompt of one row, as `prefill` takes them. They have no logits,
    which those of a prompt alone have that end it."""
    ids = new_ids(runner, T)[:1]
    rows = batch.rows[:1]

    def prepare() -> None:
        runner.truncate(rows, [context - T])
        if runner.states is not None:
            runner.states.assume(rows, context - T)

    def run() -> Tensor:
        part = ForwardBatch(ids, rows, num_outputs=0, is_of_prompt=True)
        return runner.forward(part)

    return TimedForward(
        LatencyCell("prefill", 1, context, T),
        runner,
        run,
        lambda: None,  # the row has `context` tokens again
        sampling_of(batch, runner),
        prepare=prepare,
        is_of_target=True,
    )


def draft_forward(
    draft_kv: DraftKV, batch: Batch, kv: KVSection, context: int, phase: str, recorder: Recorder
) -> TimedForward:
    """One draft forward over the policy's choice, which a `first_draft` makes."""
    runner = draft_kv.runner
    is_first = phase == "first_draft"
    ids = new_ids(runner, 1)
    rows = rows_of(batch, runner, recorder)
    sampling = sampling_of(batch, runner)
    host_rows = BatchRows.of(batch.rows, runner.device)
    held = draft_kv.lengths(host_rows)
    committed = draft_kv.lengths(rows)
    budget = None if kv.budget == -1 else kv.budget
    cell = LatencyCell(phase, runner.num_rows, context, 1, budget, kv.policy)

    def run() -> Tensor:
        # The choice belongs to the lengths that it was made for: new ones make a new choice.
        lengths = draft_kv.lengths(rows) if is_first and recorder.captures else committed
        logits = draft_kv.forward(ids, rows, lengths)
        return greedy_tokens(runner, logits, sampling)

    # What a captured verification showed lies in memory that captures share: it is copied now.
    draft_kv.commit(host_rows, held)
    repeatable = record_work(run, runner, recorder)
    forward = TimedForward(
        cell, runner, repeatable, lambda: draft_kv.rewind(host_rows, held), sampling
    )
    if is_first and not recorder.captures:
        forward.prepare = lambda: draft_kv.commit(host_rows, held)
    return forward


def sampling_of(batch: Batch, runner: ModelRunner) -> SamplingMetadata:
    vocab_size = runner.model.config.vocab_size
    has_flaws = not runner.finds_flaws
    return SamplingMetadata.of(batch.requests, vocab_size, runner.device, has_flaws)


def rows_of(batch: Batch, runner: ModelRunner, recorder: Recorder) -> BatchRows:
    return BatchRows.of(batch.rows, runner.device, max_tail=1 if recorder.captures else None)


@torch.inference_mode()
def record_work(run: Callable[[], Tensor], runner: ModelRunner, recorder: Recorder) -> RecordedWork:
    return record(recorder, run, [runner.cache.seq_lens], [runner.counts])


def check_grid_memory(
    config: ResolvedConfig, grid: LatencyGrid, models: Models, launch: Launch, free: int | None
) -> str:
    """The line to print. Raises ValueError if the largest cell does not fit."""
    B = max(grid.batch_sizes)
    context = max(grid.contexts)
    plan = plan_place(config, grid, models, launch, B, context)
    flags = f"--B {B} --prefix_len {context}"
    room = MemoryBudget(tuple(launch.local_ranks), describe_place(config, launch), free)
    if refusal := room.refusal(plan):
        raise ValueError(f"{flags} needs {refusal}")
    return room.describe(plan, f" at {flags}")


def place_config(config: ResolvedConfig, grid: LatencyGrid, B: int, context: int) -> ResolvedConfig:
    """The config of a self-speculative run with the most new tokens at that context."""
    return replace(
        config,
        attention=replace(config.attention, prefill_chunk=grid.prefill_chunk or 1),
        decoding=replace(
            config.decoding,
            strategy="speculative",
            drafter="self",
            gamma=max(grid.new_tokens) - 1,
        ),
        capacity=Capacity(rows=B, prompt_len=context, max_len=context + 1, new_tokens=1),
    )


def plan_place(
    config: ResolvedConfig, grid: LatencyGrid, models: Models, launch: Launch, B: int, context: int
) -> MemoryPlan:
    """The memory plan of one (B, context) with all drafts' caches and no prefill that keeps
    queries."""
    run = place_config(config, grid, B, context)
    plans = [
        needed(replace(run, kv=kv.resolve()), models, launch, keeps_queries=False)
        for kv in grid.drafts
    ]
    plan = ModelPlan(run, models.target, run.parallel.rank_group, launch.rank)
    ranks = 1 if run.parallel.device != "cpu" else len(launch.local_ranks)
    copies = [with_weights(plan, weights).copy_bytes for weights in grid.draft_weights]
    return replace(
        plans[0],
        draft_weights=ranks * sum(copies),
        draft_kv=len(copies) * sum(plan.draft_kv for plan in plans),
        working=max(plan.working for plan in plans),
    )
