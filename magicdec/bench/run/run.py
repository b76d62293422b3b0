"""One run on one rank: load the models, measure, check the tokens and make the record. Each batch
is prefilled once, every pass starts from that state, and the outputs of both passes are compared.
All ranks of the group execute the same steps together.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NamedTuple

from magicdec.bench.run.outcome import (
    PLAIN_PASS,
    MeasuredRun,
    Outcome,
    make_records,
)
from magicdec.bench.run.resident import CacheDemand, MeasuredBatch, Prefilled, Resident
from magicdec.bench.run.roofline import bytes_read
from magicdec.bench.run.samples import PassSamples, PrefillSamples, to_ms
from magicdec.bench.verdict.check import RunReplays, check_outputs, uncompared
from magicdec.bench.verdict.forwards import measure_forwards
from magicdec.bench.verdict.judgement import judge_again
from magicdec.bench.verdict.wider import WiderTexts, wider_kinds
from magicdec.hardware.environment import watch_gpu
from magicdec.hardware.other_load import LoadWatch
from magicdec.hardware.threads import RankThreads, ThreadCount, check_threads
from magicdec.hardware.timing import (
    PhaseTimer,
    peak_memory_bytes,
    read_bandwidth,
    reset_peak_memory,
    synchronize,
)
from magicdec.kv.draft_log import Digest, DraftLog, digest_of_ranks
from magicdec.kv.forward_counts import ForwardCounts
from magicdec.model.transformer import Transformer
from magicdec.names import BASELINE, REFERENCE_BACKEND
from magicdec.output.console import Progress, make_progress
from magicdec.records.correctness import Correctness, ForwardErrors, JudgedAgain
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.request import Request, StepOutput, naming
from magicdec.setup.loading import (
    copy_runner,
    load_model,
    make_backend,
    make_draft,
    runner_of,
)
from magicdec.setup.memory_sampler import MemoryTaken, MemoryWatch
from magicdec.setup.model_plan import ModelPlan, StagePart, max_tokens
from magicdec.setup.prepare import Prepared
from magicdec.setup.session import RankSession, session_of
from magicdec.speculation.draft_length import make_draft_length
from magicdec.speculation.steps.build import build_decoder
from magicdec.speculation.steps.strategy import DecodingStrategy
from magicdec.speculation.steps.witness import Witness


class RankCounts(NamedTuple):
    bytes_read: int
    peak_bytes: int
    draft_kv_tokens: int
    draft_rows: int
    threads: RankThreads


class RankLog(NamedTuple):
    """A rank's log of a pass over one batch, by batch, step and row."""

    hashes: list[list[list[str]]]
    keys: list[list[list[int]]]

    def steps(self) -> Iterator[list[Digest]]:
        for hashes, keys in zip(chain(*self.hashes), chain(*self.keys), strict=True):
            yield list(zip(hashes, keys, strict=True))


class Run:
    """One rank's part of a run: models, runners and measurements. `resident` has what a study's
    earlier runs left, and `room` is that of all runs with these prompts."""

    def __init__(
        self,
        prepared: Prepared,
        session: RankSession,
        progress: Progress,
        resident: Resident | None = None,
        room: CacheDemand | None = None,
    ) -> None:
        self.prepared = prepared
        self.progress = progress
        self.groups = session.groups
        self.device = session.device
        self.config = prepared.config
        d = self.config.decoding
        group = self.groups.target
        self.max_tokens = max_tokens(self.config)
        self.memory = MemoryWatch(self.device)
        self.gpu = watch_gpu(self.device)
        self.load = LoadWatch(self.groups.rank == 0)
        self.resident = resident or Resident(self.device, progress)
        room = room or CacheDemand.of([self.config])
        self.prompts = self.resident.prompts(self.config, room, self.make_runner)
        self.is_counted = self.resident.is_counted
        self.engine = self.prompts.engine
        self.copies: dict[int, ModelRunner | None] = {}  # by the identity of the target's runner
        self.draft = make_draft(prepared, self.groups, self.resident.models)
        self.draft_length = make_draft_length(d, group, self.device)
        has_baseline = d.baseline and d.strategy != BASELINE
        self.passes = [BASELINE, d.strategy] if has_baseline else [d.strategy]
        self.prefilled: list[Prefilled] = []  # the batches so far
        self.measured: dict[str, list[MeasuredBatch]] = {name: [] for name in self.passes}
        self.kept: dict[str, Witness] = {}  # of the last pass of each name
        self.warmup_calibration_ms: float | None = None
        self.is_timed = self.device.type == "cpu" or self.config.output.benchmark

    @property
    def runner(self) -> ModelRunner:
        return self.engine.runner

    def make_runner(self, room: CacheDemand) -> ModelRunner:
        source = self.prepared.source
        group = self.groups.target
        plan = self.plan_of(room.max_tokens, room.rewound)
        model = self.resident.models.get(source, group, plan.kinds)
        # Before the cache takes memory.
        self.resident.models.get_copy(source, group, plan)
        return runner_of(plan, model, group)

    def plan_of(self, max_tokens: int, rewound: int | None = None) -> ModelPlan:
        return ModelPlan(
            self.config,
            self.prepared.source.config,
            self.groups.target.ranks,
            self.groups.rank,
            row_tokens=max_tokens,
            rewound=rewound,
        )

    def use(self, prefilled: Prefilled) -> None:
        """Makes this batch current. Its runner, shared by runs with other drafts, drafts with this
        run's copy."""
        self.engine = prefilled.engine
        runner = self.runner
        plan = self.plan_of(self.max_tokens)
        if id(runner) not in self.copies:
            copy = self.resident.models.get_copy(self.prepared.source, self.groups.target, plan)
            self.copies[id(runner)] = copy_runner(plan, runner, copy)
        runner.drafting = self.copies[id(runner)]

    def load_wider(self, part: StagePart = StagePart()) -> Transformer:
        """This rank's weights of the target or a part in a wider dtype, for torch's own
        operators."""
        kinds = wider_kinds(self.config)
        group = self.groups.target
        return load_model(self.prepared.source, group, kinds, self.device, self.progress, part)

    def make_reference(self) -> ModelRunner:
        model = self.load_wider()
        backend = make_backend(REFERENCE_BACKEND)
        return ModelRunner(model, backend, self.groups.target, 1, self.max_tokens)

    def make_witness(self, name: str) -> Witness | None:
        """A witness that keeps logits of the next pass; None if nothing is compared."""
        if not self.is_compared:
            return None
        w = self.config.workload
        most = self.config.decoding.max_gamma
        seed = f"{w.seed} {len(self.measured[name])}"
        gamma = 0 if name == BASELINE else most
        return Witness.of(self.runner, w.batch_size, gamma, w.num_new_tokens, seed, most)

    def make_strategy(
        self, name: str, timer: PhaseTimer, witness: Witness | None = None
    ) -> DecodingStrategy:
        return build_decoder(
            self.runner,
            self.config.decoding,
            self.config.kv,
            name=name,
            draft=self.draft,
            corpus=self.prepared.corpus,
            draft_length=self.draft_length,
            phase=timer,
            witness=witness,
        )

    def runners(self) -> list[ModelRunner]:
        """The target's runner, and the draft's if this rank has a shard of it."""
        draft = self.runner.drafting if self.draft is None else self.draft.runner
        return [self.runner] if draft is None else [self.runner, draft]

    @property
    def num_forwards(self) -> int:
        """The forwards of this rank's runners so far, as the host counted them."""
        return sum(runner.counts.num_forwards for runner in self.runners())

    def measure(self) -> None:
        for batch in range(self.config.workload.num_batches):
            with naming(f"batch {batch}"):
                self.measure_batch(batch)

    def measure_batch(self, batch: int) -> None:
        prefilled = self.prompts.batch(batch, self.prepared)
        self.prefilled.append(prefilled)
        self.use(prefilled)
        if batch == 0:
            self.warm_up(prefilled.snapshots)
        # The passes take turns at going first, so that a drift in the machine's speed favours
        # neither of them.
        for name in self.passes if batch % 2 == 0 else reversed(self.passes):
            if name == BASELINE and self.is_counted and batch in self.prompts.baselines:
                self.measured[name].append(self.prompts.baselines[batch])
                continue
            with naming(name):
                self.measure_pass(name, prefilled.snapshots)
            if name == BASELINE and self.is_counted:
                self.prompts.baselines[batch] = self.measured[name][-1]

    def warm_up(self, snapshots: list[Request], passes: Sequence[str] | None = None) -> None:
        """Decodes the first batch with every strategy, or these, as often as the config says."""
        rounds = self.config.workload.warmup_batches
        names = list(passes or self.passes)
        with self.progress.task("warm-up", rounds * len(names)) as advance:
            for name in names * rounds:
                self.decode_unmeasured(name, snapshots, PhaseTimer(self.device, enabled=False))
                advance()
        warmup_s = self.draft_length.calibration_s
        self.warmup_calibration_ms = None if warmup_s is None else to_ms(warmup_s)
        # So that calibration is part of the first measured batch and its net speedup.
        self.draft_length.forget_times()

    def decode_unmeasured(self, name: str, snapshots: list[Request], timer: PhaseTimer) -> None:
        """Decodes from the state after prefill, without effect on the record."""
        self.engine.rewind(snapshots)
        with naming(f"warm-up, {name}"):
            strategy = self.make_strategy(name, timer)
            self.engine.begin(strategy)
            self.engine.decode(strategy)

    def measure_pass(self, name: str, snapshots: list[Request]) -> None:
        """Measures a pass over the current batch. An interrupted one leaves nothing."""
        samples = PassSamples.empty()
        w = self.config.workload
        threads = ThreadCount()
        timer = PhaseTimer(self.device, self.is_timed)
        witness = self.make_witness(name)
        self.engine.rewind(snapshots)
        log = DraftLog() if self.is_counted and name != BASELINE else None
        for runner in self.runners():
            runner.draft_log = log
        strategy = self.make_strategy(name, timer, witness)
        threads.note()
        self.begin(name, strategy, samples)
        if witness is not None:
            witness.is_watching = True
        before = [runner.counts.copy() for runner in self.runners()]
        self.memory.note()
        reset_peak_memory(self.device)
        samples.begin_batch()
        so_far = [self.num_forwards]
        started = time.perf_counter()
        with self.progress.task(name, w.batch_size * w.num_new_tokens) as advance:

            def observe(request_ids: Sequence[int], output: StepOutput, seconds: float) -> None:
                so_far.append(self.num_forwards)
                samples.observe(output, seconds, so_far[-1] - so_far[-2])
                advance(output.num_tokens)

            finished = self.engine.decode(strategy, observe)
        samples.end_batch(finished, started)
        threads.note()
        self.memory.note()
        self.gpu.read()
        samples.observe_phases(timer.seconds)
        self.gather_counts(name, samples, before, threads)
        if log is not None and self.groups.target.size > 1:
            self.gather_log(samples)
        requests = [r.snapshot() for r in finished]
        judged = None
        if witness is not None:
            judged = judge_again(witness, finished, self.runner)
            self.kept[name] = witness
        self.measured[name].append(MeasuredBatch(samples, requests, judged))

    def gather_counts(
        self,
        name: str,
        samples: PassSamples,
        before: Sequence[ForwardCounts],
        threads: ThreadCount,
    ) -> None:
        """Adds all ranks' counts of a pass over one batch; `before` are this rank's counts before
        it. Raises AssertionError if a rank computed with other threads than its config says."""
        rank = self.groups.rank
        pairs = zip(self.runners(), before, strict=True)
        used = [(runner.model, runner.counts.minus(counts)) for runner, counts in pairs]
        of_rank = RankCounts(
            sum(bytes_read(model, counts) for model, counts in used),
            peak_memory_bytes(self.device),
            sum(counts.draft_kv_tokens_read for _, counts in used),
            sum(counts.draft_rows for _, counts in used),
            threads.of_rank(rank, self.config.parallel.threads),
        )
        read, peak, kv_tokens, draft_rows, of_threads = zip(
            *self.groups.target.all_gather_values(of_rank, RankCounts), strict=True
        )
        samples.bytes_read.append(list(read))
        samples.peak_memory_bytes.append(list(peak))
        samples.threads.append(check_threads(name, of_threads))
        # The same on all ranks that draft; 0 on others.
        samples.draft_kv_tokens.append(max(kv_tokens))
        samples.draft_rows.append(max(draft_rows))

    def gather_log(self, samples: PassSamples) -> None:
        """Replaces this rank's log of a pass over one batch by that of all ranks, which see their
        own KV heads or no part of a draft model."""
        mine = RankLog(samples.draft_hashes or [], samples.draft_keys or [])
        logs = self.groups.target.all_gather_values(mine, RankLog)
        if not all(log.hashes for log in logs):  # a rank has none of forwards that were replayed
            samples.draft_hashes = None
            samples.draft_keys = None
            return
        hashes = list[list[str]]()
        keys = list[list[int]]()
        for of_ranks in zip(*(log.steps() for log in logs), strict=True):
            rows = [digest_of_ranks(row) for row in zip(*of_ranks, strict=True)]
            hashes.append([hashed for hashed, _ in rows])
            keys.append([num_read for _, num_read in rows])
        samples.draft_hashes = [hashes]
        samples.draft_keys = [keys]

    def begin(self, name: str, strategy: DecodingStrategy, samples: PassSamples) -> None:
        """Lets the strategy prepare, and notes the time and how much was calibration."""
        calibrated_s = self.draft_length.calibration_s
        self.groups.target.barrier()
        started = time.perf_counter()
        self.engine.begin(strategy)
        synchronize(self.device)
        self.groups.target.barrier()
        seconds = time.perf_counter() - started
        calibration_s = None
        if name != BASELINE and calibrated_s is not None:
            calibration_s = (self.draft_length.calibration_s or 0.0) - calibrated_s
        samples.observe_begin(seconds, calibration_s, self.draft is not None and name != BASELINE)

    def merged(self, memory: MemoryTaken, num_batches: int | None = None) -> MeasuredRun:
        batches = {name: each[:num_batches] for name, each in self.measured.items()}
        samples = {
            name: PassSamples.merged([batch.samples for batch in each])
            for name, each in batches.items()
        }
        samples[self.passes[-1]].warmup_calibration_ms = self.warmup_calibration_ms
        finished = {
            name: list(chain(*(b.requests for b in each))) for name, each in batches.items()
        }
        prefill = PrefillSamples(prefill_ms=[], ttft_ms=[], num_tokens=[])
        for prefilled in self.prefilled[:num_batches]:
            prefill.observe(prefilled.snapshots, prefilled.seconds)
        return MeasuredRun(samples, finished, prefill, memory)

    @property
    def is_compared(self) -> bool:
        """Whether outputs are compared with the baseline's. Sampled tokens differ between passes;
        tests check that speculation keeps their distribution. Those of emulated acceptance mean
        nothing."""
        if self.config.decoding.emulate_acceptance is not None:
            return False
        return BASELINE in self.passes[:-1] and self.config.sampling.temperature == 0

    def check(self, measured: MeasuredRun, is_whole: bool = True) -> Correctness:
        """Compares the tokens with the baseline's, and judges steps and, if the last batch
        `is_whole`, forwards; not those of a counted run, whose steps are all compared with an
        earlier run's."""
        requests = measured.requests
        if not self.is_compared:
            return uncompared(requests)
        forwards = self.measure_forwards() if is_whole and not self.is_counted else None
        replays = RunReplays(
            self.runner,
            self.make_reference,
            self.config.decoding.max_gamma,
            self.config.attention.prefill_chunk,
        )
        correctness = check_outputs(PLAIN_PASS, measured.finished[BASELINE], requests, replays)
        if not correctness.identical:
            self.prompts.forget()  # the replays have taken the place of a batch
        judged = [each.judged for batches in self.measured.values() for each in batches]
        return replace(
            correctness,
            judged_again=JudgedAgain.sum_of([each for each in judged if each is not None]),
            forwards=forwards,
        )

    def measure_forwards(self) -> ForwardErrors:
        last = len(self.measured[BASELINE]) - 1
        if not self.prompts.holds(last):
            self.use(self.prompts.batch(last, self.prepared))
        decode, verify = (
            (self.kept[name], self.measured[name][last].requests) for name in self.passes
        )
        dtype = self.config.model.dtype
        return measure_forwards(decode, verify, self.runner, self.make_wider_texts, dtype)

    def make_wider_texts(self) -> WiderTexts:
        return WiderTexts(self.runner, self.load_wider, partial(make_backend, REFERENCE_BACKEND))


def execute(prepared: Prepared, is_leader: bool) -> Outcome:
    """Executes the run on this rank. Exceptions propagate; the caller records them."""
    with session_of(prepared) as session:
        return execute_in(session, prepared, make_progress(is_leader))


def execute_in(
    session: RankSession,
    prepared: Prepared,
    progress: Progress,
    resident: Resident | None = None,
    room: CacheDemand | None = None,
) -> Outcome:
    """`execute` in an open session. `resident` and `room` as in `Run`."""
    group = session.groups.target
    device = session.device
    was_in_use = resident is not None and not resident.is_empty
    run = Run(prepared, session, progress, resident, room)
    bandwidth = read_bandwidth(group, device)
    run.load.begin()
    run.measure()
    run.load.end()
    # The larger of two measurements counts, because a busy host rarely slows down both.
    bandwidth = max(bandwidth, read_bandwidth(group, device))
    taken = run.memory.measured(group)
    measured = run.merged(replace(taken, process=None) if was_in_use else taken)
    correctness = run.check(measured)
    environment = run.load.add_to(run.gpu.add_to(session.describe_environment(bandwidth)))
    records = make_records(run.prepared, measured, correctness, environment)
    return Outcome(records, measured.requests)
