"""Checks whether the memory of `magicdec inflight` fits, before anything is allocated.

Owns what differs from a run: the KV cache holds what its blocks hold, and not every row at full
length. Must not know the parts of a memory plan (`memory.plan`).
"""

from __future__ import annotations

from dataclasses import replace

from magicdec.attention.backend import backend_class
from magicdec.config.resolved import ResolvedConfig
from magicdec.distributed.groups import Launch
from magicdec.memory.check import describe_place, largest, needed
from magicdec.memory.plan import MemoryPlan, Models
from magicdec.memory.working_memory import max_tokens
from magicdec.serving.options import ServingOptions


def check_memory(
    options: ServingOptions,
    config: ResolvedConfig,
    models: Models,
    launch: Launch,
    free: int | None,
) -> str:
    """The line to print. `free` as in `memory.check`. Raises ValueError, with the numbers and what
    would fit, if the plan needs more than is free."""
    plan = plan_of(options, config, models, launch)
    place = describe_place(config, launch)
    if free is None:
        return f"{plan.describe()} {place}; how much is free is not known here"
    if plan.total <= free:
        return f"{plan.describe()} {place}; {free / 1e9:.2f} GB free"

    def fits(cache_tokens: int) -> bool:
        smaller = replace(options, cache_tokens=cache_tokens)
        return plan_of(smaller, config, models, launch).total <= free

    most = largest(fits, stored_tokens(options, config))
    advice = f"--cache_tokens {most} would fit"
    if most < max_tokens(config):
        advice = "choose a smaller --B, shorter requests or a smaller model"
    raise ValueError(
        f"--B {options.max_concurrency} with requests of up to {options.longest} "
        f"tokens needs {plan.describe()} {place}, {free / 1e9:.2f} GB are free; {advice}"
    )


def plan_of(
    options: ServingOptions, config: ResolvedConfig, models: Models, launch: Launch
) -> MemoryPlan:
    """The plan of a run of whole rows, with the KV cache that these blocks are."""
    plan, tokens = needed(config, models, launch), max_tokens(config)
    block = backend_class(config.attention.backend)().block_size(tokens)
    in_plan = config.workload.batch_size * -(-tokens // block) * block
    return replace(plan, kv=plan.kv // in_plan * stored_tokens(options, config))


def stored_tokens(options: ServingOptions, config: ResolvedConfig) -> int:
    """Tokens that the KV cache has room for, in whole blocks (`ModelRunner.storage`)."""
    block = backend_class(config.attention.backend)().block_size(options.block_tokens)
    if options.cache_tokens is not None:
        return -(-options.cache_tokens // block) * block
    return options.max_concurrency * -(-max_tokens(config) // block) * block
