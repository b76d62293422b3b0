"""What must hold between the metrics of a run and its samples: products of what was reported, where
`magicdec/records/metrics.py` divides."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import chain, pairwise

from magicdec.names import BASELINE
from magicdec.records.consistency import check_run, must_equal, must_not_exceed, unequal_threads
from magicdec.records.performance import Metrics
from magicdec.records.record import RunRecord
from magicdec.records.samples import PassSamples, PrefillSamples

# The metrics that lie within their intervals. A speedup, which is a median, need not.
INSIDE = (
    *("prefill_tokens_per_s", "decode_tokens_per_s"),
    *("acceptance_rate", "acceptance_length", "mean_emitted_tokens"),
)
Pairs = Iterator[tuple[str, float | None, str, float]]
"""(name, value or None, name of another value, that value)"""


def check_record(record: RunRecord) -> None:
    """As `check_identities`, for a record with metrics, from what it holds itself."""
    assert record.metrics is not None and record.samples is not None
    assert record.prefill_samples is not None
    passes = {name: samples.restored() for name, samples in record.samples.items()}
    metrics = {record.config["decoding"]["strategy"]: record.metrics}
    if record.baseline_metrics is not None:
        metrics[BASELINE] = record.baseline_metrics
    bandwidth = record.environment.read_bandwidth_bytes_per_s
    assert bandwidth is not None
    check_identities(metrics, passes, record.prefill_samples, bandwidth)


def check_identities(
    metrics: dict[str, Metrics],
    passes: dict[str, PassSamples],
    prefill: PrefillSamples,
    bandwidth: float,
) -> None:
    """`bandwidth` is the read bandwidth of all ranks, in bytes/s. Raises AssertionError, naming
    both values, where an identity does not hold. Metrics that are None are not checked."""
    check_run(passes, prefill)
    problem = unequal_threads(passes)
    assert problem is None, problem
    for name, samples in passes.items():
        of_pass = metrics[name]
        equal = [of_prefill(of_pass, prefill), of_times(of_pass, samples, bandwidth)]
        equal.append(of_acceptance(of_pass, samples))
        if name != BASELINE and BASELINE in passes:
            equal.append(of_speedups(of_pass, passes[BASELINE], samples))
        for label, value, other, expected in chain(*equal):
            if value is not None:
                must_equal(f"{name}: {label}", value, other, expected)
        for label, value, other, limit in limits(of_pass, samples):
            if value is not None:
                must_not_exceed(f"{name}: {label}", value, other, limit)


def times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def of_prefill(metrics: Metrics, prefill: PrefillSamples) -> Pairs:
    """The prompt tokens, and the sum of the TTFT of all sequences."""
    tokens = times(metrics.prefill_tokens_per_s, sum(prefill.prefill_ms) / 1e3)
    label = "prefill_tokens_per_s x prefill time"
    yield label, tokens, "the number of prompt tokens", sum(prefill.num_tokens)
    ttft_ms = list(chain.from_iterable(prefill.ttft_ms))
    total = times(metrics.mean_ttft_ms, len(ttft_ms))
    yield "mean_ttft_ms x sequences", total, "the sum of ttft_ms", sum(ttft_ms)


def of_times(metrics: Metrics, samples: PassSamples, bandwidth: float) -> Pairs:
    """Tokens/s, the mean step with its phases, the share of the roofline, and TPOT."""
    num_steps, step_ms = sum(map(len, samples.step_ms)), metrics.mean_step_ms
    if not num_steps or step_ms is None:
        return
    steps_ms, seconds = sum(map(sum, samples.step_ms)), step_ms * num_steps / 1e3
    yield "mean_step_ms x steps", 1e3 * seconds, "the sum of step_ms", steps_ms
    emitted = sum(count for batch in samples.num_emitted for step in batch for count in step)
    tokens = times(metrics.decode_tokens_per_s, seconds)
    yield "decode_tokens_per_s x mean_step_ms x steps", tokens, "emitted tokens", emitted
    if metrics.other_ms is not None:
        phases_ms = (
            (getattr(metrics, key) or 0.0) * len(getattr(samples, key)) / num_steps
            for key in ("draft_ms", "verify_ms", "decode_ms")
        )
        yield "other_ms and all phases", metrics.other_ms + sum(phases_ms), "mean_step_ms", step_ms
    read = times(metrics.roofline_fraction, bandwidth * seconds)
    label = "roofline_fraction x bandwidth x decode time"
    yield label, read, "bytes_read", metrics.bytes_read
    tpot_ms = tpots(samples)
    total = times(metrics.mean_tpot_ms, len(tpot_ms))
    yield "mean_tpot_ms x sequences", total, "the sum", sum(tpot_ms)


def tpots(samples: PassSamples) -> list[float]:
    ends = zip(chain(*samples.sequence_ms), chain(*samples.sequence_tokens), strict=True)
    return [ms / tokens for ms, tokens in ends if tokens]


def drafts(samples: PassSamples) -> list[tuple[int, int]]:
    """(draft tokens, accepted ones) of each row of each step that drafts."""
    return [
        (drafted, count)
        for batch, steps in zip(samples.num_drafted, samples.num_accepted, strict=True)
        for drafted, step in zip(batch, steps, strict=True)
        for count in step
        if drafted
    ]


def acceptance(samples: PassSamples) -> tuple[float, float, list[float]]:
    """The acceptance rate, length and acceptance by position of a pass that drafted."""
    rows = drafts(samples)
    survived: list[float] = []
    for k in range(1, max(drafted for drafted, _ in rows) + 1):
        judged = [count for drafted, count in rows if drafted >= k and count >= k - 1]
        share = sum(count >= k for count in judged) / len(judged) if judged else 0.0
        survived.append(share * (survived[-1] if survived else 1.0))
    accepted = sum(count for _, count in rows)
    return accepted / sum(drafted for drafted, _ in rows), 1 + accepted / len(rows), survived


def of_acceptance(metrics: Metrics, samples: PassSamples) -> Pairs:
    """Accepted tokens of the drafted ones."""
    if metrics.acceptance_rate is None or metrics.acceptance_length is None:
        return
    drafted = [count for count, _ in drafts(samples)]
    accepted = sum(chain.from_iterable(chain.from_iterable(samples.num_accepted)))
    extra = metrics.acceptance_length - 1
    product = metrics.acceptance_rate * sum(drafted)
    yield "acceptance_rate x drafted tokens", product, "accepted tokens", accepted
    label = "(acceptance_length - 1) x verifications"
    yield label, extra * len(drafted), "accepted tokens", accepted
    if len(set(drafted)) == 1:  # else positions are a product over steps that drafted them
        positions = sum(metrics.acceptance_per_position or ())
        yield "acceptance_length - 1", extra, "the sum of positions", positions


def limits(metrics: Metrics, samples: PassSamples) -> Pairs:
    """TPOT lies between that of the fastest and of the slowest sequence, in order. Verifications
    emit no more than they accept. A rate lies within its interval."""
    tpot_ms = tpots(samples)
    if metrics.mean_tpot_ms is not None:
        percentiles = [(f"p{p}_tpot_ms", getattr(metrics, f"p{p}_tpot_ms")) for p in (50, 90, 99)]
        ends = ("the smallest TPOT", min(tpot_ms)), ("the largest TPOT", max(tpot_ms))
        ordered = [ends[0], *percentiles, ends[1]]
        yield from ((*low, *high) for low, high in pairwise(ordered))
    if metrics.acceptance_length is not None:
        emitted = metrics.mean_emitted_tokens
        yield "mean_emitted_tokens", emitted, "acceptance_length", metrics.acceptance_length
    for key in INSIDE:
        value, ends = getattr(metrics, key), getattr(metrics, f"{key}_interval")
        if ends is not None:
            yield f"the lower end of {key}'s interval", ends[0], key, value
            yield key, value, "the upper end of its interval", ends[1]


def of_speedups(metrics: Metrics, baseline: PassSamples, ours: PassSamples) -> Pairs:
    """In each batch, the baseline's time for a token is the speedup times that of the strategy. The
    batches that emitted nothing after the first tokens have none."""
    batches = [i for i, n in enumerate(ours.num_tokens) if n and baseline.num_tokens[i]]
    for key in ("speedup", "net_speedup"):
        values = getattr(metrics, f"{key}_per_batch")
        if values is None:
            continue
        yield f"{key}, batches", len(values), "batches with steps", len(batches)
        for value, batch in zip(values, batches, strict=True):
            mine, base = (ms_per_token(s, batch, key != "speedup") for s in (ours, baseline))
            label = f"batch {batch}: {key} x ms for each token"
            yield label, value * mine, "the baseline's ms for each token", base
        yield key, getattr(metrics, key), "the median", statistics.median(values)


def ms_per_token(samples: PassSamples, batch: int, is_net: bool) -> float:
    """Time for each token of a batch: of the steps, or of all from the end of prefill."""
    total = sum(samples.step_ms[batch])
    if is_net:
        total = samples.begin_ms[batch] + max(samples.sequence_ms[batch])
        total += 0.0 if samples.calibration_ms is None else samples.calibration_ms[batch]
    return total / sum(samples.sequence_tokens[batch])
