"""Outcome: the record of a run. It has metrics only if the check of the tokens passed, and after
Ctrl-C the finished batches. Nothing here needs the other ranks, which may have ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from magicdec.config.resolved import ResolvedConfig
from magicdec.names import BASELINE
from magicdec.records.correctness import Correctness
from magicdec.records.environment import Environment
from magicdec.records.metrics import run_metrics
from magicdec.records.record import RunRecord
from magicdec.records.samples import PassSamples, PrefillSamples, hash_output
from magicdec.runner.request import Request
from magicdec.setup.memory_sampler import NOT_MEASURED, MemoryTaken, describe_memory
from magicdec.setup.prepare import Prepared
from magicdec.workload.answers import answer_scores


@dataclass
class Outcome:
    """The record, and finished requests in the order of the prompts."""

    record: RunRecord
    requests: list[Request] = field(default_factory=list)


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


def make_record(
    prepared: Prepared, measured: MeasuredRun, correctness: Correctness, environment: Environment
) -> RunRecord:
    strategy = measured.strategy
    passed = correctness.passed
    is_random = prepared.is_random
    bandwidth = environment.read_bandwidth_bytes_per_s
    assert bandwidth is not None, "measured in every run"
    # The answers of a target with random weights would say nothing.
    answers = None if prepared.source.is_random else prepared.workload.answers
    for name, samples in measured.samples.items():
        requests = measured.finished[name]
        samples.answer_scores = answer_scores(answers, requests, prepared.tokenizer)
        samples.output_hashes = [hash_output(r.output_ids) for r in requests]
    categories = prepared.workload.categories
    metrics = run_metrics(measured.samples, measured.prefill, bandwidth, is_random, categories)
    return RunRecord(
        status=correctness.status,
        config=prepared.config.to_dict(),
        environment=environment,
        workload=prepared.describe_workload(),
        correctness=correctness,
        metrics=metrics[strategy] if passed else None,
        baseline_metrics=metrics.get(BASELINE) if passed and strategy != BASELINE else None,
        samples={
            name: samples.to_record(is_drafting=name != BASELINE, is_random=is_random)
            for name, samples in measured.samples.items()
        },
        prefill_samples=measured.prefill,
        memory=describe_memory(
            prepared.plan, prepared.free, measured.memory if passed else NOT_MEASURED
        ),
    )


def unfinished_record(
    config: ResolvedConfig,
    prepared: Prepared | None,
    environment: Environment,
    error: str,
) -> RunRecord:
    """The record of a failed run. `prepared` is None if it was refused before."""
    return RunRecord(
        status="failed",
        config=config.to_dict(),
        environment=environment,
        error=error,
        workload=None if prepared is None else prepared.describe_workload(),
        memory=None if prepared is None else describe_memory(prepared.plan, prepared.free),
    )
