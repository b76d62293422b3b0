"""Flover: the system of the engine, whose batchings are whole batches or a running batch (arXiv
2305.13484)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, replace

import torch

from magicdec.config.choices.collectives import check_stage_group
from magicdec.config.resolve import Placement
from magicdec.config.run_config import RunConfig
from magicdec.distributed.groups import Group, ParallelGroups
from magicdec.distributed.start import make_groups
from magicdec.engine.arrivals import Arrivals
from magicdec.engine.engine import Engine
from magicdec.hardware.timing import GroupClock, RealClock
from magicdec.names import BASELINE
from magicdec.output.console import Progress
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.observers.draft_log import DraftLog
from magicdec.runner.request import Request
from magicdec.runner.step_plan import PREFILL_TOKENS, BatchLimits
from magicdec.setup.loading import LoadedModels, make_draft, make_runner
from magicdec.setup.memory_check import MemoryBudget, largest
from magicdec.setup.memory_plan import model_plans_of
from magicdec.setup.model_checks import check_shared
from magicdec.setup.model_plan import ModelPlan, max_tokens, rewound_by_step
from magicdec.setup.prepare import SetupCache
from magicdec.speculation.drafter import DraftModel
from magicdec.speculation.policies.policy import keep_queries
from magicdec.speculation.steps.build import build_decoder
from magicdec.speculation.steps.logits_recorder import LogitsRecorder
from magicdec.speculation.steps.strategy import DecodingStrategy, Phase
from magicdec.systems.flover.batchings import BATCHINGS
from magicdec.systems.flover.declaration import HOST, INFLIGHT, SEQUENTIAL, FloverSettings
from magicdec.systems.modes import Pass
from magicdec.systems.observer import PassObserver
from magicdec.systems.system import (
    ReplayingSystem,
    StepShape,
    SystemDetails,
    on_first_rank,
)

MakeStrategy = Callable[[ModelRunner], DecodingStrategy]


@dataclass(frozen=True)
class CapturedPass:
    """A pass whose strategy has captured steps, with the recorder of these steps."""

    serving_pass: Pass
    strategy: DecodingStrategy
    recorder: LogitsRecorder | None


class Flover(ReplayingSystem):
    """The system of the engine, on the first rank alone or on all ranks if `is_on_all`."""

    settings: FloverSettings
    are_steps_timed = True
    counts_reads = True
    draft: DraftModel | None = None
    models: LoadedModels | None = None
    captured: CapturedPass | None = None
    _phases: Phase = nullcontext

    def prepare(self, run_config: RunConfig, cache: SetupCache) -> None:
        options = self.options
        world_size = self.launch.world_size
        capacity = options.capacity(self.rows)
        placement = Placement(is_alone=not self.is_on_all)
        models = self.find(run_config, capacity, cache, placement)
        if self.is_on_all:
            self.ranks_of_layer = world_size
            check_stage_group(f"--modes {self.names}", models.config.parallel)
            check_shared(f"--modes {self.names}", world_size, models.source.config)
        else:
            models = on_first_rank(models)
        self.settings.check_cache(max_tokens(models.config))
        self.run = self.complete(models, cache)

    @property
    def is_on_all(self) -> bool:
        return self.settings.is_on_all(self.passes[0], self.launch.world_size)

    @property
    def shares_prefixes(self) -> bool:
        return self.settings.prefix_cache

    def replay_mode(self, num_rows: int) -> str:
        return SEQUENTIAL if num_rows == 1 else INFLIGHT

    @property
    def computes(self) -> bool:
        return self.is_on_all or self.launch.rank == 0

    def model_plans(self, serving_pass: Pass, rank: int) -> list[ModelPlan]:
        config = self.run.config
        if rank not in config.parallel.rank_group:
            return []
        target, *drafts = model_plans_of(config, self.run.models, rank)
        target = replace(
            target,
            block_tokens=self.settings.block_tokens,
            cache_tokens=self.settings.cache_tokens,
            rewound=rewound_by_step(config),
            shares_prefixes=self.shares_prefixes,
            offloads=self.settings.kv_offload == HOST,
            offload_tokens=self.settings.offload_tokens,
        )
        return [target, *(draft.beside(target) for draft in drafts)]

    def advice(self, serving_pass: Pass, room: MemoryBudget) -> str:
        def fits(cache_tokens: int) -> bool:
            smaller = copy(self)
            smaller.settings = replace(self.settings, cache_tokens=cache_tokens)
            return room.refusal(smaller.plan(serving_pass, room.ranks)) is None

        target, *_ = self.model_plans(serving_pass, self.run.config.parallel.rank_group[0])
        most = largest(fits, target.storages()[0].num_tokens)
        if most < max_tokens(self.run.config):
            return "choose a smaller --B, shorter requests or a smaller model"
        return f"--cache_tokens {most} would fit"

    def open(self, serving_pass: Pass, device: torch.device, progress: Progress) -> None:
        if self.runner is None and self.computes:
            self._load(serving_pass, device, progress)

    def _load(self, serving_pass: Pass, device: torch.device, progress: Progress) -> None:
        run = self.run
        launch = self.launch
        draft = self.run.config.draft
        if self.is_on_all:
            parallel = run.config.parallel
            draft_ranks = None if draft is None else draft.rank_group
            groups = make_groups(
                launch, parallel.rank_group, device, parallel.collectives, draft_ranks
            )
        else:
            alone = Group((0,), 0)
            groups = ParallelGroups(0, 1, alone, None if draft is None else alone)
        self.models = LoadedModels(device, progress)
        plan = self.model_plans(serving_pass, launch.rank)[0]
        self.runner = runner = make_runner(plan, run.source, groups.target, self.models)
        self.draft = make_draft(run, groups, self.models, target=plan)
        self.clock = GroupClock(RealClock(), runner.group, runner.device)

    @property
    def runners(self) -> list[ModelRunner]:
        """The target's runner, and that of what drafts if this rank has a shard of it."""
        if self.runner is None:
            return []
        draft = self.runner.draft_runner if self.draft is None else self.draft.runner
        return [self.runner] if draft is None else [self.runner, draft]

    def _phase(self, name: str) -> AbstractContextManager[object]:
        """Times a phase for the observer of the pass, which changes while a strategy stays."""
        return self._phases(name)

    def step_shape(self, serving_pass: Pass) -> StepShape:
        max_gamma = self.run.config.decoding.max_gamma if serving_pass.is_drafting else 0
        return StepShape(1 if serving_pass.mode == SEQUENTIAL else self.rows, 1 + max_gamma)

    def serve(
        self, serving_pass: Pass, requests: Sequence[Request], observer: PassObserver
    ) -> SystemDetails:
        if self.runner is None:  # this rank waits
            return SystemDetails()
        log = DraftLog() if observer.is_logged and serving_pass.is_drafting else None
        for runner in self.runners:
            runner.set_observer(DraftLog, log)
            runner.caches.forget_prefixes()  # of an earlier pass
        strategy, recorder = self._strategy(serving_pass)
        if recorder is not None:
            recorder.is_watching = observer.is_measured
        self._phases = observer.phases or nullcontext
        with observer.threads.during():
            arrivals = Arrivals(requests, serving_pass.concurrency)
            self._decode(
                self.runner,
                serving_pass.mode,
                arrivals,
                strategy,
                self._limits(serving_pass),
                observer,
            )
        if self.settings.kv_offload == HOST:
            # A low-bit copy drafts over the target's caches.
            caches = {id(runner.caches): runner.caches for runner in self.runners}
            moves = [held.moves for held in caches.values()]
            observer.counts.blocks_to_host = sum(moved.num_out for moved in moves)
            observer.counts.blocks_from_host = sum(moved.num_in for moved in moves)
        return SystemDetails(recorder=recorder if observer.is_measured else None)

    def _decode(
        self,
        runner: ModelRunner,
        mode: str,
        arrivals: Arrivals,
        strategy: DecodingStrategy,
        limits: BatchLimits,
        observer: PassObserver,
        shares_prefixes: bool = True,
    ) -> None:
        chunk = self.run.config.attention.prefill_chunk
        window_s = (self.settings.window_ms or 0.0) / 1e3
        engine = Engine(
            runner, chunk, limits, clock=self.clock.clock, shares_prefixes=shares_prefixes
        )

        def serve(batch: Sequence[Request] | Arrivals) -> None:
            engine.serve(strategy, batch, observer.observe, observer.watch)

        BATCHINGS[mode](serve, arrivals, self.clock, self.rows, window_s)

    def _limits(self, serving_pass: Pass) -> BatchLimits:
        assert self.runner is not None, "it was opened"
        tokens = max_tokens(self.run.config)
        max_gamma = tokens - self.options.longest if serving_pass.is_drafting else 0
        return self._limits_of(self.runner, tokens, 1 + max_gamma)

    def _limits_of(self, runner: ModelRunner, tokens: int, step_tokens: int) -> BatchLimits:
        prefill_tokens = self.settings.prefill_tokens or PREFILL_TOKENS
        return BatchLimits(
            tokens,
            *runner.caches.limits,
            prefill_tokens=prefill_tokens,
            step_tokens=step_tokens,
        )

    def replay(
        self,
        mode: str,
        requests: Sequence[Request],
        num_tokens: int,
        make: MakeStrategy,
        concurrency: int | None = None,
        shares_prefixes: bool = False,
    ) -> None:
        runner = self.runner
        assert runner is not None, "it was opened"
        # The newest token is never cached; more room than the pass had would be a second cache.
        tokens = self.options.longest - 1 + num_tokens
        if runner.max_tokens < tokens:
            runner = replace(
                runner,
                max_tokens=tokens,
                num_blocks=None,
                window_room=None,
                draft_runner=None,
                observers=[],
            )
        for row in range(runner.num_rows):
            runner.release(row)
        runner.caches.forget_prefixes()
        keep_queries(runner, None)
        runner.set_observer(DraftLog, None)
        now_s = self.clock.now()
        for request in requests:
            request.arrived_s = now_s
        limits = self._limits_of(runner, runner.max_tokens, num_tokens)
        arrivals = Arrivals(requests, concurrency)
        strategy = make(runner)
        self._decode(runner, mode, arrivals, strategy, limits, PassObserver(), shares_prefixes)
        self.captured = None

    def _strategy(self, serving_pass: Pass) -> tuple[DecodingStrategy, LogitsRecorder | None]:
        """The decoding strategy of a pass, and the recorder that keeps logits of its steps. With
        CUDA graphs both are kept, so that the measured pass replays captured steps, unless it
        learns draft lengths."""
        runner = self.runner
        config = self.run.config
        assert runner is not None, "it was opened"
        if self.captured is not None and self.captured.serving_pass == serving_pass:
            return self.captured.strategy, self.captured.recorder
        name = config.decoding.strategy if serving_pass.is_drafting else BASELINE
        recorder = self._recorder(serving_pass, runner)
        strategy = build_decoder(
            runner,
            config.decoding,
            config.kv,
            name=name,
            draft=self.draft,
            corpus=self.run.corpus,
            phase=self._phase,
            logits_recorder=recorder,
            is_in_flight=True,
        )
        is_fixed = name == BASELINE or config.decoding.gamma != "auto"
        is_captured = config.decoding.cuda_graphs == "on"
        self.captured = None
        if is_captured and is_fixed:
            self.captured = CapturedPass(serving_pass, strategy, recorder)
        return strategy, recorder

    def is_watched(self, serving_pass: Pass) -> bool:
        """It is if the pass is greedy, and if its tokens mean something."""
        is_greedy = self.run.config.sampling.temperature == 0
        return is_greedy and not self.options.accepts_by_chance(serving_pass)

    def _recorder(self, serving_pass: Pass, runner: ModelRunner) -> LogitsRecorder | None:
        if not self.is_watched(serving_pass):
            return None
        shape = self.step_shape(serving_pass)
        gamma = shape.tokens - 1
        lengths = [request.output_len for request in self.options.shapes]
        turns = self.options.most_turns
        num_steps = turns * (sum(lengths) // shape.rows + max(lengths))
        seed = f"{self.run.workload.seed} {serving_pass.name}"
        return LogitsRecorder.of(runner, shape.rows, gamma, num_steps, seed, gamma)

    def now(self) -> float:
        return super().now() if self.runner is None else self.clock.now()

    def close(self) -> None:
        self.runner = self.draft = self.models = self.captured = None
