"""The planned memory of all drafts of a model: its weights and the cache of its texts and their
forks, which all contexts share, every draft's weights, which stay loaded, and one draft's cache at
a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from magicdec.bench.acceptance.forks import can_fork, num_forks
from magicdec.bench.study.cells import StudyCell
from magicdec.config.resolved import ResolvedConfig
from magicdec.setup.memory_check import MemoryBudget, describe_place
from magicdec.setup.memory_plan import (
    MemoryPlan,
    forward_bytes,
    logits_bytes,
    model_plans_of,
    plan_of,
    working_bytes,
)
from magicdec.setup.model_plan import ModelPlan
from magicdec.setup.prepare import ResolvedRun
from magicdec.systems.shared_prefill import CacheDemand


def demand_of(runs: Sequence[ResolvedRun]) -> CacheDemand:
    """The cache that drafts of all contexts share. It keeps every token, because shorter contexts
    go back."""
    configs = [run.config for run in runs]
    forks = max((num_forks(run.config) for run in runs if can_fork(run)), default=0)
    states = next(filter(None, map(state_layers_of, configs)), ())
    room = replace(CacheDemand.of(configs), rewound=None, num_forks=forks, is_nested=True)
    return replace(room, state_layers=states)


def state_layers_of(config: ResolvedConfig) -> tuple[int, ...]:
    """The layers after which a head reads states; none if no head drafts."""
    return () if config.draft is None else config.draft.state_layers


def plan_of_cells(groups: Sequence[Sequence[StudyCell]]) -> MemoryPlan:
    """The memory of these groups of cells, each of which shares a prefill, one after another."""
    draft_weights: dict[object, int] = {}
    plans = []
    for group in groups:
        room = demand_of([cell.resolved for cell in group])
        for cell in group:
            config = cell.resolved.config
            plans_of_models = [
                replace(plan, kept_states=room.state_layers)
                for plan in model_plans_of(config, cell.resolved.models, 0)
            ]
            num_forks = room.num_forks if can_fork(cell.resolved) else 0
            own = plan_of([plan.with_forks(num_forks) for plan in plans_of_models])
            # The cache that all share.
            shared = replace(
                plans_of_models[0],
                row_tokens=room.max_tokens,
                rewound=None,
                state_room=room.state_room,
            )
            forked = shared.with_forks(room.num_forks)
            draft = None if config.draft is None else config.draft.model
            draft_weights[draft, config.low_bit] = own.draft_weights
            # The target is loaded before its cache takes memory.
            loads = config.low_bit is not None or config.draft is not None
            working = working_bytes(shared, is_timed=False, loads=loads)
            working = max(working, fork_bytes(shared, room))
            plans.append(replace(own, kv=forked.kv_bytes, working=working))
    largest = max(plans, key=lambda plan: plan.kv + plan.draft_kv + plan.working)
    return replace(
        largest,
        weights=max(plan.weights for plan in plans),
        draft_weights=sum(draft_weights.values()),
    )


def fork_bytes(plan: ModelPlan, room: CacheDemand) -> int:
    """The working memory of a draft step of all forks. The distributions of sampled drafts are kept
    for the whole draft."""
    num_kept = plan.config.decoding.max_gamma if plan.config.sampling.temperature > 0 else 1
    forward = forward_bytes(plan, (room.num_forks, 1, plan.tokens))
    return forward + logits_bytes(plan, room.num_forks * num_kept)


def check_memory(groups: Sequence[Sequence[StudyCell]]) -> str:
    """The line about the planned memory. Raises ValueError if it is more than what is free."""
    cell = groups[0][0]
    assert cell.prepared is not None, "only cells that can run are measured"
    config = cell.resolved.config
    plan = plan_of_cells(groups)
    room = MemoryBudget((0,), describe_place(config, cell.resolved.launch), cell.prepared.free)
    if (refusal := room.refusal(plan)) is not None:
        longest = max(
            cell.resolved.config.workload.prefix_len for group in groups for cell in group
        )
        raise ValueError(
            f"--B {config.workload.batch_size} --prefix_len {longest} needs {refusal}; choose a "
            "smaller --B, shorter contexts or fewer drafts"
        )
    return room.describe(plan)
