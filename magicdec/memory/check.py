"""Checks whether the memory plan of a run fits, before anything is allocated. The user gets one
line with the plan, or one line of refusal with the numbers and with what would fit.

Every rank makes its own plan and reads its own free memory. The readings may differ, so if one rank
refuses, all refuse with the same message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, replace

from magicdec.config.resolved import ResolvedConfig
from magicdec.distributed.groups import Launch, first_refusal
from magicdec.memory.plan import MemoryPlan, Models, plan_rank


def check_together(launch: Launch, check: Callable[[], str], topic: str = "refusals") -> str:
    """The line that `check` returns on this rank. Raises ValueError on every rank if `check` does
    so on one. Ranks that check several things together have a topic for each."""
    try:
        line, refusal = check(), ""
    except ValueError as error:
        line, refusal = "", str(error)
    refusal = first_refusal(launch, refusal, topic)
    if refusal:
        raise ValueError(refusal)
    return line


def check_memory(config: ResolvedConfig, models: Models, launch: Launch, free: int | None) -> str:
    """The line to print. `config` is resolved. `free` bytes are free on this rank's GPU, or on the
    host for all its ranks; None if it is not known. Raises ValueError if the plan needs more."""
    plan = needed(config, models, launch)
    place = describe_place(config, launch)
    if free is None:
        return f"{plan.describe()} {place}; how much is free is not known here"
    if plan.total > free:
        w = config.workload
        raise ValueError(
            f"--B {w.batch_size} --prefix_len {w.prefix_len} needs {plan.describe()} {place}, "
            f"{free / 1e9:.2f} GB are free; {advice(config, models, launch, free)}"
        )
    return f"{plan.describe()} {place}; {free / 1e9:.2f} GB free"


def needed(
    config: ResolvedConfig, models: Models, launch: Launch, keeps_queries: bool = True
) -> MemoryPlan:
    """On a CPU, the plan of all ranks of this host together. On CUDA, the plan of the rank that
    needs most, so that every rank comes to the same result. `keeps_queries` as in `plan_rank`."""
    group = config.parallel.rank_group
    if config.parallel.device != "cpu":
        plans = [plan_rank(config, models, rank, keeps_queries) for rank in group]
        return max(plans, key=lambda p: p.total)
    return add_up([plan_rank(config, models, rank, keeps_queries) for rank in launch.local_ranks])


def planned(config: ResolvedConfig, models: Models) -> MemoryPlan:
    """The plan of all ranks of the run together."""
    group = config.parallel.rank_group
    return add_up([plan_rank(config, models, rank) for rank in group])


def add_up(plans: Sequence[MemoryPlan]) -> MemoryPlan:
    return MemoryPlan(*map(sum, zip(*map(astuple, plans), strict=True)))


def describe_place(config: ResolvedConfig, launch: Launch) -> str:
    if config.parallel.device != "cpu":
        return "on a rank's GPU"
    count = launch.local_world_size
    return "on this host" if count == 1 else f"on this host's {count} ranks"


def advice(config: ResolvedConfig, models: Models, launch: Launch, free: int) -> str:
    """The largest B at this prefix and the largest prefix at this B, or that there is none."""

    def fits(batch_size: int, prefix_len: int) -> bool:
        w = config.workload
        smaller = replace(w, batch_size=batch_size, prefix_len=prefix_len)
        changed = replace(config, workload=smaller)
        return needed(changed, models, launch).total <= free

    w = config.workload
    B = largest(lambda b: fits(b, w.prefix_len), w.batch_size)
    prefix = largest(lambda p: fits(w.batch_size, p), w.prefix_len)
    if B and prefix:
        return f"--B {B} at this prefix or --prefix_len {prefix} at this B would fit"
    if B:
        return f"--B {B} at this prefix would fit"
    if prefix:
        return f"--prefix_len {prefix} at this B would fit, at this prefix not even --B 1"
    alone = largest(lambda p: fits(1, p), w.prefix_len)
    if alone:
        return f"--B 1 --prefix_len {alone} would fit"
    return "no --B and --prefix_len would fit: choose a smaller model, or more ranks elsewhere"


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number below `limit` that fits, or 0. If a number fits, all smaller ones do."""
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
