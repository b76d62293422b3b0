"""The record of a run from what it measured: metrics enter it only if the check passed.

Owns which numbers of a pass are told. Must not measure anything.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from magicdec.memory.watch import NOT_MEASURED, MemoryTaken, describe_memory
from magicdec.records.correctness import Correctness
from magicdec.records.environment import Environment
from magicdec.records.metrics import PassSamples, PrefillMetrics, decode_metrics, speedups
from magicdec.records.performance import Metrics, without_chance
from magicdec.records.record import RunRecord
from magicdec.records.samples import SamplesRecord
from magicdec.request import Request
from magicdec.setup.prepare import Prepared
from magicdec.workload.answers import answer_score

BASELINE = "autoregressive"


@dataclass(frozen=True)
class Measured:
    """What a run measured, of all ranks together. The pass that was asked for is the last one, and
    the baseline, if it was decoded too, stands before it."""

    samples: dict[str, PassSamples]  # by pass
    finished: dict[str, list[Request]]  # by pass: every prompt's request, in prompt order
    prefill: PrefillMetrics
    memory: MemoryTaken

    @property
    def asked(self) -> str:
        return list(self.samples)[-1]


def make_record(
    prepared: Prepared, measured: Measured, correctness: Correctness, environment: Environment
) -> RunRecord:
    """Metrics enter the record only if the check passed."""
    asked, passed = measured.asked, correctness.passed
    bandwidth = environment.read_bandwidth_bytes_per_s
    assert bandwidth is not None, "measured in every run"
    metrics = {name: pass_metrics(prepared, measured, name, bandwidth) for name in measured.samples}
    memory = measured.memory if passed else NOT_MEASURED
    return RunRecord(
        status="ok" if passed else "diverged",
        config=prepared.config.to_dict(),
        environment=environment,
        workload=prepared.describe_workload(),
        correctness=correctness,
        metrics=metrics[asked] if passed else None,
        baseline_metrics=metrics.get(BASELINE) if passed and asked != BASELINE else None,
        samples={
            name: describe_samples(samples, name == BASELINE or prepared.is_random)
            for name, samples in measured.samples.items()
        },
        memory=describe_memory(prepared.plan, prepared.free, memory),
    )


def pass_metrics(prepared: Prepared, measured: Measured, name: str, bandwidth: float) -> Metrics:
    """Of one pass, with what it shares with the others and what follows from comparing them."""
    metrics = replace(
        decode_metrics(measured.samples[name], bandwidth, is_drafting=name != BASELINE),
        prefill_tokens_per_s=measured.prefill.tokens_per_s,
        mean_ttft_ms=measured.prefill.mean_ttft_ms,
        answer_score=score_pass(prepared, measured.finished[name]),
    )
    if name == BASELINE:
        return metrics
    if BASELINE in measured.samples:
        values = speedups(measured.samples[BASELINE], measured.samples[name])
        if values:
            median = statistics.median(values)
            metrics = replace(metrics, speedup=median, speedup_per_batch=values)
    return without_chance(metrics) if prepared.is_random else metrics


def score_pass(prepared: Prepared, finished: list[Request]) -> float | None:
    """How right the pass's outputs are; None without known answers, and with random weights."""
    answers = None if prepared.source.is_random else prepared.workload.answers
    return answer_score(answers, finished, prepared.tokenizer)


def describe_samples(samples: PassSamples, is_undrafted: bool) -> SamplesRecord:
    """Raw step times and accepted counts by batch; without counts where nothing was drafted, or
    they have no meaning."""
    return SamplesRecord(
        step_ms=[[round(1e3 * s, 4) for s in batch] for batch in samples.step_s],
        num_tokens=samples.num_tokens,
        num_drafted=None if is_undrafted else samples.num_drafted,
        num_accepted=None if is_undrafted else samples.num_accepted,
    )
