"""The memory plan of `magicdec latency`: how much the largest cell of its grid needs, and whether
every cell fits. It only computes and allocates nothing.

New caches are made for each (B, context); the caches of all drafts exist at the same time. No
prompt is prefilled.
"""

from __future__ import annotations

from dataclasses import replace

from magicdec.config.resolved import ResolvedConfig
from magicdec.config.sections import KVSection
from magicdec.distributed.groups import Launch
from magicdec.latency.record import Grid
from magicdec.memory.check import describe_place, needed
from magicdec.memory.plan import MemoryPlan, Models


def check_grid_memory(
    config: ResolvedConfig, grid: Grid, models: Models, launch: Launch, free: int | None
) -> str:
    """The line to print. `config` is resolved. Raises ValueError if a cell does not fit; the
    message names the largest cell that does."""
    plans = {
        (B, context): plan_place(config, grid, models, launch, B, context)
        for B in grid.batch_sizes
        for context in grid.contexts
    }
    ordered = sorted(plans, key=lambda place: plans[place].total)
    (B, context), place = ordered[-1], describe_place(config, launch)
    largest = f"{plans[B, context].describe()} {place} at --B {B} --prefix_len {context}"
    if free is None:
        return f"{largest}; how much is free is not known here"
    if plans[B, context].total <= free:
        return f"{largest}; {free / 1e9:.2f} GB free"
    fitting = [p for p in ordered if plans[p].total <= free]
    advice = "no cell of the grid would fit"
    if fitting:
        advice = "of the grid, --B {} --prefix_len {} is the largest that would fit".format(
            *fitting[-1]
        )
    raise ValueError(
        f"--B {B} --prefix_len {context} needs {plans[B, context].describe()} {place}, "
        f"{free / 1e9:.2f} GB are free; {advice}"
    )


def plan_place(
    config: ResolvedConfig, grid: Grid, models: Models, launch: Launch, B: int, context: int
) -> MemoryPlan:
    """The memory plan of a run that verifies the largest number of new tokens at that context. The
    caches of all drafts exist at the same time. There is no prefill that could keep queries."""
    runs = [as_run(config, grid, kv, B, context) for kv in grid.drafts]
    plans = [needed(run, models, launch, keeps_queries=False) for run in runs]
    return replace(
        plans[0],
        draft_kv=sum(plan.draft_kv for plan in plans),
        working=max(plan.working for plan in plans),
    )


def as_run(
    config: ResolvedConfig, grid: Grid, kv: KVSection, B: int, context: int
) -> ResolvedConfig:
    """The config of a self-speculative run whose rows hold as many tokens as the caches of these
    forwards."""
    most = max(grid.new_tokens)
    return replace(
        config,
        kv=kv.resolve(),
        attention=replace(config.attention, prefill_chunk=1),
        decoding=replace(
            config.decoding, strategy="speculative", drafter="self", num_draft_tokens=most - 1
        ),
        workload=replace(config.workload, batch_size=B, prefix_len=context, gen_len=1),
    )
