"""Makes the record of a run from its measurements. The record has metrics only if the check of the
tokens passed.

Owns what of a run goes into its record. Must not measure anything; `records/metrics.py` computes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from magicdec.memory.sampler import NOT_MEASURED, MemoryTaken, describe_memory
from magicdec.names import BASELINE
from magicdec.records.correctness import Correctness
from magicdec.records.environment import Environment
from magicdec.records.identities.of_metrics import check_identities
from magicdec.records.metrics import run_metrics
from magicdec.records.record import RunRecord
from magicdec.records.samples import PassSamples, PrefillSamples, SamplesRecord
from magicdec.request import Request
from magicdec.setup.prepare import Prepared
from magicdec.workload.answers import answer_scores


@dataclass(frozen=True)
class Measured:
    """The measurements of a run, for all ranks together. The last pass is the requested strategy.
    If the baseline was decoded too, it comes before that."""

    samples: dict[str, PassSamples]  # for each pass
    finished: dict[str, list[Request]]  # for each pass, the requests in the order of the prompts
    prefill: PrefillSamples
    memory: MemoryTaken

    @property
    def asked(self) -> str:
        return list(self.samples)[-1]


def make_record(
    prepared: Prepared, measured: Measured, correctness: Correctness, environment: Environment
) -> RunRecord:
    """The record of a run. It has metrics only if the check of the tokens passed. Raises
    AssertionError if measurements contradict each other."""
    asked, passed, is_random = measured.asked, correctness.passed, prepared.is_random
    bandwidth = environment.read_bandwidth_bytes_per_s
    assert bandwidth is not None, "measured in every run"
    for name, samples in measured.samples.items():
        samples.answer_scores = score_pass(prepared, measured.finished[name])
        samples.output_hashes = [hash_output(r.output_ids) for r in measured.finished[name]]
    metrics = run_metrics(measured.samples, measured.prefill, bandwidth, is_random)
    check_identities(metrics, measured.samples, measured.prefill, bandwidth)
    memory = measured.memory if passed else NOT_MEASURED
    return RunRecord(
        status=correctness.status,
        config=prepared.config.to_dict(),
        environment=environment,
        workload=prepared.describe_workload(),
        correctness=correctness,
        metrics=metrics[asked] if passed else None,
        baseline_metrics=metrics.get(BASELINE) if passed and asked != BASELINE else None,
        samples={
            name: SamplesRecord.of(samples, is_drafting=name != BASELINE, is_random=is_random)
            for name, samples in measured.samples.items()
        },
        prefill_samples=measured.prefill,
        memory=describe_memory(prepared.plan, prepared.free, memory),
    )


def score_pass(prepared: Prepared, finished: list[Request]) -> list[float] | None:
    """The answer score of each output of a pass. None if the workload has no known answers, or if
    the target has random weights."""
    answers = None if prepared.source.is_random else prepared.workload.answers
    return answer_scores(answers, finished, prepared.tokenizer)


def hash_output(token_ids: Sequence[int]) -> str:
    """The hash of an output, as a record holds it (`SamplesRecord.output_hashes`)."""
    return hashlib.sha256(" ".join(map(str, token_ids)).encode()).hexdigest()[:16]
