"""Prepares what `magicdec recurrent` measures: checks everything before any process group starts,
and before memory is allocated for more than the few layers that `--layer_split auto` times; and
what each of its passes needs: its config, its threads and its memory.

What a command that divides a model among ranks does in the same way is here too, for
`magicdec pipeline`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any

from magicdec.config.choices.collectives import Transport, check_stage_group, choose_transport
from magicdec.config.resolve import without_collectives
from magicdec.config.resolved import ResolvedConfig, ResolvedParallel
from magicdec.config.run_config import RunConfig
from magicdec.config.threads import agreed_threads
from magicdec.distributed.groups import Launch, check_equal
from magicdec.distributed.layer_split import (
    FLAG,
    StageTimes,
    count_stages,
    is_auto,
    split_layers,
)
from magicdec.distributed.stages import StageGrid, make_grid
from magicdec.distributed.tensor_parallel import Shard
from magicdec.executor.descriptions import layer_obstacle
from magicdec.hardware.environment import Machine, probe_machine
from magicdec.memory.check import Room, add_up, check_together, find_room
from magicdec.memory.plan import MemoryPlan, Models, plan_rank, plan_stage
from magicdec.model.checkpoint.source import ModelSource, check_part, fingerprint
from magicdec.model.config import ModelConfig
from magicdec.names import BASELINE, SEQUENTIAL
from magicdec.pipeline.auto_split import (
    ChosenSplit,
    DecodeStep,
    RingTiming,
    check_source,
    choose_split,
    describe_origin,
)
from magicdec.pipeline.options import (
    RINGS,
    SPECULATIVE_RING,
    TENSOR_PARALLEL,
    RingOptions,
    SettledOptions,
)
from magicdec.pipeline.speculation import num_drafts_of
from magicdec.setup.prepare import Found, Known, Prepared, complete, find
from magicdec.workload.request_shapes import ShapedOptions


@dataclass(frozen=True)
class PreparedRing:
    """`run.config` is that of this rank's stage, `whole` that of a model over all ranks, `alone`
    that of a rank that needs no other to compute what it holds. None of them drafts; `drafting` is
    `run` with its drafts, if the command has any. `transport` is None for one rank. `split` says in
    one line what `--layer_split auto` chose; it is empty for another split."""

    run: Prepared
    whole: ResolvedConfig
    alone: ResolvedConfig
    options: SettledOptions
    grid: StageGrid
    layers: tuple[range, ...]
    transport: Transport | None
    split: str = ""
    drafting: Prepared | None = None


def prepare(run_config: RunConfig, options: RingOptions, launch: Launch) -> PreparedRing:
    """Find and check the model, divide it, make the prompts and plan the memory. Raises ValueError,
    one line naming the flag, for errors that a user can correct."""
    num_stages = count_stages(options.layer_split, launch.world_size)
    grid = make_grid(f"{FLAG} {options.layer_split}", num_stages, launch.world_size)
    settled = options.settle(grid)
    workload = options.batch_of(run_config.workload, settled.n_samples)
    known = Known()
    models = find(replace(run_config, workload=workload), launch, known, is_part=True)
    drafting, whole, source = models.config, without_drafts(models.config), models.source
    machine = known.get(("machine",), lambda: probe_machine(launch))
    drafting_alone = alone_of(models, machine)
    check_split(options.layer_split, grid, source)
    check_groups(options, grid, whole, source.config)
    on_host = None if options.link is None else "an emulated link delays messages on the host"
    transport = choose_transport(whole.parallel, machine, on_host)
    stage = grid.stage_of(launch.rank)

    def check_here(layers: Sequence[range]) -> str:
        check_files(source, options.passes, layers, stage, launch.rank)
        configs, room = (whole, drafting), find_room(whole, launch, machine.num_gpus)
        return check_memory(configs, models.models, grid, layers, options.passes, room)

    of_ranks = drafting_alone if grid.tensor_parallel == 1 else drafting
    run = complete_part(models, of_stage(of_ranks, grid, stage), known, options)
    drafts = run if SPECULATIVE_RING in options.passes else None
    run = replace(run, config=without_drafts(run.config))
    split = find_split(drafts or run, options, grid)
    run = replace(run, memory=check_together(launch, partial(check_here, split.layers)))
    settled = replace(settled, flags=replace(options, layer_split=split.layer_split))
    check_agreement(run_config, run, split.layers, settled.describe(), transport)
    alone, reason = without_drafts(drafting_alone), describe_split(split.layer_split, split)
    return PreparedRing(run, whole, alone, settled, grid, split.layers, transport, reason, drafts)


def alone_of(models: Found, machine: Machine) -> ResolvedConfig:
    """The config of a rank that needs no other to compute what it holds, where this is resolved for
    all ranks."""
    draft = models.models.draft
    obstacles = (
        layer_obstacle(models.models.target),
        None if draft is None else layer_obstacle(draft),
    )
    return without_collectives(models.config, machine, *obstacles)


def complete_part(
    models: Found, config: ResolvedConfig, known: Known, options: ShapedOptions
) -> Prepared:
    """The run of one rank, with a prompt for each request. Its memory is not planned yet, and ranks
    have not agreed on anything."""
    count = len(options.shapes), "--num_requests"
    return complete(replace(models, config=config), known, lambda launch, check: "", count)


def describe_split(text: str | None, split: ChosenSplit) -> str:
    """What `--layer_split auto` chose, in one line; empty for another split."""
    return split.reason and f"{FLAG} {text}: {split.reason}"


def check_agreement(
    run_config: RunConfig,
    run: Prepared,
    layers: Sequence[range],
    settings: Mapping[str, Any],
    transport: Transport | None,
) -> None:
    """Raises ValueError, on every rank, if a rank has another version, model, split or setting."""
    facts: dict[str, Any] = {"magicdec": version("magicdec")}
    facts |= {f"model's {name}": value for name, value in asdict(run.source.config).items()}
    facts |= {"layers": [len(each) for each in layers], **settings}
    del facts["machine"]  # every host has a file of its own
    if transport is not None:
        facts["messages"] = transport.describe()
    facts["--threads"] = agreed_threads(run_config.parallel.threads)
    facts["model's weights, by their fingerprint,"] = fingerprint(run.source)
    check_equal(run.launch, facts, "pipeline")


def check_split(split: str | None, grid: StageGrid, source: ModelSource) -> None:
    """Raises ValueError for a split that cannot be, before anything is timed."""
    if split is not None and is_auto(split):
        check_source(split, source)
    any_times = [StageTimes(0.0, 1.0)] * grid.num_stages
    split_layers(split, grid.num_stages, source.config.num_layers, any_times)


def find_split(run: Prepared, options: RingOptions, grid: StageGrid) -> ChosenSplit:
    """The split that all ranks come to, before any process group of the run starts. `run.config` is
    that of this rank's stage, with drafts if the command has any."""
    step = DecodeStep(options.lane_size, options.mean_context, num_drafts_of(run.config))
    tokens = f" and {step.num_drafts} drafts" if step.num_drafts else ""
    origin = describe_origin(options.machine)
    timing = RingTiming(run, [grid.ranks_of(stage) for stage in range(grid.num_stages)], step)
    return choose_split(
        options.layer_split, timing.stages, run.source.config.num_layers, run.launch,
        f"{origin} for messages of {step.rows} with {step.context} cached tokens{tokens} each",
        lambda: timing.find_times(options.machine),
    )  # fmt: skip


def check_files(
    source: ModelSource, passes: Sequence[str], layers: Sequence[range], stage: int, rank: int
) -> None:
    """Raises ValueError if a chunk of the checkpoint is not on this host that a pass reads here."""
    check_part(source, layers[stage], has_ends=stage == 0)
    baselines = [name for name in passes if name not in RINGS]
    whole = [name for name in baselines if name == TENSOR_PARALLEL or rank == 0]
    if not whole:
        return
    try:
        check_part(source, range(source.config.num_layers), has_ends=True)
    except ValueError as error:
        names = " ".join(whole)
        raise ValueError(f"--modes {names}, which read the whole model: {error}") from error


def check_groups(
    options: RingOptions, grid: StageGrid, whole: ResolvedConfig, model: ModelConfig
) -> None:
    """Raises ValueError if ranks are to share layers that cannot: those of a stage, or all of them
    in the baseline by tensor parallelism."""
    if grid.tensor_parallel > 1:
        check_stage_group(f"{FLAG} {options.layer_split}", whole.parallel)
    if TENSOR_PARALLEL not in options.baselines:
        return
    check_stage_group(f"--modes {TENSOR_PARALLEL}", whole.parallel)
    try:
        Shard(0, grid.world_size).heads(model.num_heads, model.num_kv_heads)
    except ValueError as error:
        raise ValueError(f"--modes {TENSOR_PARALLEL}: {error}") from error


def of_stage(config: ResolvedConfig, grid: StageGrid, stage: int) -> ResolvedConfig:
    """The config of the ranks of one stage."""
    parallel = replace(config.parallel, rank_group=grid.ranks_of(stage))
    return replace(config, parallel=parallel)


def without_drafts(config: ResolvedConfig) -> ResolvedConfig:
    """The config of a pass that drafts nothing."""
    decoding = replace(config.decoding, strategy=BASELINE, drafter=None)
    return replace(config, decoding=decoding, draft=None)


def of_one_process(config: ResolvedConfig, num_rows: int) -> ResolvedConfig:
    """The config of the whole model on the first rank, with that many rows."""
    parallel = replace(config.parallel, rank_group=(0,))
    workload = replace(config.workload, batch_size=num_rows)
    return replace(config, parallel=parallel, workload=workload)


def expected_threads(parallel: ResolvedParallel, launch: Launch, is_one_process: bool) -> int:
    """The CPU threads of this rank. One process on the first rank has those of all ranks of its
    host, and the others wait."""
    if not is_one_process:
        return parallel.threads_of(launch.rank)
    return parallel.threads_on(launch.local_ranks) if launch.rank == 0 else 0


def check_memory(
    configs: tuple[ResolvedConfig, ResolvedConfig],
    models: Models,
    grid: StageGrid,
    layers: Sequence[range],
    passes: Sequence[str],
    room: Room,
) -> str:
    """The line to print: what the ranks of this room need for the pass that needs most. `configs`
    are that of passes without drafts and that of the pass with them. Raises ValueError if that is
    more than is free."""
    whole, drafting = configs
    plans = {
        name: add_up([*plan_pass(name, config, models, grid, layers, room.ranks)])
        for name, config in ((n, drafting if n == SPECULATIVE_RING else whole) for n in passes)
    }
    name, plan = max(plans.items(), key=lambda item: item[1].total)
    if refusal := room.refusal(plan):
        others = "" if name in RINGS else "; leave it out of --modes"
        raise ValueError(
            f"--n_samples {whole.workload.batch_size} --prefix_len {whole.workload.prefix_len}: "
            f"{name} needs {refusal}{others}"
        )
    return room.describe(plan, f" for {name}")


def plan_pass(
    name: str,
    whole: ResolvedConfig,
    models: Models,
    grid: StageGrid,
    layers: Sequence[range],
    ranks: Sequence[int],
) -> Iterator[MemoryPlan]:
    """The plans of these ranks that hold a model in that pass."""
    yield MemoryPlan(0, 0)
    model = models.target
    for rank in ranks:
        if name == TENSOR_PARALLEL:
            yield plan_rank(whole, Models(model), rank)
        elif name in RINGS:
            stage = grid.stage_of(rank)
            config = of_stage(replace(whole, draft=None), grid, stage)
            plan = plan_stage(config, model, len(layers[stage]), stage == 0, rank)
            if stage == 0 and whole.draft is not None:
                with_draft = plan_rank(of_stage(whole, grid, stage), models, rank)
                plan = replace(
                    plan, draft_weights=with_draft.draft_weights, draft_kv=with_draft.draft_kv
                )
            yield plan
        elif rank == 0:
            num_rows = 1 if name == SEQUENTIAL else whole.workload.batch_size
            yield plan_rank(of_one_process(whole, num_rows), Models(model), rank)
