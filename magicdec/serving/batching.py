"""Batching: requests served by the engine, in the modes that differ in when requests that have
arrived may join the running batch. It runs on the first rank, with the threads of all ranks of its
host, or on all ranks by tensor parallelism.

A batching is a function of the function that serves requests until all have ended, the requests in
the order of arrival, the clock, the number of rows, and the time window in seconds. In every
batching the engine, its limits and its steps are the same, and a request that has ended leaves the
batch at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from magicdec.autotune import settle
from magicdec.config.choices.collectives import check_stage_group
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import NONE
from magicdec.console import Progress
from magicdec.decoding.recorder import CudaGraphs, Eager, Recorder
from magicdec.decoding.strategy import DecodingStrategy, Setup, make_strategy
from magicdec.distributed.channels.message import DUE
from magicdec.distributed.groups import Group, Launch, ParallelGroups
from magicdec.distributed.start import make_groups
from magicdec.distributed.tensor_parallel import Shard
from magicdec.drafting.drafter import DraftModel
from magicdec.drafting.policies.policy import keep_queries
from magicdec.engine import Engine
from magicdec.hardware.environment import probe_machine
from magicdec.hardware.timing import Clock, GroupClock, RealClock
from magicdec.memory.check import Room, largest
from magicdec.memory.model_plan import ModelPlan, max_tokens
from magicdec.memory.plan import model_plans_of
from magicdec.model.checkpoint.source import check_part
from magicdec.names import BASELINE
from magicdec.request import Request
from magicdec.runner import ModelRunner
from magicdec.scheduling.plan import Limits
from magicdec.serving.configs import alone_of, complete_run, without_drafts
from magicdec.serving.modes import Pass
from magicdec.serving.options import PREFILL_TOKENS, ServeOptions
from magicdec.serving.system import Extras, System, Watch
from magicdec.setup.loading import LoadedModels, make_draft, make_runner
from magicdec.setup.prepare import Prepared, ResolvedRun, SetupCache, find

Serve = Callable[[Sequence[Request]], None]
BatchFunction = Callable[[Serve, Sequence[Request], Clock, int, float], None]


def sequential(
    serve: Serve, requests: Sequence[Request], clock: Clock, num_rows: int, window_s: float
) -> None:
    """One request after the other."""
    for request in requests:
        serve([request])


def static(
    serve: Serve, requests: Sequence[Request], clock: Clock, num_rows: int, window_s: float
) -> None:
    """Batches of `num_rows` requests. A batch begins when all of its requests have arrived and the
    batch before it has ended."""
    for first in range(0, len(requests), num_rows):
        batch = requests[first : first + num_rows]
        clock.wait_until(batch[-1].arrived_s)
        serve(batch)


def dynamic(
    serve: Serve, requests: Sequence[Request], clock: Clock, num_rows: int, window_s: float
) -> None:
    """Batches of up to `num_rows` requests. A batch begins when it is full, or `window_s` after its
    first request has arrived, and when the batch before it has ended."""
    coming = deque(requests)
    while coming:
        full_s = coming[num_rows - 1].arrived_s if len(coming) >= num_rows else math.inf
        begins_s = max(clock.now(), min(full_s, coming[0].arrived_s + window_s))
        clock.wait_until(begins_s)
        batch = [coming.popleft()]
        while coming and len(batch) < num_rows and coming[0].arrived_s <= begins_s:
            batch.append(coming.popleft())
        serve(batch)


def inflight(
    serve: Serve, requests: Sequence[Request], clock: Clock, num_rows: int, window_s: float
) -> None:
    """A request joins the running batch at the first step after its arrival for which a row and
    blocks of the KV cache are free."""
    serve(requests)


BATCHINGS: Mapping[str, BatchFunction] = {
    "sequential": sequential,
    "static": static,
    "dynamic": dynamic,
    "inflight": inflight,
    "tensor_parallel": inflight,
}


class Batching(System):
    """The engine on the first rank alone, or on all ranks if `is_on_all`."""

    def __init__(
        self,
        run: Prepared,
        options: ServeOptions,
        passes: Sequence[Pass],
        launch: Launch,
        is_on_all: bool,
    ) -> None:
        self.run, self.options, self.passes = run, options, passes
        self.launch, self.is_on_all = launch, is_on_all
        self.runner: ModelRunner | None = None
        self.draft: DraftModel | None = None
        self.models: LoadedModels | None = None

    @classmethod
    def prepare(
        cls,
        run_config: RunConfig,
        options: ServeOptions,
        passes: Sequence[Pass],
        launch: Launch,
        cache: SetupCache,
    ) -> Batching:
        is_on_all = options.is_on_all(passes[0], launch.world_size)
        workload = options.batch_of(run_config.workload, options.rows)
        if not any(each.is_drafting for each in passes):
            run_config = run_config.with_draft(NONE)
        models = find(replace(run_config, workload=workload), launch, cache)
        names, model = " ".join(each.name for each in passes), models.source.config
        if is_on_all:
            check_stage_group(f"--modes {names}", models.config.parallel)
            try:
                Shard(0, launch.world_size).heads(model.num_heads, model.num_kv_heads)
            except ValueError as error:
                raise ValueError(f"--modes {names}: {error}") from error
        else:
            models = of_first_rank_alone(models, launch, cache)
        options.check_lengths(model.max_length, f"--model {run_config.model.model}")
        options.check_cache(max_tokens(models.config))
        run = complete_run(models, cache, options)
        return cls(run, options, passes, launch, is_on_all)

    @property
    def computes(self) -> bool:
        """Whether this rank has a part in the passes."""
        return self.is_on_all or self.launch.rank == 0

    def check_files(self) -> None:
        for source in (self.run.source, self.run.draft_source) if self.computes else ():
            if source is None:
                continue
            try:
                check_part(source, range(source.config.num_layers), has_ends=True)
            except ValueError as error:
                names = " ".join(each.name for each in self.passes)
                raise ValueError(f"--modes {names}, which read the whole model: {error}") from error

    def model_plans(self, each: Pass, rank: int) -> list[ModelPlan]:
        config = self.run.config
        if rank not in config.parallel.rank_group:
            return []
        target, *drafts = model_plans_of(config, self.run.models, rank)
        options = self.options
        return [
            replace(target, block_tokens=options.block_tokens, cache_tokens=options.cache_tokens),
            *drafts,
        ]

    def advice(self, each: Pass, room: Room) -> str:
        """The largest KV cache that would fit."""

        def fits(cache_tokens: int) -> bool:
            options = replace(self.options, cache_tokens=cache_tokens)
            smaller = Batching(self.run, options, self.passes, self.launch, self.is_on_all)
            return room.refusal(smaller.plan(each, room.ranks)) is None

        size, num_blocks = self.model_plans(each, self.run.config.parallel.rank_group[0])[
            0
        ].storage()
        most = largest(fits, size * num_blocks)
        if most < max_tokens(self.run.config):
            return "choose a smaller --B, shorter requests or a smaller model"
        return f"--cache_tokens {most} would fit"

    def config_of(self, each: Pass) -> Mapping[str, Any]:
        config = self.run.config
        return (config if each.is_drafting else without_drafts(config)).to_dict()

    def open(self, each: Pass, device: torch.device, progress: Progress) -> None:
        if self.runner is None and self.computes:
            self._load(each, device, progress)

    def _load(self, each: Pass, device: torch.device, progress: Progress) -> None:
        """Load this rank's part of the models and allocate the KV caches."""
        run, launch, draft = self.run, self.launch, self.run.config.draft
        if self.is_on_all:
            parallel, draft_ranks = run.config.parallel, None if draft is None else draft.rank_group
            groups = make_groups(
                launch, parallel.rank_group, device, parallel.collectives, draft_ranks
            )
        else:
            alone = Group((0,), 0)
            groups = ParallelGroups(0, 1, alone, None if draft is None else alone)
        draft_model = None if run.draft_source is None else run.draft_source.config
        config = settle(run.config, run.source.config, draft_model, groups.target, device)
        self.run = run = replace(run, config=config)
        self.models = LoadedModels(device, progress, self._emulated_s)
        target = self.model_plans(each, launch.rank)[0]
        self.runner = runner = make_runner(target, run.source, groups.target, self.models)
        self.draft = make_draft(run, groups, self.models)
        self.clock = GroupClock(RealClock(), runner.group, runner.device)

    @property
    def _emulated_s(self) -> float | None:
        """Seconds of a forward of all stages, one after the other or, with all ranks, divided among
        them; then two all-reduces a layer take log2 N links each (recursive doubling)."""
        stage_s, options = self.options.emulated_stage_s, self.options
        if stage_s is None:
            return None
        world_size = self.launch.world_size
        seconds = options.num_stages(world_size) * stage_s
        if not self.is_on_all:
            return seconds
        num_reduces = 2 * self.run.source.config.num_layers
        link_s = (options.emulate_link_ms or 0.0) / 1e3
        return seconds / world_size + num_reduces * math.ceil(math.log2(world_size)) * link_s

    def warm_up_rows(self, each: Pass) -> int:
        return self.options.rows

    def expected_threads(self, each: Pass) -> int:
        rank = self.launch.rank if self.is_on_all else 0
        return self.run.config.parallel.threads_of(rank) if self.computes else 0

    def serve(self, each: Pass, requests: Sequence[Request], watch: Watch) -> Extras:
        if self.runner is None:  # this rank waits
            return Extras()
        limits = self._limits(each)
        for request in requests:
            limits.check(request)
        strategy = self._strategy(each)
        DUE.reach(None)  # no time of an earlier pass counts
        chunk, window_s = self.run.config.attention.prefill_chunk, self.options.window_ms or 0.0
        engine = Engine(self.runner, chunk, limits, clock=self.clock.clock)

        def serve(batch: Sequence[Request]) -> None:
            engine.serve(strategy, batch, watch.tokens, watch.counts.watch)

        with watch.threads.during():
            BATCHINGS[each.mode](serve, requests, self.clock, self.options.rows, window_s / 1e3)
        return Extras()

    def _limits(self, each: Pass) -> Limits:
        """Those of all modes are the same; a step of a drafter appends more tokens to a row."""
        assert self.runner is not None, "it was opened"
        shape, tokens = self.runner.cache.shape, max_tokens(self.run.config)
        num_drafts = tokens - self.options.longest if each.is_drafting else 0
        prefill_tokens = self.options.prefill_tokens or PREFILL_TOKENS
        return Limits(
            tokens, shape.block_size, shape.num_blocks, prefill_tokens=prefill_tokens,
            step_tokens=1 + num_drafts,
        )  # fmt: skip

    def _strategy(self, each: Pass) -> DecodingStrategy:
        """What decodes, with the drafter or without it."""
        runner, config = self.runner, self.run.config
        assert runner is not None, "it was opened"
        runner.prompt_queries = None
        if each.is_drafting and config.decoding.drafter == "self":
            keep_queries(runner, config.kv)
        captures = config.decoding.cuda_graphs == "on"
        recorder: Recorder = CudaGraphs(runner.device) if captures else Eager()
        setup = Setup(
            runner, config.decoding, config.kv, draft=self.draft, recorder=recorder,
            is_in_flight=True,
        )  # fmt: skip
        return make_strategy(config.decoding.strategy if each.is_drafting else BASELINE, setup)

    def now(self) -> float:
        return super().now() if self.runner is None else self.clock.now()

    def close(self) -> None:
        self.runner = self.draft = self.models = None


def of_first_rank_alone(models: ResolvedRun, launch: Launch, cache: SetupCache) -> ResolvedRun:
    """The run of the first rank, which needs no other, with the threads of all ranks of its host,
    since these wait."""
    machine = cache.get(("machine",), lambda: probe_machine(launch))
    config = alone_of(models, machine)
    threads = config.parallel.threads_on(launch.local_ranks)
    parallel = replace(config.parallel, rank_group=(0,), collectives=None, threads=threads)
    draft = None if config.draft is None else replace(config.draft, rank_group=(0,))
    config = replace(config, parallel=parallel, draft=draft)
    return replace(models, config=config, launch=Launch(0, 1, 0, 1))
