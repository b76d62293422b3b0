"""PrefilledBatching: the static batches of the engine over kept prompts, prefilled once and
rewound for each pass, so that all passes decode from the same state.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch

from magicdec.config.resolved import ResolvedConfig
from magicdec.distributed.groups import ParallelGroups
from magicdec.engine.engine import Engine
from magicdec.hardware.timing import synchronize
from magicdec.names import BASELINE
from magicdec.output.console import Progress
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.observers.draft_log import Digest, DraftLog, digest_of_ranks
from magicdec.runner.request import Request
from magicdec.runner.sampling.model_tokens import AcceptanceRule
from magicdec.setup.loading import make_draft, runner_of, with_copy
from magicdec.setup.memory_plan import MemoryPlan
from magicdec.setup.model_plan import ModelPlan, max_tokens
from magicdec.setup.prepare import Prepared
from magicdec.speculation.draft_length import DraftLength, make_draft_length
from magicdec.speculation.drafter import DraftModel
from magicdec.speculation.policies.policy import keep_queries
from magicdec.speculation.steps.build import build_decoder
from magicdec.speculation.steps.logits_recorder import LogitsRecorder
from magicdec.speculation.steps.strategy import DecodingStrategy
from magicdec.systems.flover.declaration import FloverSettings
from magicdec.systems.flover.system import Flover
from magicdec.systems.modes import DRAFTING, PLAIN, Pass
from magicdec.systems.observer import PassObserver, Preparation
from magicdec.systems.options import ServeOptions
from magicdec.systems.shared_prefill import CacheDemand, KeptPrompts, SharedPrefill
from magicdec.systems.system import SystemDetails
from magicdec.workload.request_shapes import RequestShape


class DigestsOfRank(NamedTuple):
    """A rank's hashes and numbers of keys, by step and row; empty without a log."""

    hashes: list[list[str]]
    keys: list[list[int]]

    @classmethod
    def of(cls, observer: PassObserver) -> DigestsOfRank:
        logged = [step.digests for step in observer.steps]
        known = [digests for digests in logged if digests is not None]
        return cls(
            [[hashed for hashed, _ in digests] for digests in known],
            [[num_read for _, num_read in digests] for digests in known],
        )

    def steps(self) -> Iterator[list[Digest]]:
        for hashes, keys in zip(self.hashes, self.keys, strict=True):
            yield list(zip(hashes, keys, strict=True))


class PrefilledBatching(Flover):
    """One run's part: its draft and draft lengths, beside the target and the caches that it has in
    common with other runs. It stays open while they are measured."""

    stays_open = True
    keeps_prompts = True
    rule: AcceptanceRule | None = None  # what becomes of judged drafts; None: they are kept

    def __init__(
        self,
        prepared: Prepared,
        groups: ParallelGroups,
        device: torch.device,
        shared: SharedPrefill,
        room: CacheDemand | None = None,
    ) -> None:
        """`shared` has what a study's earlier runs left, and `room` is that of all runs with these
        prompts."""
        config = prepared.config
        decoding = config.decoding
        has_drafts = decoding.strategy != BASELINE
        is_compared = decoding.baseline or not has_drafts
        passes = (*((PLAIN,) if is_compared else ()), *((DRAFTING,) if has_drafts else ()))
        rows = config.workload.batch_size
        settings = FloverSettings(batch_size=rows, batch_ranks="all")
        super().__init__(options_of(config, passes), settings, passes, prepared.launch)
        self.run = prepared
        self.groups = groups
        self.device = device
        self.shared = shared
        self.ranks_of_layer = groups.target.size
        self.models = shared.models
        self.room = room or CacheDemand.of([config])
        self.caches = shared.caches(config, self.room, self._make_runner)
        self._engines: dict[int, Engine] = {}  # by the identity of that of the prompts
        self.draft = self._make_draft()
        self.draft_length = self._make_draft_length()

    def _make_draft_length(self) -> DraftLength:
        return make_draft_length(self.run.config.decoding, self.groups.target, self.device)

    def _make_draft(self) -> DraftModel | None:
        return make_draft(self.run, self.groups, self.shared.models)

    def _make_runner(self) -> ModelRunner:
        room = self.room
        source = self.run.source
        group = self.groups.target
        plan = replace(self._plan_of(room.max_tokens, room.rewound), state_room=room.state_room)
        model = self.shared.models.get(source, group, plan.kinds)
        # Before the cache takes memory.
        self.shared.models.get_copy(source, group, plan)
        runner = runner_of(plan, model, group)
        keep_queries(runner, room.kv)
        return runner

    def _plan_of(self, row_tokens: int, rewound: int | None = None) -> ModelPlan:
        group = self.groups.target
        config = self.run.config
        model = self.run.source.config
        return ModelPlan(
            config, model, group.ranks, self.groups.rank, row_tokens=row_tokens, rewound=rewound
        )

    def open(self, serving_pass: Pass, device: torch.device, progress: Progress) -> None:
        """It is open from its birth on."""

    def plan(self, serving_pass: Pass, ranks: Sequence[int]) -> MemoryPlan:
        return self.run.plan

    def close(self) -> None:
        """Others go on with what it has."""

    def keep_prompts(self, number: int, requests: Sequence[Request], name: str) -> list[Request]:
        self.kept = kept = self._with_copy(self.caches.keep(number, requests, name))
        self.runner = kept.engine.runner
        kept.engine.rewind(kept.snapshots)
        return kept.engine.requests

    def _with_copy(self, kept: KeptPrompts) -> KeptPrompts:
        """These prompts, whose caches are shared by runs with other drafts, with a runner that
        drafts with this run's copy."""
        engine = kept.engine
        if id(engine) not in self._engines:
            plan = self._plan_of(max_tokens(self.run.config))
            copy = self.shared.models.get_copy(self.run.source, self.groups.target, plan)
            self._engines[id(engine)] = engine.with_runner(with_copy(plan, engine.runner, copy))
        return replace(kept, engine=self._engines[id(engine)])

    def serve(
        self, serving_pass: Pass, requests: Sequence[Request], observer: PassObserver
    ) -> SystemDetails:
        kept = self.kept
        assert kept is not None and requests is kept.engine.requests, "these prompts were kept"
        log = DraftLog() if observer.is_logged and serving_pass.is_drafting else None
        for runner in self.runners:
            runner.set_observer(DraftLog, log)
        recorder = self._recorder_of(serving_pass, kept) if observer.is_measured else None
        strategy = self._make_strategy(serving_pass, observer, recorder)
        with observer.threads.during():
            observer.preparation = self._prepare(serving_pass, kept, strategy)
            if recorder is not None:
                recorder.is_watching = True
            observer.begin(self.runners)
            kept.engine.decode(strategy, observer.observe)
        if log is not None and self.groups.target.size > 1:
            self._gather_digests(observer)
        return SystemDetails(recorder=recorder)

    def _make_strategy(
        self, serving_pass: Pass, observer: PassObserver, recorder: LogitsRecorder | None
    ) -> DecodingStrategy:
        assert self.runner is not None, "prompts were kept"
        config = self.run.config
        return build_decoder(
            self.runner,
            config.decoding,
            config.kv,
            name=config.decoding.strategy if serving_pass.is_drafting else BASELINE,
            draft=self.draft,
            corpus=self.run.corpus,
            draft_length=self.draft_length,
            phase=observer.phases or nullcontext,
            logits_recorder=recorder,
            rule=self.rule,
        )

    def _prepare(
        self, serving_pass: Pass, kept: KeptPrompts, strategy: DecodingStrategy
    ) -> Preparation:
        """Lets the strategy prepare. All ranks begin and end together."""
        group = self.groups.target
        calibrated_s = self.draft_length.calibration_s
        group.barrier()
        started = time.perf_counter()
        kept.engine.begin(strategy)
        synchronize(self.device)
        group.barrier()
        seconds = time.perf_counter() - started
        calibration_s = None
        if serving_pass.is_drafting and calibrated_s is not None:
            calibration_s = (self.draft_length.calibration_s or 0.0) - calibrated_s
        return Preparation(
            seconds, calibration_s, self.draft is not None and serving_pass.is_drafting
        )

    def end_warm_up(self) -> None:
        self.warm_up_calibration_s = self.draft_length.calibration_s
        # So that calibration is part of the first measured group and its net speedup.
        self.draft_length.forget_times()

    def is_watched(self, serving_pass: Pass) -> bool:
        """Both passes are, if their tokens are compared."""
        is_by_chance = any(
            self.options.accepts_by_chance(serving_pass) for serving_pass in self.passes
        )
        is_greedy = self.run.config.sampling.temperature == 0
        return len(self.passes) > 1 and is_greedy and not is_by_chance

    def _recorder_of(self, serving_pass: Pass, kept: KeptPrompts) -> LogitsRecorder | None:
        if not self.is_watched(serving_pass):
            return None
        assert self.runner is not None, "prompts were kept"
        w = self.run.config.workload
        most = self.run.config.decoding.max_gamma
        gamma = most if serving_pass.is_drafting else 0
        seed = f"{w.seed} {kept.number}"
        return LogitsRecorder.of(self.runner, w.batch_size, gamma, w.num_new_tokens, seed, most)

    def _gather_digests(self, observer: PassObserver) -> None:
        """Replaces this rank's digests by those of all ranks, which see their own KV heads or no
        part of a draft model."""
        logs = self.groups.target.all_gather_values(DigestsOfRank.of(observer), DigestsOfRank)
        if not all(log.hashes for log in logs):  # a rank has none of forwards that were replayed
            observer.use_digests([None] * len(observer.steps))
            return
        step_digests = [
            [digest_of_ranks(row) for row in zip(*rank_digests, strict=True)]
            for rank_digests in zip(*(log.steps() for log in logs), strict=True)
        ]
        logged = iter(step_digests)
        observer.use_digests(
            [None if step.digests is None else next(logged) for step in observer.steps]
        )


def options_of(config: ResolvedConfig, passes: tuple[Pass, ...]) -> ServeOptions:
    """The options of a run: batches of equal requests, on all ranks."""
    w = config.workload
    shape = RequestShape(0.0, w.prefix_len, w.num_new_tokens)
    return ServeOptions(
        emulate_acceptance=config.decoding.emulate_acceptance,
        shapes=(shape,) * w.batch_size,
        passes=passes,
    )
