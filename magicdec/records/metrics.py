"""Computes the metrics of a record from its samples and nothing else, so that they can be computed
again from the record. A metric that does not apply is None, never 0.

Definitions: The acceptance rate is accepted tokens / draft tokens. The acceptance length is 1 +
accepted tokens / verifications, as in vLLM; drafts that were accepted past a row's end count. The
acceptance of position k is the share of verifications that accepted at least k drafts, as in vLLM.
If steps draft different numbers of tokens, it is a product over the positions up to k: the share of
the steps that accepted this position among those that drafted it and accepted all before it. TTFT
begins when the batch is submitted. TPOT of a sequence is its decode time / the number of tokens
after its first.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

from magicdec.names import BASELINE
from magicdec.records.identities.of_samples import check_prefill, check_samples
from magicdec.records.performance import Metrics, without_chance
from magicdec.records.record import RunRecord
from magicdec.records.samples import PassSamples, PrefillSamples
from magicdec.records.speedup import break_even_gen_len, net_speedups, speedups
from magicdec.records.statistics.uncertainty import uncertainty_of


@dataclass(frozen=True)
class AcceptanceMetrics:
    """The acceptance metrics. They are None if nothing was drafted."""

    rate: float | None = None
    length: float | None = None
    per_position: list[float] | None = None


def run_metrics(
    passes: dict[str, PassSamples], prefill: PrefillSamples, bandwidth: float, is_random: bool
) -> dict[str, Metrics]:
    """The metrics of each pass of a run, by its name. `bandwidth` is the read bandwidth of all
    ranks, in bytes/s. `is_random`: the weights of the target or of the draft are random."""
    found = {}
    for name, samples in passes.items():
        metrics = decode_metrics(samples, bandwidth, is_drafting=name != BASELINE)
        metrics = add_prefill(metrics, prefill)
        baseline = passes.get(BASELINE) if name != BASELINE else None
        if baseline is not None:
            metrics = add_speedup(metrics, baseline, samples)
        metrics = replace(metrics, **uncertainty_of(samples, prefill, baseline))
        found[name] = without_chance(metrics) if is_random and name != BASELINE else metrics
    return found


def decode_metrics(samples: PassSamples, bandwidth: float, is_drafting: bool) -> Metrics:
    """The metrics that follow from the samples of one pass alone. `is_drafting` says whether its
    strategy may draft. `bandwidth` is the read bandwidth of all ranks, in bytes/s."""
    steps = list(chain.from_iterable(samples.step_ms))
    num_steps, step_ms = len(steps), mean(steps)
    decode_s = sum(steps) / 1e3
    phases_ms = sum(map(sum, (samples.draft_ms, samples.verify_ms, samples.decode_ms)))
    drafted = sum(map(sum, samples.num_drafted))
    read, draft_rows = sum(map(sum, samples.bytes_read)), sum(samples.draft_rows)
    tpot_ms = tpots(samples)
    accepted = acceptance(samples.num_accepted, samples.num_drafted)
    return Metrics(
        decode_tokens_per_s=sum(samples.num_tokens) / decode_s if decode_s else None,
        mean_step_ms=step_ms,
        begin_ms=mean(samples.begin_ms),
        draft_prefill_ms=mean(samples.draft_prefill_ms),
        calibration_ms=calibration_ms(samples),
        warmup_calibration_ms=samples.warmup_calibration_ms,
        draft_ms=mean(samples.draft_ms),
        verify_ms=mean(samples.verify_ms),
        decode_ms=mean(samples.decode_ms),
        other_ms=step_ms - phases_ms / num_steps if step_ms is not None and phases_ms else None,
        mean_draft_tokens=drafted / num_steps if num_steps and is_drafting else None,
        bytes_read=read,
        kv_tokens_read=sum(samples.draft_kv_tokens) / draft_rows if draft_rows else None,
        roofline_fraction=read / bandwidth / decode_s if decode_s else None,
        peak_memory_bytes=max(map(sum, samples.peak_memory_bytes), default=0) or None,
        answer_score=mean(samples.answer_scores),
        mean_tpot_ms=mean(tpot_ms),
        p50_tpot_ms=percentile(tpot_ms, 50),
        p90_tpot_ms=percentile(tpot_ms, 90),
        p99_tpot_ms=percentile(tpot_ms, 99),
        acceptance_rate=accepted.rate,
        acceptance_length=accepted.length,
        mean_emitted_tokens=mean(verified_tokens(samples)),
        acceptance_per_position=accepted.per_position,
    )


def add_prefill(metrics: Metrics, prefill: PrefillSamples) -> Metrics:
    seconds = sum(prefill.prefill_ms) / 1e3
    return replace(
        metrics,
        prefill_tokens_per_s=sum(prefill.num_tokens) / seconds if seconds else None,
        mean_ttft_ms=mean(list(chain.from_iterable(prefill.ttft_ms))),
    )


def add_speedup(metrics: Metrics, baseline: PassSamples, ours: PassSamples) -> Metrics:
    of_steps, net = speedups(baseline, ours), net_speedups(baseline, ours)
    if not of_steps:
        return metrics
    return replace(
        metrics,
        speedup=statistics.median(of_steps),
        speedup_per_batch=of_steps,
        net_speedup=statistics.median(net),
        net_speedup_per_batch=net,
        break_even_gen_len=break_even_gen_len(baseline, ours),
    )


def check_metrics(record: RunRecord) -> list[str]:
    """Compute the metrics of a record again from its samples. Returns the names of those that
    differ. Raises ValueError if its samples are not complete or contradict each other."""
    if record.metrics is None:
        return []
    prefill, bandwidth = record.prefill_samples, record.environment.read_bandwidth_bytes_per_s
    if record.samples is None or prefill is None or bandwidth is None:
        raise ValueError("it has no samples")
    passes = {name: samples.restored() for name, samples in record.samples.items()}
    is_random = record.workload is not None and record.workload.is_random
    if not is_random:  # otherwise some counts were withheld
        check_consistency(passes, prefill)
    found = run_metrics(passes, prefill, bandwidth, is_random)
    strategy = record.config["decoding"]["strategy"]
    baseline = found.get(BASELINE) if strategy != BASELINE else None
    names = [
        f"samples.{name}.num_tokens"
        for name, samples in record.samples.items()
        if samples.num_tokens != passes[name].num_tokens
    ]
    names += differences("metrics", record.metrics, found.get(strategy))
    return names + differences("baseline_metrics", record.baseline_metrics, baseline)


def check_consistency(passes: dict[str, PassSamples], prefill: PrefillSamples) -> None:
    """Raises ValueError, naming the values, if samples of a record contradict each other."""
    try:
        check_prefill(prefill)
        for name, samples in passes.items():
            check_samples(name, samples)
    except AssertionError as error:
        raise ValueError(f"its samples contradict each other: {error}") from None


def differences(name: str, one: Metrics | None, other: Metrics | None) -> list[str]:
    """The names of the metrics in which `one` differs from `other` by more than rounding."""
    if one is None or other is None:
        return [] if one is other else [name]
    values, others = asdict(one), asdict(other)
    return [f"{name}.{key}" for key in values if not is_close(values[key], others[key])]


def is_close(one: Any, other: Any) -> bool:
    """Whether two numbers, lists of numbers or Nones are equal, except for the rounding of sums."""
    if not isinstance(one, float | list) or other is None:
        return bool(one == other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(is_close, one, other))
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)


def calibration_ms(samples: PassSamples) -> float | None:
    """The time of calibration in the batches and in the warm-up."""
    if samples.calibration_ms is None:
        return None
    return sum(samples.calibration_ms) + (samples.warmup_calibration_ms or 0.0)


def tpots(samples: PassSamples) -> list[float]:
    """TPOT of each sequence that decoded a token after its first, in ms."""
    return [
        ms / tokens
        for batch_ms, batch in zip(samples.sequence_ms, samples.sequence_tokens, strict=True)
        for ms, tokens in zip(batch_ms, batch, strict=True)
        if tokens
    ]


def verified_tokens(samples: PassSamples) -> list[int]:
    """The number of tokens that each verification appended to the output of its row."""
    return [
        count
        for batch, drafts in zip(samples.num_emitted, samples.num_drafted, strict=True)
        for step, drafted in zip(batch, drafts, strict=True)
        for count in step
        if drafted
    ]


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


def mean(values: Sequence[float] | None) -> float | None:
    """None if there are no values."""
    return statistics.fmean(values) if values else None
