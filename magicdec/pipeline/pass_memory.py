"""What each pass of `magicdec recurrent` needs: its config, made from that of a model over all
ranks, its threads, and its memory, and whether that is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from magicdec.config.resolved import ResolvedConfig, ResolvedParallel
from magicdec.distributed.groups import Launch
from magicdec.distributed.stages import StageGrid
from magicdec.memory.check import add_up
from magicdec.memory.free_memory import Room
from magicdec.memory.plan import MemoryPlan, Models, plan_rank, plan_stage
from magicdec.names import BASELINE, SEQUENTIAL
from magicdec.pipeline.options import RINGS, SPECULATIVE_RING, TENSOR_PARALLEL


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
                of_draft = with_draft.draft_weights, with_draft.draft_kv
                plan = replace(plan, draft_weights=of_draft[0], draft_kv=of_draft[1])
            yield plan
        elif rank == 0:
            num_rows = 1 if name == SEQUENTIAL else whole.workload.batch_size
            yield plan_rank(of_one_process(whole, num_rows), Models(model), rank)
