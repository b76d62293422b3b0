"""Prepares what `magicdec inflight` serves: checks everything before memory is allocated, and makes
the server. Its memory differs from a run's: the KV cache holds what its blocks hold, and not every
row at full length.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from magicdec.attention.backend import backend_class
from magicdec.autotune import settle
from magicdec.config.resolved import ResolvedConfig
from magicdec.config.run_config import RunConfig
from magicdec.console import Progress
from magicdec.decoding.recorder import CudaGraphs, Eager, Recorder
from magicdec.decoding.strategy import DecodingStrategy, Setup, make_strategy
from magicdec.distributed.groups import Launch
from magicdec.drafting.policies.policy import keep_queries
from magicdec.memory.check import Room, describe_place, largest, needed
from magicdec.memory.plan import MemoryPlan, Models, max_tokens
from magicdec.names import BASELINE
from magicdec.scheduling.plan import Limits
from magicdec.serving.options import Pass, ServingOptions
from magicdec.serving.server import Server
from magicdec.setup.loading import LoadedModels, make_draft, make_target
from magicdec.setup.prepare import Known, Prepared, check_threads_equal, complete, find
from magicdec.setup.session import RankSession


def prepare(run_config: RunConfig, options: ServingOptions, launch: Launch) -> Prepared:
    """Find and check the model, make the prompts and plan the memory. Raises ValueError, one line
    naming the flag or the line of a file, for errors that a user can correct."""
    check_threads_equal(launch, run_config)
    workload = options.batch_of(run_config.workload, options.max_concurrency)
    known = Known()
    models = find(replace(run_config, workload=workload), launch, known)
    options.check_lengths(models.source.config.max_length, f"--model {run_config.model.model}")
    options.check_cache(max_tokens(models.config))
    count = len(options.shapes), options.counted_by
    return complete(models, known, num_prompts=count, check=partial(check_memory, options))


def make_server(
    prepared: Prepared,
    options: ServingOptions,
    session: RankSession,
    progress: Progress,
) -> tuple[Prepared, Server]:
    """Load this rank's part of the models and allocate the KV caches. Returns the run with its
    measured backend too."""
    source, groups, device = prepared.source, session.groups, session.device
    draft_model = None if prepared.draft_source is None else prepared.draft_source.config
    config = settle(prepared.config, source.config, draft_model, groups.target, device)
    prepared = replace(prepared, config=config)
    tokens, models = max_tokens(config), LoadedModels(device, progress)
    runner = make_target(
        config, source, groups.target, models, tokens, options.block_tokens, options.cache_tokens
    )
    draft = make_draft(prepared, groups, tokens, models)
    shape = runner.cache.shape
    limits = Limits(
        tokens, shape.block_size, shape.num_blocks, prefill_tokens=options.prefill_tokens
    )

    def strategy(each: Pass) -> DecodingStrategy:
        runner.prompt_queries = None
        if each.is_drafting and config.decoding.drafter == "self":
            keep_queries(runner, config.kv)
        captures = config.decoding.cuda_graphs == "on"
        recorder: Recorder = CudaGraphs(device) if captures else Eager()
        setup = Setup(
            runner, config.decoding, config.kv, draft=draft, recorder=recorder, is_in_flight=True
        )
        return make_strategy(config.decoding.strategy if each.is_drafting else BASELINE, setup)

    return prepared, Server(
        runner,
        limits,
        config.attention.prefill_chunk,
        strategy,
        prepared.workload.prompts,
        options.shapes,
        window_s=(options.window_ms or 0.0) / 1e3,
        num_draft_tokens=tokens - options.longest,
        sampling=config.sampling,
    )


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
    room = Room(tuple(launch.local_ranks), describe_place(config, launch), free)
    if (refusal := room.refusal(plan)) is None:
        return room.describe(plan)

    def fits(cache_tokens: int) -> bool:
        smaller = replace(options, cache_tokens=cache_tokens)
        return room.refusal(plan_of(smaller, config, models, launch)) is None

    most = largest(fits, stored_tokens(options, config))
    advice = f"--cache_tokens {most} would fit"
    if most < max_tokens(config):
        advice = "choose a smaller --B, shorter requests or a smaller model"
    raise ValueError(
        f"--B {options.max_concurrency} with requests of up to {options.longest} "
        f"tokens needs {refusal}; {advice}"
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
