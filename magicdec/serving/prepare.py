"""Prepares what `magicdec inflight` serves: checks everything before memory is allocated, and makes
the server.

Must not know the flags, nor what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from magicdec.autotune.fastest_backend import settle
from magicdec.config.run_config import RunConfig
from magicdec.console import Progress
from magicdec.decoding.cuda_graphs import CudaGraphs
from magicdec.decoding.recorder import Eager, Recorder
from magicdec.decoding.strategy import DecodingStrategy, Setup, make_strategy
from magicdec.distributed.groups import Launch
from magicdec.drafting.policies.policy import keep_queries
from magicdec.memory.working_memory import max_tokens
from magicdec.model.config import ModelConfig
from magicdec.names import BASELINE
from magicdec.scheduling.plan import Limits
from magicdec.serving.memory import check_memory
from magicdec.serving.options import Pass, ServingOptions
from magicdec.serving.server import Server
from magicdec.setup.loading import LoadedModels, make_draft, make_target
from magicdec.setup.prepare import Known, Prepared, check_threads_equal, complete, find
from magicdec.setup.session import RankSession


def prepare(
    asked: RunConfig,
    options: ServingOptions,
    launch: Launch,
    check_model: Callable[[ModelConfig], None] = lambda model: None,
) -> Prepared:
    """Find and check the model, make the prompts and plan the memory. Raises ValueError, one line
    naming the flag or the line of a file, for errors that a user can correct. `check_model` raises
    it for a model that was not meant."""
    check_threads_equal(launch, asked)
    workload = options.batch_of(asked.workload, options.max_concurrency)
    known, asked = Known(), replace(asked, workload=workload)
    found = find(asked, launch, known)
    check_model(found.source.config)
    options.check_lengths(found.source.config.max_length, f"--model {asked.model.model}")
    options.check_cache(max_tokens(found.config))
    count = len(options.shapes), options.counted_by
    return complete(found, known, num_prompts=count, check=partial(check_memory, options))


def make_server(
    prepared: Prepared,
    options: ServingOptions,
    session: RankSession,
    progress: Progress,
    compactions: Collection[str],
) -> tuple[Prepared, Server]:
    """Load this rank's part of the models and allocate the KV caches. Returns the run with its
    measured backend too."""
    source, groups, device = prepared.source, session.groups, session.device
    draft_model = None if prepared.draft_source is None else prepared.draft_source.config
    config = settle(prepared.config, source.config, draft_model, groups.target, device)
    prepared = replace(prepared, config=config)
    tokens, models = max_tokens(config), LoadedModels(device, progress)
    sizes, spare_blocks = (tokens, options.block_tokens, options.cache_tokens), 0
    if "none" in compactions:
        if config.decoding.cuda_graphs == "on":
            raise ValueError("--compaction none: a step is not captured; choose --cuda_graphs off")
        spare_blocks = 1
    runner = make_target(config, source, groups.target, models, *sizes, spare_blocks)
    draft = make_draft(prepared, groups, tokens, models)
    shape = runner.cache.shape
    num_blocks = shape.num_blocks - spare_blocks
    limits = Limits(tokens, shape.block_size, num_blocks, prefill_tokens=options.prefill_tokens)

    def strategy(each: Pass) -> DecodingStrategy:
        runner.prompt_queries = None
        if each.is_drafting and config.decoding.drafter == "self":
            keep_queries(runner, config.kv)
        captures = config.decoding.cuda_graphs == "on"
        recorder: Recorder = CudaGraphs(device) if captures else Eager()
        setup = Setup(
            runner, config.decoding, config.kv, draft=draft, recorder=recorder, is_in_flight=True,
            computes_ended=each.compaction == "none",
        )  # fmt: skip
        return make_strategy(config.decoding.strategy if each.is_drafting else BASELINE, setup)

    prompts, chunk = prepared.workload.prompts, config.attention.prefill_chunk
    window_s = (options.window_ms or 0.0) / 1e3
    drafts = tokens - options.longest
    server = Server(
        runner, limits, chunk, strategy, prompts, options.shapes, window_s, drafts, config.sampling
    )
    return prepared, server
