"""Where a rank finds the times that `--layer_split auto` splits by: a machine file, or a short
measurement.

Owns the checks of both. Must not know how ranks agree on a split.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from magicdec.config.resolved import ResolvedConfig
from magicdec.cost_model.costs import Deployment
from magicdec.cost_model.plan import DTYPE_BYTES
from magicdec.cost_model.stage_costs import stage_times
from magicdec.distributed.groups import Launch
from magicdec.distributed.layer_split import AUTO, FLAG
from magicdec.distributed.stages import StageGrid
from magicdec.distributed.tensor_parallel import Shard
from magicdec.hardware.ceiling_file import load_machine
from magicdec.hardware.devices import device_of
from magicdec.memory.check import add_up
from magicdec.memory.plan import plan_stage
from magicdec.memory.room import Room, find_room
from magicdec.model.checkpoint.chunks import ChunkedWeights
from magicdec.model.checkpoint.source import ModelSource
from magicdec.pipeline.auto_split.choose import RankTimes
from magicdec.pipeline.auto_split.measure import STEPS, Timed, measure_times
from magicdec.setup.step_estimate import check_machine


def check_source(asked: str, source: ModelSource) -> None:
    """Raises ValueError if the model's files fix the split already."""
    if isinstance(source.weights, ChunkedWeights):
        raise ValueError(
            f"{FLAG} {asked}: {source.name} holds chunks that were made with {FLAG} "
            f"{source.weights.layers}; give that"
        )


def describe_source(machine: Path | None, rows: int, context: int) -> str:
    """Where the times come from, for the line that says what was chosen."""
    where = "measured" if machine is None else f"predicted from {machine}"
    return f"{where} for messages of {rows} with {context} cached tokens each"


def find_times(
    config: ResolvedConfig,
    source: ModelSource,
    grid: StageGrid,
    launch: Launch,
    machine: Path | None,
    rows: int,
    context: int,
) -> RankTimes:
    """The times of a decode step of `rows` rows that hold `context` tokens each. `config` is that
    of this rank's stage. Raises ValueError, naming the flag."""
    if machine is not None:
        return predict_times(config, source, grid, launch, machine, rows, context)
    shard = Shard(launch.rank % grid.tensor_parallel, grid.tensor_parallel)
    context = min(context, source.config.max_length - STEPS - 1)
    is_first = grid.stage_of(launch.rank) == 0
    device = device_of(config.parallel.device, launch.local_rank)
    timed = Timed(config, source, shard, rows, context, is_first, device)
    check_room(timed, grid, find_room(config, launch, torch.cuda.device_count()))
    return measure_times(timed)


def predict_times(
    config: ResolvedConfig,
    source: ModelSource,
    grid: StageGrid,
    launch: Launch,
    path: Path,
    rows: int,
    context: int,
) -> RankTimes:
    """From the rates in a machine file of this machine."""
    machine, dtype = load_machine(path), config.model.dtype
    check_machine(path, machine, config, launch)
    hardware, tp = machine.hardware(dtype), grid.tensor_parallel
    nodes = -(-tp // launch.local_world_size)
    for link, ends in (("link", tp // nodes), ("node_link", nodes)):
        if ends > 1 and getattr(hardware, link) is None:
            raise ValueError(f"--machine {path} has no {link}, over which a stage's ranks reduce")
    is_int8, size = config.model.target_dtype == "int8", DTYPE_BYTES[dtype]
    first, other = stage_times(
        Deployment(source.config, hardware, size, tp, nodes, is_int8), rows, context
    )
    return RankTimes(other.layer_s, other.fixed_s, first.fixed_s)


def check_room(timed: Timed, grid: StageGrid, room: Room) -> None:
    """Raises ValueError if the layers that all ranks of this room time do not fit beside each
    other."""
    config, plans = timed.config, []
    config = replace(config, workload=replace(config.workload, batch_size=timed.rows))
    for rank in room.ranks:
        stage = grid.stage_of(rank)
        group = replace(config.parallel, rank_group=grid.ranks_of(stage))
        place = replace(config, parallel=group), timed.source.config
        plans.append(plan_stage(*place, timed.num_layers + 2, stage == 0, rank))
    if refusal := room.refusal(add_up(plans)):
        raise ValueError(f"{FLAG} {AUTO}: timing a few layers needs {refusal}; give layer counts")
