"""Computes the metrics of a record from raw times and counts. A metric that does not apply is None,
never 0.

Definitions: The acceptance rate is accepted tokens / draft tokens. The acceptance length is the
mean number of tokens that a verification emits, including the bonus token. The acceptance of
position k is the share of verifications that accepted at least k drafts, as in vLLM. If steps draft
different numbers of tokens, it is a product over the positions up to k: the share of the steps that
accepted this position among those that drafted it and accepted all before it. TTFT begins when the
batch is submitted. TPOT of a request is its decode time / the number of tokens after its first.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from magicdec.records.performance import Metrics
from magicdec.request import Request, StepOutput


@dataclass
class PassSamples:
    """The raw times and counts of one strategy over all measured batches."""

    step_s: list[list[float]] = field(default_factory=list)  # by batch and step
    num_accepted: list[list[list[int]]] = field(default_factory=list)  # by batch, step and row
    # Tokens after the first ones, by batch.
    num_tokens: list[int] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)  # by request
    bytes_read: int = 0  # summed over all ranks
    peak_memory_bytes: int = 0  # summed over all ranks
    # By phase; one time for each step that had the phase.
    phase_s: dict[str, list[float]] = field(default_factory=dict)
    draft_prefill_s: list[float] = field(default_factory=list)  # by batch
    num_drafted: list[list[int]] = field(default_factory=list)  # for each row, by batch and step
    calibration_s: float | None = None  # over all batches; outside the decode steps

    def begin_batch(self) -> None:
        self.step_s.append([])
        self.num_accepted.append([])
        self.num_drafted.append([])

    def observe(self, output: StepOutput, seconds: float) -> None:
        self.step_s[-1].append(seconds)
        self.num_accepted[-1].append(output.num_accepted or [])
        self.num_drafted[-1].append(output.num_drafted)

    def end_batch(self, requests: Sequence[Request], started_s: float) -> None:
        self.num_tokens.append(sum(len(r.output_ids) - 1 for r in requests))
        for request in requests:
            if len(request.output_ids) > 1 and request.finished_s is not None:
                self.tpot_s.append((request.finished_s - started_s) / (len(request.output_ids) - 1))

    @property
    def seconds(self) -> float:
        return sum(map(sum, self.step_s))

    @property
    def num_steps(self) -> int:
        return sum(map(len, self.step_s))


@dataclass(frozen=True)
class PrefillMetrics:
    """The metrics of prefill. Both passes of a run share one prefill, so they share these."""

    tokens_per_s: float | None
    mean_ttft_ms: float | None


@dataclass(frozen=True)
class AcceptanceMetrics:
    """The acceptance metrics. They are None if nothing was drafted."""

    rate: float | None = None
    length: float | None = None
    per_position: list[float] | None = None


def decode_metrics(samples: PassSamples, bandwidth: float, is_drafting: bool) -> Metrics:
    """The metrics that follow from the samples of one pass. `is_drafting` says whether its strategy
    may draft. `bandwidth` is the read bandwidth of all ranks, in bytes/s. The metrics of prefill,
    the answer score and the speedup are added by the caller."""
    tokens, seconds, prefills = sum(samples.num_tokens), samples.seconds, samples.draft_prefill_s
    num_steps, calibration_s = samples.num_steps, samples.calibration_s
    step_ms = 1e3 * seconds / num_steps if num_steps else None
    phases = {name: times for name, times in samples.phase_s.items() if times}
    timed_ms = 1e3 * sum(map(sum, phases.values()))
    drafted = sum(map(sum, samples.num_drafted))
    accepted = acceptance(samples.num_accepted, samples.num_drafted)
    return Metrics(
        decode_tokens_per_s=tokens / seconds if seconds else None,
        mean_step_ms=step_ms,
        draft_prefill_ms=mean_ms(prefills),
        calibration_ms=None if calibration_s is None else 1e3 * calibration_s,
        draft_ms=mean_ms(phases.get("draft")),
        verify_ms=mean_ms(phases.get("verify")),
        decode_ms=mean_ms(phases.get("decode")),
        other_ms=step_ms - timed_ms / num_steps if step_ms is not None and phases else None,
        mean_draft_tokens=drafted / num_steps if num_steps and is_drafting else None,
        bytes_read=samples.bytes_read,
        roofline_fraction=samples.bytes_read / bandwidth / seconds if seconds else None,
        peak_memory_bytes=samples.peak_memory_bytes or None,
        mean_tpot_ms=mean_ms(samples.tpot_s),
        p50_tpot_ms=percentile_ms(samples.tpot_s, 50),
        p90_tpot_ms=percentile_ms(samples.tpot_s, 90),
        p99_tpot_ms=percentile_ms(samples.tpot_s, 99),
        acceptance_rate=accepted.rate,
        acceptance_length=accepted.length,
        acceptance_per_position=accepted.per_position,
    )


def acceptance(
    num_accepted: list[list[list[int]]], num_drafted: list[list[int]]
) -> AcceptanceMetrics:
    """The acceptance metrics from the accepted counts by batch, step and row, and from the number
    of draft tokens for each row, by batch and step."""
    steps = [
        (drafted, count)
        for batch, drafts in zip(num_accepted, num_drafted, strict=True)
        for step, drafted in zip(batch, drafts, strict=True)
        for count in step
        if drafted
    ]
    if not steps:
        return AcceptanceMetrics()
    survived: list[float] = []
    for k in range(1, max(drafted for drafted, _ in steps) + 1):
        judged = [count for drafted, count in steps if drafted >= k and count >= k - 1]
        share = sum(count >= k for count in judged) / len(judged) if judged else 0.0
        survived.append(share * (survived[-1] if survived else 1.0))
    return AcceptanceMetrics(
        rate=sum(c for _, c in steps) / sum(drafted for drafted, _ in steps),
        length=1 + statistics.fmean(count for _, count in steps),
        per_position=survived,
    )


def prefill_metrics(ttft_s: Sequence[float], num_tokens: int, seconds: float) -> PrefillMetrics:
    """The metrics of all prefills, from the TTFT of each request, the number of prompt tokens and
    the time of all prefills."""
    return PrefillMetrics(num_tokens / seconds if seconds else None, mean_ms(ttft_s))


def percentile(values: Sequence[float], percent: float) -> float | None:
    """A percentile with linear interpolation between the two nearest values, as in numpy. None if
    there are no values."""
    if not values:
        return None
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def speedups(baseline: PassSamples, ours: PassSamples) -> list[float]:
    """The ratio of tokens/s to the baseline's tokens/s for each batch. Both passes decode the same
    prompts."""
    return [
        (n / sum(s)) / (base_n / sum(base_s))
        for n, s, base_n, base_s in zip(
            ours.num_tokens, ours.step_s, baseline.num_tokens, baseline.step_s, strict=True
        )
        if n and base_n
    ]


def mean_ms(seconds: Sequence[float] | None) -> float | None:
    return 1e3 * statistics.fmean(seconds) if seconds else None


def percentile_ms(seconds: Sequence[float], percent: float) -> float | None:
    value = percentile(seconds, percent)
    return None if value is None else 1e3 * value
