"""Prepares what `magicdec recurrent` measures: checks everything before any process group starts,
and before memory is allocated for more than the few layers that `--layer_split auto` times.

Must not know the flags, nor what is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version

from magicdec.config.choices.transport import Transport, check_stage_group, choose_transport
from magicdec.config.resolve import without_collectives
from magicdec.config.resolved import ResolvedConfig
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
from magicdec.hardware.environment import probe_machine
from magicdec.memory.check import check_together
from magicdec.memory.free_memory import find_room
from magicdec.memory.plan import Models
from magicdec.model.checkpoint.source import ModelSource, check_part, fingerprint
from magicdec.model.config import ModelConfig
from magicdec.pipeline.auto_split.choose import ChosenSplit, choose_split
from magicdec.pipeline.auto_split.find import check_source, describe_source, find_times
from magicdec.pipeline.auto_split.measure import DecodeStep
from magicdec.pipeline.options import (
    RINGS,
    SPECULATIVE_RING,
    TENSOR_PARALLEL,
    RingOptions,
    SettledOptions,
)
from magicdec.pipeline.pass_memory import check_memory, of_stage, without_drafts
from magicdec.pipeline.speculation import num_drafts_of
from magicdec.setup.prepare import Known, Prepared, complete, find


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


def prepare(asked: RunConfig, options: RingOptions, launch: Launch) -> PreparedRing:
    """Find and check the model, divide it, make the prompts and plan the memory. Raises ValueError,
    one line naming the flag, for errors that a user can correct."""
    num_stages = count_stages(options.layer_split, launch.world_size)
    grid = make_grid(f"{FLAG} {options.layer_split}", num_stages, launch.world_size)
    settled = options.settle(grid)
    workload = options.batch_of(asked.workload, settled.n_samples)
    known = Known()
    found = find(replace(asked, workload=workload), launch, known, is_part=True)
    drafting, whole = found.config, without_drafts(found.config)
    machine = known.get(("machine",), lambda: probe_machine(launch))
    obstacles = obstacles_of(found.models)
    alone, drafting_alone = (
        without_collectives(config, machine, *obstacles) for config in (whole, drafting)
    )
    check_split(options.layer_split, grid, found.source)
    check_groups(options, grid, whole, found.source.config)
    on_host = None if options.link is None else "an emulated link delays messages on the host"
    transport = choose_transport(whole.parallel, machine, on_host)
    stage = grid.stage_of(launch.rank)

    def check_here(layers: Sequence[range]) -> str:
        check_files(found.source, options.passes, layers, stage, launch.rank)
        configs, room = (whole, drafting), find_room(whole, launch, machine.num_gpus)
        return check_memory(configs, found.models, grid, layers, options.passes, room)

    of_ranks = drafting_alone if grid.tensor_parallel == 1 else drafting
    run = complete(
        replace(found, config=of_stage(of_ranks, grid, stage)),
        known,
        lambda at, _: "",  # what ranks must agree on follows
        (len(options.shapes), "--num_requests"),
    )
    drafts = run if SPECULATIVE_RING in options.passes else None
    run = replace(run, config=without_drafts(run.config))
    split = find_split(drafts or run, options, grid, launch)
    layers = split.layers
    run = replace(run, memory=check_together(launch, partial(check_here, layers)))
    settled = replace(settled, asked=replace(options, layer_split=split.asked))
    settings = settings_of(settled, layers, transport)
    settings["--threads"] = agreed_threads(asked.parallel.threads)
    check_agreement(launch, run.source, settings)
    reason = split.reason and f"{FLAG} {split.asked}: {split.reason}"
    return PreparedRing(run, whole, alone, settled, grid, layers, transport, reason, drafts)


def settings_of(
    options: SettledOptions, layers: Sequence[range], transport: Transport | None
) -> dict[str, object]:
    """What all ranks must agree on."""
    settings = {"layers": [len(each) for each in layers], **options.describe()}
    del settings["machine"]  # every host has a file of its own
    if transport is not None:
        settings["messages"] = transport.describe()
    return settings


def check_split(asked: str | None, grid: StageGrid, source: ModelSource) -> None:
    """Raises ValueError for a split that cannot be, before anything is timed."""
    if asked is not None and is_auto(asked):
        check_source(asked, source)
    any_times = [StageTimes(0.0, 1.0)] * grid.num_stages
    split_layers(asked, grid.num_stages, source.config.num_layers, any_times)


def obstacles_of(models: Models) -> tuple[str | None, str | None]:
    """What in the layers of the target and of the draft native steps do not compute."""
    draft = models.draft
    return layer_obstacle(models.target), None if draft is None else layer_obstacle(draft)


def find_split(run: Prepared, options: RingOptions, grid: StageGrid, launch: Launch) -> ChosenSplit:
    """The split that all ranks come to, before any process group of the run starts. `run.config` is
    that of this rank's stage, with drafts if the command has any."""
    step = DecodeStep(options.lane_size, options.mean_context, num_drafts_of(run.config))
    return choose_split(
        options.layer_split, [grid.ranks_of(stage) for stage in range(grid.num_stages)],
        run.source.config.num_layers, launch,
        describe_source(options.machine, step),
        lambda: find_times(run, grid, launch, options.machine, step),
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


def check_agreement(launch: Launch, source: ModelSource, settings: Mapping[str, object]) -> None:
    """Raises ValueError, on every rank, if a rank has another version, model or split."""
    of_model = {f"model's {name}": value for name, value in asdict(source.config).items()}
    facts = {"magicdec": version("magicdec"), **of_model, **settings}
    facts["model's weights, by their fingerprint,"] = fingerprint(source)
    check_equal(launch, facts, "pipeline")


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
