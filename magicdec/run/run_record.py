"""Makes the record of a run from its measurements. The record has metrics only if the check of the
tokens passed.

Owns the choice of the numbers that a record reports for a pass. Must not measure anything.
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
    """The measurements of a run, for all ranks together. The last pass is the requested strategy.
    If the baseline was decoded too, it comes before that."""

    samples: dict[str, PassSamples]  # for each pass
    finished: dict[str, list[Request]]  # for each pass, the requests in the order of the prompts
    prefill: PrefillMetrics
    memory: MemoryTaken

    @property
    def asked(self) -> str:
        return list(self.samples)[-1]


def make_record(
    prepared: Prepared, measured: Measured, correctness: Correctness, environment: Environment
) -> RunRecord:
    """The record of a run. It has metrics only if the check of the tokens passed."""
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
    """The metrics of one pass, including those of the shared prefill and the speedup over the
    baseline."""
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
    """The answer score of the outputs of a pass. None if the workload has no known answers, or if
    the target has random weights."""
    answers = None if prepared.source.is_random else prepared.workload.answers
    return answer_score(answers, finished, prepared.tokenizer)


def describe_samples(samples: PassSamples, is_undrafted: bool) -> SamplesRecord:
    """The raw step times and the counts of draft tokens, by batch. The counts of draft tokens are
    None if `is_undrafted`: nothing was drafted, or random weights make them meaningless."""
    return SamplesRecord(
        step_ms=[[round(1e3 * s, 4) for s in batch] for batch in samples.step_s],
        num_tokens=samples.num_tokens,
        num_drafted=None if is_undrafted else samples.num_drafted,
        num_accepted=None if is_undrafted else samples.num_accepted,
    )
