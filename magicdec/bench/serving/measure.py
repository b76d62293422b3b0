"""Measures the modes of `magicdec serve`: serves the same requests in each of them, compares their
tokens with those of the first, and makes a record of each. This is the same for every system.

Owns the order: a system is open while modes follow each other that it serves in, every mode serves
a few shortened requests first, unmeasured, and ranks that have no part in a mode wait until it is
over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from magicdec.bench.recording import MeasuredParts, describe_requests, record_pass, status_of
from magicdec.bench.serving.prepare import PreparedServing
from magicdec.bench.serving.verdict import (
    KeptPass,
    KnownGaps,
    ModeReplays,
    check_mode,
    compare_forwards,
    engine_pass,
    judge_steps,
    whole,
)
from magicdec.bench.verdict.check import identical, uncompared
from magicdec.config.run_config import split_draft
from magicdec.distributed.start import close_groups, start_process_group
from magicdec.distributed.values import all_gather_values
from magicdec.hardware.environment import release_memory
from magicdec.hardware.other_load import LoadWatch
from magicdec.hardware.threads import RankThreads, check_threads
from magicdec.hardware.timing import peak_memory_bytes, reset_peak_memory
from magicdec.names import SPECULATIVE
from magicdec.output.console import make_progress
from magicdec.records.computing import Beside
from magicdec.records.correctness import Correctness, ForwardErrors
from magicdec.records.pass_record import GroupRecord, PassRecord
from magicdec.records.record import Status
from magicdec.runner.request import UNKNOWN_ID, NotFinite, Request, naming
from magicdec.setup.session import RankSession
from magicdec.systems.modes import Pass
from magicdec.systems.servers.report import ServerReport, with_missing
from magicdec.systems.system import (
    Extras,
    PassObserver,
    PassTrace,
    System,
    make_requests,
    shortened,
)
from magicdec.workload.request_shapes import RequestShape


@dataclass(frozen=True)
class Served:
    """The requests of a pass, which have ended, in the order of arrival, and what was measured
    meanwhile. `peak_memory` is that of all ranks together, `threads` has those of each,
    `load` what other programs did."""

    each: Pass
    requests: list[Request]
    observer: PassObserver
    extras: Extras
    threads: list[int]
    peak_memory: int | None
    load: LoadWatch

    @property
    def kept(self) -> KeptPass:
        return self.extras.witness, self.requests


@dataclass(frozen=True)
class Verdict:
    """How many requests have other tokens than in the first pass, None if that cannot be compared,
    and what else is known of the tokens."""

    num_differing: int | None
    correctness: Correctness


@dataclass
class MeasuredPasses:
    """What a command has measured so far, on the first rank."""

    records: list[PassRecord] = field(default_factory=list)
    traces: list[PassTrace | None] = field(default_factory=list)  # of each record


def measure(
    prepared: PreparedServing, keep: Callable[[PassRecord], None], is_logged: bool = False
) -> MeasuredPasses:
    """`keep` gets each record as soon as its pass is done, so that what ends a later pass costs
    only that one. With `is_logged` steps say what was drafted and read, as the gate compares it.
    All ranks call it; only the first makes records. Raises PeerLost, or the RuntimeError of a
    collective, if another rank has ended."""
    launch = prepared.launch
    options = prepared.options
    session = RankSession(launch, prepared.run.config.parallel)
    session.begin()
    start_process_group(launch, session.device)
    experiment = Experiment(prepared, session, keep, is_logged)
    for each in options.passes:
        experiment.measure(each)
    experiment.close()
    close_groups()
    return experiment.measured


class Experiment:
    """The passes of one command on this rank."""

    def __init__(
        self,
        prepared: PreparedServing,
        session: RankSession,
        keep: Callable[[PassRecord], None],
        is_logged: bool = False,
    ) -> None:
        self.prepared = prepared
        self.session = session
        self.keep = keep
        self.launch = prepared.launch
        self.measured = MeasuredPasses()
        self.progress = make_progress(self.launch.rank == 0 and not is_logged)
        self.is_logged = is_logged
        self.system: System | None = None
        self.reference: Served | None = None
        self.reference_parts: MeasuredParts | None = None
        self.whole_reference: KeptPass = None, ()
        self.replayed: KnownGaps = {}

    def measure(self, each: Pass) -> None:
        """Serve all requests in the pass and make its record."""
        system = self.open(each)
        num_tokens = self._most_tokens()
        try:
            with naming(f"{each.full_name}: warm-up"):
                self._warm_up(each, system.warm_up_rows(each))
            with self.progress.task(each.full_name, num_tokens) as advance, naming(each.full_name):
                served = self.serve(
                    each,
                    self.prepared.options.shapes,
                    PassObserver(
                        advance=advance,
                        is_measured=True,
                        is_logged=self.is_logged,
                        is_timed=system.are_steps_timed,
                    ),
                )
        except NotFinite as error:
            if self.launch.rank == 0:
                self.keep(self.describe_failed(each, str(error)))
            raise
        if self.reference is None:
            self.reference = served
            if len(self.prepared.systems) > 1:  # maybe on other ranks
                self.whole_reference = whole(system, served.kept)
        verdict = self.compare(served)
        if self.launch.rank == 0:
            record = self.describe(served, verdict)
            self.measured.records.append(record)
            self.measured.traces.append(served.extras.trace)
            self.keep(record)

    def _most_tokens(self) -> int:
        """The output tokens of all requests, unless some end early."""
        lengths = [shape.output_len for shape in self.prepared.options.shapes]
        talks = self.prepared.run.workload.conversations
        counts = [1] * len(lengths) if talks is None else [len(each.turns) for each in talks]
        return sum(count * length for count, length in zip(counts, lengths, strict=True))

    def open(self, each: Pass) -> System:
        """The system of the pass, with what the pass needs and with its number of threads. A
        system that serves no longer gives its memory back before."""
        system = self.prepared.system_of(each)
        if system is not self.system:
            self.close()
            if self.launch.world_size > 1:  # all ranks have given back what they do not use
                torch.distributed.barrier()
            self.system = system
            torch.set_num_threads(system.run.config.parallel.threads)
        system.open(each, self.session.device, self.progress)
        return system

    def close(self) -> None:
        if self.system is not None:
            self.system.close()
            release_memory(self.session.device)
        self.system = None

    def serve(self, each: Pass, shapes: Sequence[RequestShape], observer: PassObserver) -> Served:
        """Serve requests of these shapes, of which the first arrives now. Raises AssertionError if
        a rank has computed with other threads than its config says."""
        system = self.prepared.system_of(each)
        run = self.prepared.run
        device = self.session.device
        config = run.config
        launch = self.launch
        ends = () if config.decoding.ignore_eos else run.source.config.eos_token_ids
        is_coupled = self.prepared.options.is_coupled and not each.drafts_in_turns
        is_reset = reset_peak_memory(device)
        is_watching = launch.rank == 0 and observer.is_measured and not system.is_external
        load = LoadWatch(is_watching)
        load.begin()
        now_s = system.now()
        prompts = self.prepared.run.workload.prompts
        if system.is_external and not observer.is_measured:
            prompts = without_first(prompts)
        # Warm-up asks the first questions alone.
        has_turns = observer.is_measured and self.prepared.options.turns > 1
        talks = self.prepared.run.workload.conversations if has_turns else None
        requests = make_requests(prompts, shapes, now_s, config.sampling, ends, is_coupled, talks)
        extras = system.serve(each, requests, observer)
        load.end()
        expected = system.expected_threads
        peak = peak_memory_bytes(device) if is_reset else None
        ours = observer.threads.of_rank(launch.rank, expected), peak
        by_rank = all_gather_values(ours, tuple[RankThreads, int | None], launch.world_size)
        threads = check_threads(each.full_name, [each_rank for each_rank, _ in by_rank])
        peaks = [peak for rank_threads, peak in by_rank if rank_threads.expected]
        known = [peak for peak in peaks if peak is not None]
        total = sum(known) if known and None not in peaks else None
        return Served(each, requests, observer, extras, threads, total, load)

    def describe_failed(self, each: Pass, error: str) -> PassRecord:
        system = self.prepared.system_of(each)
        prompts = replace(system.run, workload=self.prepared.run.workload)
        return PassRecord(
            status=Status.FAILED,
            name=each.full_name,
            config=self.describe_config(each),
            environment=self.session.describe_environment(),
            workload=prompts.describe_workload(),
            reference=self.reference_name,
            requests=[],
            groups=[],
            error=error,
        )

    @property
    def reference_name(self) -> str | None:
        """The name of the first pass; None if it is the only one."""
        passes = self.prepared.options.passes
        return passes[0].full_name if len(passes) > 1 else None

    def compare(self, served: Served) -> Verdict:
        """Whether the tokens of a pass are right. All ranks call it."""
        reference = self.reference
        assert reference is not None, "there is a first pass"
        size = self.launch.world_size
        system = self.prepared.system_of(served.each)
        judged = judge_steps(system, served.kept)
        known = self._count_differing(served, reference)
        counts = all_gather_values([] if known is None else [known], list[int], size)[0]
        if not counts:
            return Verdict(None, replace(uncompared(served.requests), judged_again=judged))
        name = reference.each.full_name
        forwards = self._compare_forwards(served, reference)
        correctness = identical(name, served.requests)
        if counts[0]:
            correctness = self._judge_differences(served, reference)
        return Verdict(counts[0], replace(correctness, judged_again=judged, forwards=forwards))

    def _compare_forwards(self, served: Served, reference: Served) -> ForwardErrors | None:
        """The errors of the logits of a pass and of the first, which the first rank knows. None
        unless logits of both were kept, and in the gate, whose passes are compared with earlier
        ones."""
        if self.is_logged or served is reference:
            return None
        passes = reference.each, served.each
        first, system = systems = [self.prepared.system_of(each) for each in passes]
        if not all(one.is_watched(each) for one, each in zip(systems, passes, strict=True)):
            return None
        if system is first:
            return compare_forwards(system, reference.kept, served.kept, self.progress)
        # One of them is on the first rank alone, and the other's ranks share the vocabulary.
        kept = whole(system, served.kept)
        alone = min(systems, key=lambda each: each.ranks_of_layer)
        self.open(alone.passes[0])
        return compare_forwards(alone, self.whole_reference, kept, self.progress)

    def _count_differing(self, served: Served, reference: Served) -> int | None:
        """The requests whose tokens differ, None if they cannot be compared; known to the first
        rank."""
        each = served.each
        temperature = self.prepared.system_of(each).run.config.sampling.temperature
        pair = (*reference.requests, *served.requests)
        has_ids = not any(UNKNOWN_ID in request.output_ids for request in pair)
        has_others = len(self.prepared.options.passes) > 1
        is_by_chance = self.prepared.options.accepts_by_chance(each)
        is_comparable = has_ids and can_compare(each, reference.each, temperature)
        if not has_others or is_by_chance or not is_comparable:
            return None
        return num_differing(reference.requests, served.requests)

    def _judge_differences(self, served: Served, reference: Served) -> Correctness:
        """The judgement of tokens that differ, if the engine can replay both passes."""
        name = reference.each.full_name
        unjudged = replace(uncompared(served.requests), reference=name, identical=False)
        pair = [
            engine_pass(self.prepared.system_of(each), each, self.prepared.systems)
            for each in (reference.each, served.each)
        ]
        is_plain = all(request.sampling.is_plain for request in served.requests)
        (first, other) = pair
        if first is None or other is None or not is_plain:
            return unjudged
        size = self.launch.world_size
        replays = ModeReplays(self.open, first, other, size, self.progress, self.replayed)
        return check_mode(name, reference.requests, served.requests, replays)

    def describe(self, served: Served, verdict: Verdict) -> PassRecord:
        """The record of a pass, which has metrics only if its tokens are not known to be wrong."""
        each = served.each
        reference = self.reference
        assert reference is not None, "there is a first pass"
        system = self.prepared.system_of(each)
        options = self.prepared.options
        config = system.config_of(each)
        is_external = system.is_external or self.prepared.system_of(reference.each).is_external
        dtype = config["model"]["dtype"]
        status = status_of(verdict.num_differing, verdict.correctness, dtype, is_external)
        prompts = self.prepared.run.workload
        parts = self.parts_of(served)
        if served is reference:
            self.reference_parts = parts
        details = served.extras.ring or served.extras.speculation or served.extras.server
        has_reference = served is not reference and status is not Status.MISMATCH
        record = record_pass(
            each.full_name,
            parts,
            Beside(
                is_drafting=each.is_drafting,
                is_random=system.run.is_random,
                goodput=options.goodput or {},
                categories=prompts.categories,
                gaps_ms=[gap for request in served.requests for gap in request.gaps_ms()],
                reported_total=served.observer.verifications.reported_total,
                reference=self.reference_parts if has_reference else None,
            ),
            status=status,
            config=self.describe_config(each),
            environment=served.load.add_to(self.session.describe_environment()),
            workload=replace(system.run, workload=prompts).describe_workload(),
            correctness=verdict.correctness,
            reference=self.reference_name,
            num_differing=verdict.num_differing,
            details=details,
        )
        if isinstance(record.details, ServerReport):
            has_drafts = served.observer.verifications.has_drafts
            report = with_missing(record.details, record.metrics, has_drafts)
            record = replace(record, details=report)
        return record

    def parts_of(self, served: Served) -> MeasuredParts:
        """The requests and the one group of a pass."""
        system = self.prepared.system_of(served.each)
        counts = served.observer.counts
        steps = served.observer.steps
        requests = served.requests
        # With random weights a draft and its target agree by chance alone.
        is_random = system.run.is_random
        judged = None if is_random else served.observer.verifications
        gammas = [step.kind[1] for step in steps]
        group = GroupRecord(
            num_requests=len(requests),
            num_steps=counts.num_steps or None,
            num_in_flight=counts.num_in_flight or None,
            step_ms=[step.ms for step in steps],
            step_prompt_tokens=[step.kind[0] for step in steps] or None,
            step_max_gamma=gammas if served.each.is_drafting and not is_random else None,
            step_rows=[step.kind[2] for step in steps] or None,
            draft_ms=[],
            verify_ms=[],
            decode_ms=[],
            peak_memory_bytes=None if served.peak_memory is None else [served.peak_memory],
            threads=served.threads,
        )
        described = describe_requests(requests, counts.moves, requests[0].arrived_s, judged)
        return MeasuredParts(described, [group])

    def describe_config(self, each: Pass) -> dict[str, Any]:
        """The resolved config of a pass, and the flags of the command."""
        system = self.prepared.system_of(each)
        options = self.prepared.options
        config = system.config_of(each)
        prompts = self.prepared.run.workload
        asked = system.run.config.workload
        settings: dict[str, Any] = {
            "dataset": asked.dataset,
            "prompt_format": asked.prompt_format,
            "seed": prompts.seed,
        }
        settings |= options.describe() | {"mode": each.mode, "concurrency": each.concurrency}
        splits = [each.layer_split for each in (system, *self.prepared.systems)]
        chosen = next((split for split in splits if split is not None), options.layer_split)
        settings["layer_split"] = chosen
        has_draft = each.is_drafting and bool(config["decoding"]["drafter"] or config["draft"])
        if each.is_drafting:  # stages drafts nothing themselves in pipelined speculation
            drafter, _ = split_draft(options.draft)
            config["decoding"] |= {"strategy": SPECULATIVE, "drafter": drafter}
        return parts_of(config, has_draft) | {"workload": settings}

    def _warm_up(self, each: Pass, num_requests: int) -> None:
        """Serve the first requests once, shortened, so that what happens once is not measured."""
        chunk = self.prepared.system_of(each).run.config.attention.prefill_chunk
        shapes = self.prepared.options.shapes[:num_requests]
        self.serve(each, shortened(shapes, chunk), PassObserver())


def without_first(prompts: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """The same prompts without their first tokens, so that none begins as one of them does: what a
    server keeps of these is of no use for the others."""
    return tuple(prompt[1:] or prompt for prompt in prompts)


def num_differing(expected: Sequence[Request], others: Sequence[Request]) -> int:
    """The number of requests whose output tokens are not the same."""
    pairs = zip(expected, others, strict=True)
    return sum(one.output_ids != other.output_ids for one, other in pairs)


PARTS = ("model", "parallel", "attention", "decoding", "sampling")  # of a config that are recorded
OF_DRAFTS = ("draft", "kv")  # and those of a pass with drafts


def parts_of(config: Mapping[str, Any], has_drafts: bool) -> dict[str, Any]:
    """The parts of a resolved config that are recorded."""
    return {name: config[name] for name in ((*PARTS, *OF_DRAFTS) if has_drafts else PARTS)}


def can_compare(each: Pass, first: Pass, temperature: float) -> bool:
    """Sampled drafts that are made in turns are rejected at random, so that tokens differ from
    those of a pass that drafts nothing, while their distribution is the same."""
    is_random = temperature > 0 and (each.drafts_in_turns or first.drafts_in_turns)
    return each == first or not is_random
