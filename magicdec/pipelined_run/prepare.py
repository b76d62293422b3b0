"""Prepares what `magicdec pipeline` measures: checks everything before memory is allocated or any
process group starts, and times what `--layer_split auto` needs.

A stage is timed alone: a stage's loop with a few layers, without the head's scheduler and without a
drafter, with which it may share its rank's cores in the run. Links have no part in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from magicdec.attention.backend import check_trees
from magicdec.config.choices.transport import Transport, check_stage_group, choose_transport
from magicdec.config.resolved import ResolvedConfig, ResolvedDraft
from magicdec.config.run_config import RunConfig
from magicdec.distributed.channels.message import Ends, Kind, Loopback, Message
from magicdec.distributed.groups import Launch, ParallelGroups
from magicdec.distributed.layer_split import AUTO, FLAG
from magicdec.distributed.tensor_parallel import Shard
from magicdec.hardware.environment import probe_machine
from magicdec.memory.check import Room, add_up, check_together, find_room
from magicdec.memory.plan import MemoryPlan, Models, plan_rank, plan_stage, working_bytes
from magicdec.model.checkpoint.source import ModelSource, check_part
from magicdec.model.config import ModelConfig
from magicdec.pipeline.auto_split import (
    STEPS,
    ChosenSplit,
    DecodeStep,
    Timer,
    Timing,
    check_source,
    choose_split,
    describe_origin,
)
from magicdec.pipeline.prepare import (
    alone_of,
    check_agreement,
    complete_part,
    describe_split,
    of_one_process,
    without_drafts,
)
from magicdec.pipeline.stage import StageLoop
from magicdec.pipeline.tracing import Spans
from magicdec.pipelined_run.channels import CancelBoard
from magicdec.pipelined_run.layout import ON_HEAD, Layout, make_layout, read_split
from magicdec.pipelined_run.options import SpeculationOptions
from magicdec.pipelined_run.stage import CancellableStage, ModelPart
from magicdec.pipelined_speculation import messages
from magicdec.runner import ModelRunner
from magicdec.sampling.coupled import CoupledSampling
from magicdec.setup.loading import StagePart
from magicdec.setup.prepare import Found, Known, Prepared, find


@dataclass(frozen=True)
class PreparedPipeline:
    """`run.config` is that of one rank, which needs no other to compute what it holds, and which
    drafts nothing. `transport` is None for one rank. `drafting` is `run` with the draft model,
    None if no model drafts. `split` says in one line what `--layer_split auto` chose; it is empty
    for another split."""

    run: Prepared
    whole: ResolvedConfig
    options: SpeculationOptions
    layout: Layout
    transport: Transport | None
    drafting: Prepared | None
    split: str = ""


def prepare(run_config: RunConfig, options: SpeculationOptions, launch: Launch) -> PreparedPipeline:
    """Find and check the models, divide the target, make the prompts and plan the memory. Raises
    ValueError, one line naming the flag, for errors that a user can correct."""
    known = Known()
    models = find(with_workload(run_config, options), launch, known, is_part=True)
    whole, model = without_drafts(models.config), models.source.config
    layout = make_layout(options.layer_split, launch.world_size, model.num_layers)
    check_draft_ranks(models, options, layout)
    check_stage_ranks(models, options, layout)
    check_auto(options, layout, models.source)
    if options.speculation.spare_cells:
        check_cells(whole, model)
    if options.link is not None and layout.world_size == 1:
        raise ValueError("--emulate_link_ms: one rank has no link; see --nproc")
    machine = known.get(("machine",), lambda: probe_machine(launch))
    drafting = of_one_process(alone_of(models, machine), options.speculation.lanes)
    if layout.tensor_parallel > 1:
        drafting = of_stage_ranks(replace(models.config, draft=drafting.draft), layout, launch.rank)
    drafting = with_draft_ranks(drafting, models.config.draft, layout.draft_ranks)
    alone = without_drafts(drafting)
    transport = choose_transport(whole.parallel, machine, options.on_host)

    def check_here(options: SpeculationOptions, layout: Layout) -> str:
        check_files(models, options, layout, launch.rank)
        configs, room = (alone, of_drafts(drafting)), find_room(whole, launch, machine.num_gpus)
        return check_memory(configs, models.models, options, layout, room)

    run = complete_part(models, drafting, known, options)
    drafts = None if models.draft is None else replace(run, config=of_drafts(drafting))
    run = replace(run, config=alone)
    split = find_split(run, options, layout)
    layout, options = layout.with_layers(split.layers), with_counts(options, split)
    run = replace(run, memory=check_together(launch, partial(check_here, options, layout)))
    settings = options.describe() | asdict(run_config.sampling)
    check_agreement(run_config, run, layout.layers, settings, transport)
    reason = describe_split(options.layer_split, split)
    return PreparedPipeline(run, whole, options, layout, transport, drafts, reason)


def with_workload(run_config: RunConfig, options: SpeculationOptions) -> RunConfig:
    """`run_config` with a row for each lane, which has room for the spare cells of the lane too.
    All that follows a prompt may be drafted before any of it is committed."""
    speculation = options.speculation
    workload = options.batch_of(run_config.workload, speculation.lanes, speculation.spare_cells)
    assert workload.gen_len is not None, "the batch has room for outputs"
    decoding = replace(run_config.decoding, num_draft_tokens=workload.gen_len)
    return replace(run_config, workload=workload, decoding=decoding)


def with_draft_ranks(
    config: ResolvedConfig, draft: ResolvedDraft | None, ranks: tuple[int, ...]
) -> ResolvedConfig:
    """`config`, of one rank, with the draft on these ranks. `draft` is that of ranks that compute
    together, whose collectives native steps must be able to call."""
    if draft is None:
        return config
    shared = draft if len(ranks) > 1 else config.draft
    assert shared is not None, "the same run has a draft"
    return replace(config, draft=replace(shared, rank_group=ranks))


def check_draft_ranks(models: Found, options: SpeculationOptions, layout: Layout) -> None:
    """Raises ValueError if several ranks are to draft what they cannot share."""
    count, split, draft = len(layout.draft_ranks), f"{FLAG} {options.layer_split}", models.draft
    if count == 1 or not options.needs_drafts:
        return
    if draft is None:
        is_emulated = options.emulate_acceptance is not None
        drafter = "--emulate_acceptance" if is_emulated else f"--draft {options.draft}"
        raise ValueError(
            f"{split}: {drafter} has no layers that {count} ranks could share; give 1.0 or "
            f"{ON_HEAD} behind the slash"
        )
    check_stage_group(split, models.config.parallel)
    try:
        Shard(0, count).heads(draft.config.num_heads, draft.config.num_kv_heads)
    except ValueError as error:
        raise ValueError(f"{split}, draft {draft.name}: {error}") from error


def of_stage_ranks(config: ResolvedConfig, layout: Layout, rank: int) -> ResolvedConfig:
    """The config of a rank that shares the layers of its stage with others."""
    parallel = replace(config.parallel, rank_group=layout.group_of(rank))
    return replace(config, parallel=parallel)


def check_stage_ranks(models: Found, options: SpeculationOptions, layout: Layout) -> None:
    """Raises ValueError if several ranks are to share the layers of a stage that cannot."""
    count, split, model = layout.tensor_parallel, options.layer_split, models.source.config
    if count == 1:
        return
    check_stage_group(f"{FLAG} {split}", models.config.parallel)
    try:
        Shard(0, count).heads(model.num_heads, model.num_kv_heads)
    except ValueError as error:
        raise ValueError(f"{FLAG} {split}, stages of {count} ranks: {error}") from error
    if options.is_measured and not all(map(len, layout.layers)):
        raise ValueError(
            f"{FLAG} {split}: stages of {count} ranks are timed together, but other ranks have no "
            "stage; give layer counts or shares"
        )


def of_drafts(config: ResolvedConfig) -> ResolvedConfig:
    """The config by which the draft's cache is made: what follows a prompt are its draft tokens."""
    return replace(config, workload=replace(config.workload, gen_len=0))


def check_cells(config: ResolvedConfig, model: ModelConfig) -> None:
    """Raises ValueError if runs cannot have cells other than those of their positions."""
    check_trees(config.attention.backend)
    if model.sliding_window is not None:
        raise ValueError(
            f"--np: {config.model.model} has a sliding window, under which every token must lie in "
            "the cell of its position; choose --np 1"
        )


def check_files(models: Found, options: SpeculationOptions, layout: Layout, rank: int) -> None:
    """Raises ValueError if a chunk of a checkpoint is not on this host that a pass reads here. The
    files of a split checkpoint have both ends of the model in the first stage's."""
    source, draft = models.source, models.draft
    if options.has_baseline and rank == 0:
        check_part(source, range(source.config.num_layers), has_ends=True)
    if draft is not None and rank in layout.draft_ranks:
        check_part(draft, range(draft.config.num_layers), has_ends=True)
    layers = layout.layers[rank]
    if options.emulate_stage_ms is None and len(layers):
        is_end = layers.start == 0 or layers.stop == source.config.num_layers
        check_part(source, layers, has_ends=is_end)


def check_memory(
    configs: tuple[ResolvedConfig, ResolvedConfig],
    models: Models,
    options: SpeculationOptions,
    layout: Layout,
    room: Room,
) -> str:
    """The line to print: what the ranks of this room need for the pass that needs most. `configs`
    are those of a stage and of the draft. Raises ValueError if that is more than is free."""
    config, of_stages = configs[0], stage_plans(configs, models, options, layout, room.ranks)
    plans = [add_up([MemoryPlan(0, 0), *of_stages])]
    if options.has_baseline and 0 in room.ranks:
        plans.append(plan_rank(of_one_process(config, 1), Models(models.target), 0))
    plan, w = max(plans, key=lambda plan: plan.total), config.workload
    if refusal := room.refusal(plan):
        raise ValueError(f"--lanes {w.batch_size} --prefix_len {w.prefix_len} needs {refusal}")
    return room.describe(plan)


def stage_plans(
    configs: tuple[ResolvedConfig, ResolvedConfig],
    models: Models,
    options: SpeculationOptions,
    layout: Layout,
    ranks: Sequence[int],
) -> Iterator[MemoryPlan]:
    """The plans of these ranks, for their layers and for the draft model. A stage with an end of
    the model is planned as if it had both."""
    (config, drafting), model = configs, models.target
    for rank in ranks:
        layers = layout.layers[rank]
        if options.emulate_stage_ms is None and len(layers):
            is_end = layers.start == 0 or layers.stop == model.num_layers
            of_rank = of_stage_ranks(config, layout, rank)
            yield plan_stage(of_rank, model, len(layers), is_end, rank)
        if models.draft is not None and rank in layout.draft_ranks:
            of_rank = replace(drafting, parallel=replace(drafting.parallel, rank_group=(rank,)))
            plan = plan_rank(of_rank, models, rank)
            shard = Shard(layout.draft_ranks.index(rank), len(layout.draft_ranks))
            working = working_bytes(drafting, models.draft, shard)
            yield MemoryPlan(0, 0, plan.draft_weights, plan.draft_kv, working)


class RunTiming(Timing):
    """Runs of `step.num_tokens` rows that follow `step.context` tokens of one request. Every run
    takes the place of the one before it. `run.config` is that of one rank, without drafts."""

    head_stage = -1
    growth = 1

    def end_of(self, stage: int) -> StagePart | None:
        last = self.run.source.config.num_layers - 1
        if stage == 0:
            return StagePart(range(1), None)
        is_last = stage == len(self.stages) - 1
        return StagePart(range(last, last + 1), None) if is_last else None

    def timer(self, runner: ModelRunner, has_ends: bool, groups: ParallelGroups) -> Timer:
        part = ModelPart(runner, CoupledSampling(self.config.sampling))
        return partial(time_part, part, self.step)


def check_auto(options: SpeculationOptions, layout: Layout, source: ModelSource) -> None:
    """Raises ValueError for `--layer_split auto` if the model's files have a split already, and for
    `--machine` if no times are asked for."""
    if options.is_measured:
        check_source(str(options.layer_split), source)
    if options.machine is not None and not (options.is_measured and len(layout.stages) > 1):
        raise ValueError(
            f"--machine {options.machine} does nothing here: it is for {FLAG} {AUTO} with several "
            "stages; leave it out"
        )


def with_counts(options: SpeculationOptions, chosen: ChosenSplit) -> SpeculationOptions:
    """`options` with layer counts in place of `auto`."""
    if not options.is_measured:
        return options
    split = replace(read_split(options.layer_split), stages=chosen.layer_split)
    return replace(options, layer_split=str(split))


def find_split(run: Prepared, options: SpeculationOptions, layout: Layout) -> ChosenSplit:
    """The split that all ranks come to, before any process group starts. All ranks must call it,
    with any split. `run` as in RunTiming. Raises ValueError, naming the flag, on every rank."""
    most = max(shape.output_len for shape in options.shapes) - 1
    num_drafts = min(options.speculation.gamma, most) if options.needs_drafts else 0
    longest = run.source.config.max_length - 1 - num_drafts
    step = DecodeStep(1, min(options.mean_context, longest), num_drafts)
    rows = "1 row" if num_drafts == 0 else f"{step.num_tokens} rows"
    timing = RunTiming(run, [layout.group_of(rank) for rank in layout.stages], step)
    return choose_split(
        read_split(options.layer_split).stages, timing.stages,
        run.source.config.num_layers, run.launch,
        f"{describe_origin(options.machine)} for runs of {rows} after {step.context} tokens",
        lambda: timing.find_times(options.machine),
    )  # fmt: skip


def time_part(part: ModelPart, step: DecodeStep) -> float:
    """Seconds from run to run where the next run always waits already: the median, which a run that
    was held up does not move."""
    num_rows, places = step.num_tokens, tuple(range(step.context, step.context + step.num_tokens))
    run = messages.Launch(
        run=0, request=0, lane=0, parent=-1, is_speculative=num_rows > 1, num_outputs=num_rows,
        tokens=(1,) * num_rows, positions=places, cells=places,
        parents=tuple(range(-1, num_rows - 1)), moves=(),
        context=messages.to_ranges(step.context, ()),
    )  # fmt: skip
    spans, inbound, model = Spans(), Loopback(), part.runner.model
    payload: Tensor | None = None
    if not model.has_embedding:
        dtype = next(model.parameters()).dtype
        payload = torch.full((1, num_rows, model.config.hidden_size), 0.1, dtype=dtype)
    message = Message(Kind.HIDDEN, run.run, words=run.to_words(), payload=payload)
    for _ in range(STEPS + 1):
        inbound.send(message)
    inbound.send(Message(Kind.END))
    stage = CancellableStage(part, CancelBoard())
    StageLoop(stage, Ends(inbound, Loopback()), spans).serve()
    return statistics.median(b.end_s - a.end_s for a, b in pairwise(spans))
