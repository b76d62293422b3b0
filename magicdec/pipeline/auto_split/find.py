"""Where a rank finds the times that `--layer_split auto` splits by: a machine file, or a short
measurement.

Owns the checks of both. Must not know how ranks agree on a split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from magicdec.cost_model.costs import Deployment
from magicdec.cost_model.plan import DTYPE_BYTES
from magicdec.cost_model.stage_plan import stage_times
from magicdec.distributed.groups import Launch
from magicdec.distributed.layer_split import AUTO, FLAG, StageTimes
from magicdec.distributed.stages import StageGrid
from magicdec.hardware.ceiling_file import load_machine
from magicdec.hardware.environment import release_memory
from magicdec.memory.check import add_up, check_together
from magicdec.memory.free_memory import Room, find_room
from magicdec.memory.plan import MemoryPlan, Models, plan_rank, plan_stage
from magicdec.model.checkpoint.chunks import ChunkedWeights
from magicdec.model.checkpoint.source import ModelSource
from magicdec.pipeline.auto_split.choose import RankTimes
from magicdec.pipeline.auto_split.measure import DecodeStep, Timed, measure_times
from magicdec.setup.prepare import Prepared
from magicdec.setup.step_estimate import check_machine

ROOM_TOPIC = "room to time layers"


def check_source(asked: str, source: ModelSource) -> None:
    """Raises ValueError if the model's files fix the split already."""
    if isinstance(source.weights, ChunkedWeights):
        raise ValueError(
            f"{FLAG} {asked}: {source.name} holds chunks that were made with {FLAG} "
            f"{source.weights.layers}; give that"
        )


def describe_origin(machine: Path | None) -> str:
    """Where times come from."""
    return "measured" if machine is None else f"predicted from {machine}"


def describe_source(machine: Path | None, step: DecodeStep) -> str:
    """Where the times of a ring come from, for the line that says what was chosen."""
    where, tokens = describe_origin(machine), ""
    if step.num_drafts:
        tokens = f" and {step.num_drafts} drafts"
    return f"{where} for messages of {step.rows} with {step.context} cached tokens{tokens} each"


def find_times(
    run: Prepared, grid: StageGrid, launch: Launch, machine: Path | None, step: DecodeStep
) -> RankTimes:
    """The times of such a step on this rank. `run.config` is that of this rank's stage, with drafts
    if the step has any. All ranks must call it. Raises ValueError, naming the flag, on every rank
    if one of them cannot measure."""
    if machine is not None:
        return predict_times(run, grid, launch, machine, step)
    most = run.source.config.max_length - step.new_tokens
    timed = Timed(run, grid, replace(step, context=min(step.context, most)))
    room = find_room(run.config, launch, torch.cuda.device_count())
    check_together(launch, lambda: check_room(room_plans(timed, room), room), ROOM_TOPIC)
    times = measure_times(timed)
    release_memory(timed.device)  # before anyone reads how much is free for the run
    return times


def predict_times(
    run: Prepared, grid: StageGrid, launch: Launch, path: Path, step: DecodeStep
) -> RankTimes:
    """From the rates in a machine file of this machine."""
    first, other = predict_stages(run, grid.tensor_parallel, launch, path, step)
    has_ends = grid.stage_of(launch.rank) == 0
    return RankTimes(other.layer_s, other.fixed_s, first.fixed_s if has_ends else None)


def predict_stages(
    run: Prepared, tp: int, launch: Launch, path: Path, step: DecodeStep
) -> tuple[StageTimes, StageTimes]:
    """Of a stage with the ends of the model, and of one without, each of `tp` ranks."""
    config = run.config
    machine, dtype = load_machine(path), config.model.dtype
    check_machine(path, machine, config, launch)
    hardware = machine.hardware(dtype)
    nodes = -(-tp // launch.local_world_size)
    for link, ends in (("link", tp // nodes), ("node_link", nodes)):
        if ends > 1 and getattr(hardware, link) is None:
            raise ValueError(f"--machine {path} has no {link}, over which a stage's ranks reduce")
    is_int8, size = config.model.target_dtype == "int8", DTYPE_BYTES[dtype]
    return stage_times(
        Deployment(run.source.config, hardware, size, tp, nodes, is_int8),
        *(step.rows, step.context, step.num_tokens),
    )


def room_plans(timed: Timed, room: Room) -> list[MemoryPlan]:
    """What the ranks of this room need to time their stages."""
    config, plans = timed.config, list[MemoryPlan]()
    for rank in room.ranks:
        stage = timed.grid.stage_of(rank)
        parallel = replace(config.parallel, rank_group=timed.grid.ranks_of(stage))
        of_stage = replace(config, parallel=parallel)
        place = replace(of_stage, draft=None), timed.run.source.config
        plans.append(plan_stage(*place, timed.num_layers + 2, stage == 0, rank))
        if stage == 0 and timed.run.draft_source is not None:
            models = Models(timed.run.source.config, timed.run.draft_source.config)
            with_draft = plan_rank(of_stage, models, rank)
            plans.append(MemoryPlan(0, 0, with_draft.draft_weights, with_draft.draft_kv))
    return plans


def check_room(plans: Sequence[MemoryPlan], room: Room) -> str:
    """Raises ValueError if what all ranks of this room time does not fit beside each other."""
    if refusal := room.refusal(add_up([MemoryPlan(0, 0), *plans])):
        raise ValueError(f"{FLAG} {AUTO}: timing a few layers needs {refusal}; give layer counts")
    return ""
