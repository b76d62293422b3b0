"""What the ranks of a room need for each pass of `magicdec recurrent`, and whether it is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from magicdec.config.resolved import ResolvedConfig
from magicdec.distributed.stages import StageGrid
from magicdec.memory.check import add_up
from magicdec.memory.plan import MemoryPlan, Models, plan_rank, plan_stage
from magicdec.memory.room import Room
from magicdec.names import SEQUENTIAL
from magicdec.pipeline.options import RINGS, SPECULATIVE_RING, TENSOR_PARALLEL
from magicdec.pipeline.pass_configs import of_one_process, of_stage


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
