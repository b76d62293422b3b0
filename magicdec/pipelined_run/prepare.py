"""Prepares what `magicdec pipeline` measures: checks everything before memory is allocated or any
process group starts.

Must not know the flags, nor what is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from magicdec.attention.backend import check_trees
from magicdec.config.resolve import without_collectives
from magicdec.config.resolved import ResolvedConfig
from magicdec.config.run_config import RunConfig
from magicdec.distributed.groups import Launch
from magicdec.executor.requirements import layer_obstacle
from magicdec.hardware.environment import probe_machine
from magicdec.memory.check import add_up, check_together, describe_place
from magicdec.memory.free_memory import free_host_memory
from magicdec.memory.plan import MemoryPlan, Models, plan_rank, plan_stage
from magicdec.model.checkpoint.source import ModelSource, check_part, find_model
from magicdec.model.config import ModelConfig
from magicdec.pipeline.prepare import check_agreement, of_one_process
from magicdec.pipelined_run.layout import Layout, make_layout
from magicdec.pipelined_run.options import MODEL_PREFIX, SpeculationOptions
from magicdec.setup.draft_checks import check_vocabularies
from magicdec.setup.prepare import Known, Prepared, complete, find


@dataclass(frozen=True)
class PreparedPipeline:
    """`run.config` is that of one rank, which needs no other to compute what it holds."""

    run: Prepared
    whole: ResolvedConfig
    options: SpeculationOptions
    layout: Layout
    draft: ModelSource | None


def prepare(asked: RunConfig, options: SpeculationOptions, launch: Launch) -> PreparedPipeline:
    """Find and check the models, divide the target, make the prompts and plan the memory. Raises
    ValueError, one line naming the flag, for errors that a user can correct."""
    # A row has room for the longest request, which need not have the longest prompt, and for the
    # spare cells of a lane.
    workload = replace(
        asked.workload,
        batch_size=options.speculation.lanes,
        prefix_len=options.longest_prompt,
        gen_len=options.longest - options.longest_prompt + options.speculation.spare_cells,
        num_batches=1,
    )
    known = Known()
    found = find(replace(asked, workload=workload), launch, known, is_part=True)
    whole, model = found.config, found.source.config
    if whole.parallel.device != "cpu":
        raise ValueError(f"--device {whole.parallel.device}: the stages run on CPUs; choose cpu")
    layout = make_layout(options.layer_split, launch.world_size, model.num_layers)
    if options.speculation.spare_cells:
        check_cells(whole, model)
    draft = find_draft(options, found.source)
    if options.link is not None and layout.world_size == 1:
        raise ValueError("--emulate_link_ms: one rank has no link; see --nproc")
    machine = known.get(("machine",), lambda: probe_machine(launch))
    alone = of_one_process(
        without_collectives(whole, machine, layer_obstacle(model)), options.speculation.lanes
    )

    def check_here() -> str:
        check_files(found.source, options, layout, launch.rank)
        return check_memory(alone, model, draft, options, layout, launch)

    run = complete(
        replace(found, config=alone),
        known,
        lambda at, _: check_together(at, check_here),
        (len(options.shapes), "--num_requests"),
    )
    settings = {"layers": [len(each) for each in layout.layers], **options.describe()}
    check_agreement(launch, run.source, settings)
    return PreparedPipeline(run, whole, options, layout, draft)


def check_cells(config: ResolvedConfig, model: ModelConfig) -> None:
    """Raises ValueError if runs cannot have cells other than those of their positions."""
    check_trees(config.attention.backend)
    if model.sliding_window is not None:
        raise ValueError(
            f"--np and --relaunch: {config.model.model} has a sliding window, under which every "
            "token must lie in the cell of its position; choose --np 1 without --relaunch"
        )


def find_draft(options: SpeculationOptions, target: ModelSource) -> ModelSource | None:
    """The draft model. Raises ValueError if it has not the target's vocabulary."""
    if options.draft_model is None:
        return None
    draft = find_model("--drafter model:", options.draft_model)
    named = f"--drafter {MODEL_PREFIX}{options.draft_model}"
    check_vocabularies(named, draft, f"--model {target.name}", target)
    return draft


def check_files(
    source: ModelSource, options: SpeculationOptions, layout: Layout, rank: int
) -> None:
    """Raises ValueError if a chunk of the checkpoint is not on this host that a pass reads here.
    The files of a split checkpoint have both ends of the model in the first stage's."""
    if options.has_baseline and rank == 0:
        check_part(source, range(source.config.num_layers), has_ends=True)
    layers = layout.layers[rank]
    if options.emulate_stage_ms is None and len(layers):
        is_end = layers.start == 0 or layers.stop == source.config.num_layers
        check_part(source, layers, has_ends=is_end)


def check_memory(
    config: ResolvedConfig,
    model: ModelConfig,
    draft: ModelSource | None,
    options: SpeculationOptions,
    layout: Layout,
    launch: Launch,
) -> str:
    """The line to print: what the ranks of this host need for the pass that needs most. Raises
    ValueError if that is more than is free."""
    first = launch.rank - launch.local_rank
    ranks = range(first, first + launch.local_world_size)
    plans = [add_up([MemoryPlan(0, 0), *stage_plans(config, model, draft, options, layout, ranks)])]
    if options.has_baseline and first == 0:
        plans.append(plan_rank(of_one_process(config, 1), Models(model), 0))
    plan, free = max(plans, key=lambda plan: plan.total), free_host_memory()
    place = describe_place(config, launch)
    if free is None:
        return f"{plan.describe()} {place}; how much is free is not known here"
    if plan.total > free:
        raise ValueError(
            f"--lanes {config.workload.batch_size} --prefix_len {config.workload.prefix_len} needs "
            f"{plan.describe()} {place}, {free / 1e9:.2f} GB are free"
        )
    return f"{plan.describe()} {place}; {free / 1e9:.2f} GB free"


def stage_plans(
    config: ResolvedConfig,
    model: ModelConfig,
    draft: ModelSource | None,
    options: SpeculationOptions,
    layout: Layout,
    ranks: range,
) -> Iterator[MemoryPlan]:
    """The plans of these ranks, for their layers and for the draft model. A stage with an end of
    the model is planned as if it had both."""
    for rank in ranks:
        layers = layout.layers[rank]
        if options.emulate_stage_ms is None and len(layers):
            is_end = layers.start == 0 or layers.stop == model.num_layers
            yield plan_stage(config, model, len(layers), is_end, 0)
        if draft is not None and rank == layout.draft_rank:
            yield plan_rank(config, Models(draft.config), 0)
