"""Prepares what `magicdec pipeline` measures: checks everything before memory is allocated or any
process group starts.

Must not know the flags, nor what is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from magicdec.attention.backend import check_trees
from magicdec.config.choices.transport import Transport, check_stage_group, choose_transport
from magicdec.config.resolve import without_collectives
from magicdec.config.resolved import ResolvedConfig, ResolvedDraft
from magicdec.config.run_config import RunConfig
from magicdec.config.threads import agreed_threads
from magicdec.distributed.groups import Launch
from magicdec.distributed.layer_split import FLAG
from magicdec.distributed.tensor_parallel import Shard
from magicdec.hardware.environment import probe_machine
from magicdec.memory.check import add_up, check_together
from magicdec.memory.free_memory import Room, find_room
from magicdec.memory.plan import MemoryPlan, Models, plan_rank, plan_stage
from magicdec.memory.working_memory import working_bytes
from magicdec.model.checkpoint.source import check_part
from magicdec.model.config import ModelConfig
from magicdec.pipeline.pass_memory import of_one_process, without_drafts
from magicdec.pipeline.prepare import check_agreement, obstacles_of
from magicdec.pipelined_run.auto_split import check_auto, find_split, with_counts
from magicdec.pipelined_run.layout import ON_HEAD, Layout, make_layout
from magicdec.pipelined_run.options import SpeculationOptions
from magicdec.setup.prepare import Found, Known, Prepared, complete, find


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


def prepare(asked: RunConfig, options: SpeculationOptions, launch: Launch) -> PreparedPipeline:
    """Find and check the models, divide the target, make the prompts and plan the memory. Raises
    ValueError, one line naming the flag, for errors that a user can correct."""
    known = Known()
    found = find(with_workload(asked, options), launch, known, is_part=True)
    whole, model = without_drafts(found.config), found.source.config
    layout = make_layout(options.layer_split, launch.world_size, model.num_layers)
    check_draft_ranks(found, options, layout)
    check_auto(options, layout, found.source)
    if options.speculation.spare_cells:
        check_cells(whole, model)
    if options.link is not None and layout.world_size == 1:
        raise ValueError("--emulate_link_ms: one rank has no link; see --nproc")
    machine = known.get(("machine",), lambda: probe_machine(launch))
    drafting = of_one_process(
        without_collectives(found.config, machine, *obstacles_of(found.models)),
        options.speculation.lanes,
    )
    drafting = with_draft_ranks(drafting, found.config.draft, layout.draft_ranks)
    alone = without_drafts(drafting)
    transport = choose_transport(whole.parallel, machine, options.on_host)

    def check_here(options: SpeculationOptions, layout: Layout) -> str:
        check_files(found, options, layout, launch.rank)
        configs, room = (alone, of_drafts(drafting)), find_room(whole, launch, machine.num_gpus)
        return check_memory(configs, found.models, options, layout, room)

    run = complete(
        replace(found, config=drafting),
        known,
        lambda at, _: "",  # what ranks must agree on follows
        (len(options.shapes), "--num_requests"),
    )
    drafts = None if found.draft is None else replace(run, config=of_drafts(drafting))
    run = replace(run, config=alone)
    chosen = find_split(run, options, layout, launch)
    layout, options = layout.with_layers(chosen.layers), with_counts(options, chosen)
    reason = chosen.reason and f"{FLAG} {options.layer_split}: {chosen.reason}"
    run = replace(run, memory=check_together(launch, partial(check_here, options, layout)))
    settings = {"layers": [len(each) for each in layout.layers], **options.describe()}
    settings |= {**asdict(asked.sampling), "--threads": agreed_threads(asked.parallel.threads)}
    del settings["machine"]  # every host has a file of its own
    if transport is not None:
        settings["messages"] = transport.describe()
    check_agreement(launch, run.source, settings)
    return PreparedPipeline(run, whole, options, layout, transport, drafts, reason)


def with_workload(asked: RunConfig, options: SpeculationOptions) -> RunConfig:
    """`asked` with a row for each lane, which has room for the spare cells of the lane too. All
    that follows a prompt may be drafted before any of it is committed."""
    speculation = options.speculation
    workload = options.batch_of(asked.workload, speculation.lanes, speculation.spare_cells)
    assert workload.gen_len is not None, "the batch has room for outputs"
    decoding = replace(asked.decoding, num_draft_tokens=workload.gen_len)
    return replace(asked, workload=workload, decoding=decoding)


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


def check_draft_ranks(found: Found, options: SpeculationOptions, layout: Layout) -> None:
    """Raises ValueError if several ranks are to draft what they cannot share."""
    count, asked, draft = len(layout.draft_ranks), f"{FLAG} {options.layer_split}", found.draft
    if count == 1 or not options.needs_drafts:
        return
    if draft is None:
        is_emulated = options.emulate_acceptance is not None
        drafter = "--emulate_acceptance" if is_emulated else f"--draft {options.draft}"
        raise ValueError(
            f"{asked}: {drafter} has no layers that {count} ranks could share; give 1.0 or "
            f"{ON_HEAD} behind the slash"
        )
    check_stage_group(asked, found.config.parallel)
    try:
        Shard(0, count).heads(draft.config.num_heads, draft.config.num_kv_heads)
    except ValueError as error:
        raise ValueError(f"{asked}, draft {draft.name}: {error}") from error


def of_drafts(config: ResolvedConfig) -> ResolvedConfig:
    """The config by which the draft's cache is made: what follows a prompt are its draft tokens."""
    return replace(config, workload=replace(config.workload, gen_len=0))


def check_cells(config: ResolvedConfig, model: ModelConfig) -> None:
    """Raises ValueError if runs cannot have cells other than those of their positions."""
    check_trees(config.attention.backend)
    if model.sliding_window is not None:
        raise ValueError(
            f"--np and --relaunch: {config.model.model} has a sliding window, under which every "
            "token must lie in the cell of its position; choose --np 1 without --relaunch"
        )


def check_files(found: Found, options: SpeculationOptions, layout: Layout, rank: int) -> None:
    """Raises ValueError if a chunk of a checkpoint is not on this host that a pass reads here. The
    files of a split checkpoint have both ends of the model in the first stage's."""
    source, draft = found.source, found.draft
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
            yield plan_stage(config, model, len(layers), is_end, 0)
        if models.draft is not None and rank in layout.draft_ranks:
            of_rank = replace(drafting, parallel=replace(drafting.parallel, rank_group=(rank,)))
            plan = plan_rank(of_rank, models, rank)
            shard = Shard(layout.draft_ranks.index(rank), len(layout.draft_ranks))
            working = working_bytes(drafting, models.draft, shard)
            yield MemoryPlan(0, 0, plan.draft_weights, plan.draft_kv, working)
