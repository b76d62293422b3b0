"""Outcome: the records of a run. It has metrics only if the check of the tokens passed, and after
Ctrl-C the finished batches. Nothing here needs the other ranks, which may have ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from magicdec.bench.recording import MeasuredParts, record_pass, status_of
from magicdec.bench.run.of_samples import groups_of, requests_of
from magicdec.bench.run.samples import PassSamples, PrefillSamples
from magicdec.bench.verdict.check import identical
from magicdec.config.resolved import ResolvedConfig
from magicdec.names import BASELINE
from magicdec.records.computing import Beside
from magicdec.records.correctness import Correctness
from magicdec.records.environment import Environment
from magicdec.records.pass_record import PassRecord, hash_output
from magicdec.records.record import Status
from magicdec.runner.request import Request
from magicdec.setup.memory_sampler import NOT_MEASURED, MemoryTaken, describe_memory
from magicdec.setup.prepare import Prepared
from magicdec.workload.answers import answer_scores

PLAIN_PASS = "static"  # the baseline of a run, which decodes batches of prompts
DRAFTING_PASS = "static+draft"


@dataclass
class Outcome:
    """The records of the passes, the baseline's first, and finished requests of the last one in the
    order of the prompts."""

    records: list[PassRecord]
    requests: list[Request] = field(default_factory=list)

    @property
    def record(self) -> PassRecord:
        """That of the requested strategy."""
        return self.records[-1]


@dataclass(frozen=True)
class MeasuredRun:
    """The measurements of all ranks. The last pass is the requested strategy, after the baseline,
    if any."""

    samples: dict[str, PassSamples]  # for each pass
    finished: dict[str, list[Request]]  # for each pass, the requests in the order of the prompts
    prefill: PrefillSamples
    memory: MemoryTaken

    @property
    def strategy(self) -> str:
        return list(self.samples)[-1]

    @property
    def requests(self) -> list[Request]:
        return self.finished[self.strategy]


def make_records(
    prepared: Prepared, measured: MeasuredRun, correctness: Correctness, environment: Environment
) -> list[PassRecord]:
    """The records of the passes, the baseline's first."""
    is_random = prepared.is_random
    # The answers of a target with random weights would say nothing.
    answers = None if prepared.source.is_random else prepared.workload.answers
    records = list[PassRecord]()
    plain: MeasuredParts | None = None
    for name, samples in measured.samples.items():
        finished = measured.finished[name]
        is_drafting = name != BASELINE
        samples.answer_scores = answer_scores(answers, finished, prepared.tokenizer)
        samples.output_hashes = [hash_output(r.output_ids) for r in finished]
        has_counts = is_drafting and not is_random
        lens = [len(request.prompt_ids) for request in finished]
        parts = MeasuredParts(
            requests_of(samples, measured.prefill, lens, has_counts),
            groups_of(samples, measured.prefill, has_counts),
        )
        has_reference = BASELINE in measured.samples and len(measured.samples) > 1
        found = correctness
        if has_reference and not is_drafting and correctness.reference is not None:
            found = identical(PLAIN_PASS, finished)
        num_differing = None
        if found.reference is not None:
            found_hashes = [request.output_hash for request in parts.requests]
            theirs = parts.requests if plain is None else plain.requests
            pairs = zip(found_hashes, [r.output_hash for r in theirs], strict=True)
            num_differing = sum(one != other for one, other in pairs)
        config = prepared.config if is_drafting else prepared.config.without_drafts()
        status = status_of(num_differing, found, prepared.config.model.dtype)
        passed = status is not Status.MISMATCH
        records.append(
            record_pass(
                DRAFTING_PASS if is_drafting else PLAIN_PASS,
                parts,
                Beside(
                    is_drafting=is_drafting,
                    is_random=is_random,
                    bandwidth=environment.read_bandwidth_bytes_per_s,
                    categories=prepared.workload.categories,
                    warmup_calibration_ms=samples.warmup_calibration_ms,
                    reference=plain,
                ),
                status=status,
                config=config.to_dict(),
                environment=environment,
                workload=prepared.describe_workload(),
                correctness=found,
                reference=PLAIN_PASS if has_reference else None,
                num_differing=num_differing,
                memory=describe_memory(
                    prepared.plan, prepared.free, measured.memory if passed else NOT_MEASURED
                ),
            )
        )
        plain = plain or parts
    return records


def unfinished_record(
    config: ResolvedConfig,
    prepared: Prepared | None,
    environment: Environment,
    error: str,
) -> PassRecord:
    """The record of a failed run. `prepared` is None if it was refused before."""
    is_drafting = config.decoding.strategy != BASELINE
    return PassRecord(
        status=Status.FAILED,
        name=DRAFTING_PASS if is_drafting else PLAIN_PASS,
        config=config.to_dict(),
        environment=environment,
        error=error,
        workload=None if prepared is None else prepared.describe_workload(),
        memory=None if prepared is None else describe_memory(prepared.plan, prepared.free),
        requests=[],
        groups=[],
    )
