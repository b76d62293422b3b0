"""The memory plan of `magicdec latency`: how much the largest cell of its grid needs, and whether
every cell fits. It only computes and allocates nothing.

New caches are made for each (B, context); the caches of all drafts exist at the same time. No
prompt is prefilled.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from magicdec.config.resolved import ResolvedConfig
from magicdec.distributed.groups import Launch
from magicdec.latency.record import Grid
from magicdec.memory.check import describe_place, needed
from magicdec.memory.plan import MemoryPlan, Models


def check_grid_memory(
    config: ResolvedConfig, grid: Grid, models: Models, launch: Launch, free: int | None
) -> str:
    """The line to print. `config` is resolved. Raises ValueError if a cell does not fit; the
    message names the largest cell that does."""
    places = {
        (B, context): plan_place(config, grid, models, launch, B, context)
        for B, context in itertools.product(grid.batch_sizes, grid.contexts)
    }
    ordered = sorted(places, key=lambda place: places[place].total)
    flags = "--B {} --prefix_len {}".format(*ordered[-1])
    plan = places[ordered[-1]]
    need = f"{plan.describe()} {describe_place(config, launch)}"
    if free is None:
        return f"{need} at {flags}; how much is free is not known here"
    if plan.total <= free:
        return f"{need} at {flags}; {free / 1e9:.2f} GB free"
    fitting = ["--B {} --prefix_len {}".format(*p) for p in ordered if places[p].total <= free]
    advice = "no cell of the grid would fit"
    if fitting:
        advice = f"of the grid, {fitting[-1]} is the largest that would fit"
    raise ValueError(f"{flags} needs {need}, {free / 1e9:.2f} GB are free; {advice}")


def plan_place(
    config: ResolvedConfig, grid: Grid, models: Models, launch: Launch, B: int, context: int
) -> MemoryPlan:
    """The memory plan of a self-speculative run that verifies the largest number of new tokens at
    that context. The caches of all drafts exist at the same time. There is no prefill that could
    keep queries."""
    run = replace(
        config,
        attention=replace(config.attention, prefill_chunk=1),
        decoding=replace(
            config.decoding, strategy="speculative", drafter="self",
            num_draft_tokens=max(grid.new_tokens) - 1,
        ),
        workload=replace(config.workload, batch_size=B, prefix_len=context, gen_len=1),
    )  # fmt: skip
    plans = [
        needed(replace(run, kv=kv.resolve()), models, launch, keeps_queries=False)
        for kv in grid.drafts
    ]
    return replace(
        plans[0],
        draft_kv=sum(plan.draft_kv for plan in plans),
        working=max(plan.working for plan in plans),
    )
