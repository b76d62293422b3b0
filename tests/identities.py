"""What must hold between the metrics of a run and its samples: products of what was reported, where
`magicdec/records/metrics.py` divides."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from magicdec.names import BASELINE
from magicdec.records.consistency import check_run, must_equal, must_not_exceed, unequal_threads
from magicdec.records.performance import Metrics
from magicdec.records.record import RunRecord
from magicdec.records.samples import PassSamples, PrefillSamples

# The metrics that lie within their intervals.
INSIDE = (
    *("prefill_tokens_per_s", "decode_tokens_per_s"),
    *("acceptance_rate", "acceptance_length", "mean_emitted_tokens"),
)


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
        check_prefill_metrics(name, metrics[name], prefill)
        check_rates(name, metrics[name], samples, bandwidth)
        check_tpot(name, metrics[name], samples)
        check_acceptance(name, metrics[name], samples)
        check_intervals(name, metrics[name])
        if name != BASELINE and BASELINE in passes:
            check_speedups(name, metrics[name], passes[BASELINE], samples)


def acceptance(samples: PassSamples) -> tuple[float, float, list[float]]:
    """The acceptance rate, length and acceptance by position of a pass that drafted."""
    steps = [
        (drafted, count)
        for batch, drafts in zip(samples.num_accepted, samples.num_drafted, strict=True)
        for step, drafted in zip(batch, drafts, strict=True)
        for count in step
        if drafted
    ]
    survived: list[float] = []
    for k in range(1, max(drafted for drafted, _ in steps) + 1):
        judged = [count for drafted, count in steps if drafted >= k and count >= k - 1]
        share = sum(count >= k for count in judged) / len(judged) if judged else 0.0
        survived.append(share * (survived[-1] if survived else 1.0))
    accepted = sum(count for _, count in steps)
    return accepted / sum(drafted for drafted, _ in steps), 1 + accepted / len(steps), survived


def check_prefill_metrics(name: str, metrics: Metrics, prefill: PrefillSamples) -> None:
    """The prompt tokens, and the sum of the TTFT of all sequences."""
    ttft_ms = list(chain.from_iterable(prefill.ttft_ms))
    if metrics.prefill_tokens_per_s is not None:
        tokens = metrics.prefill_tokens_per_s * sum(prefill.prefill_ms) / 1e3
        label = f"{name}: prefill_tokens_per_s x prefill time"
        must_equal(label, tokens, "the number of prompt tokens", sum(prefill.num_tokens))
    if metrics.mean_ttft_ms is not None:
        label, total = f"{name}: mean_ttft_ms x sequences", metrics.mean_ttft_ms * len(ttft_ms)
        must_equal(label, total, "the sum of ttft_ms", sum(ttft_ms))


def check_rates(name: str, metrics: Metrics, samples: PassSamples, bandwidth: float) -> None:
    """Tokens/s, the mean step with its phases, and the share of the roofline."""
    num_steps, step_ms = sum(map(len, samples.step_ms)), metrics.mean_step_ms
    if not num_steps or step_ms is None:
        return
    seconds = step_ms * num_steps / 1e3
    must_equal(
        f"{name}: mean_step_ms x steps", 1e3 * seconds,
        "the sum of step_ms", sum(map(sum, samples.step_ms)),
    )  # fmt: skip
    if metrics.decode_tokens_per_s is not None:
        emitted = sum(count for batch in samples.num_emitted for step in batch for count in step)
        label = f"{name}: decode_tokens_per_s x mean_step_ms x steps"
        must_equal(label, metrics.decode_tokens_per_s * seconds, "emitted tokens", emitted)
    if metrics.other_ms is not None:
        phases_ms = [(metrics.draft_ms, len(samples.draft_ms))]
        phases_ms += [(metrics.verify_ms, len(samples.verify_ms))]
        phases_ms += [(metrics.decode_ms, len(samples.decode_ms))]
        total = metrics.other_ms + sum((ms or 0.0) * count / num_steps for ms, count in phases_ms)
        must_equal(f"{name}: other_ms and all phases", total, "mean_step_ms", step_ms)
    if metrics.roofline_fraction is not None:
        read = metrics.roofline_fraction * bandwidth * seconds
        label = f"{name}: roofline_fraction x bandwidth x decode time"
        must_equal(label, read, "bytes_read", metrics.bytes_read)


def check_tpot(name: str, metrics: Metrics, samples: PassSamples) -> None:
    """TPOT lies between that of the fastest and of the slowest sequence, in order."""
    of_each = zip(
        chain.from_iterable(samples.sequence_ms),
        chain.from_iterable(samples.sequence_tokens),
        strict=True,
    )
    tpot_ms = [ms / tokens for ms, tokens in of_each if tokens]
    mean_ms = metrics.mean_tpot_ms
    if mean_ms is None:
        return
    total = sum(tpot_ms)
    must_equal(f"{name}: mean_tpot_ms x sequences", mean_ms * len(tpot_ms), "the sum", total)
    low = ("the smallest TPOT", min(tpot_ms))
    percentiles = [(f"p{p}_tpot_ms", getattr(metrics, f"p{p}_tpot_ms")) for p in (50, 90, 99)]
    for high in [*percentiles, ("the largest TPOT", max(tpot_ms))]:
        must_not_exceed(f"{name}: {low[0]}", low[1], *high)
        low = high


def check_acceptance(name: str, metrics: Metrics, samples: PassSamples) -> None:
    """Accepted tokens of the drafted ones, and what verifications emit."""
    if metrics.acceptance_rate is None or metrics.acceptance_length is None:
        return
    drafted = [
        count
        for batch, steps in zip(samples.num_drafted, samples.num_emitted, strict=True)
        for count, emitted in zip(batch, steps, strict=True)
        for _ in emitted
        if count
    ]
    accepted = sum(chain.from_iterable(chain.from_iterable(samples.num_accepted)))
    label = f"{name}: acceptance_rate x drafted tokens"
    must_equal(label, metrics.acceptance_rate * sum(drafted), "accepted tokens", accepted)
    label, extra = f"{name}: (acceptance_length - 1) x verifications", metrics.acceptance_length - 1
    must_equal(label, extra * len(drafted), "accepted tokens", accepted)
    if len(set(drafted)) == 1:  # else positions are a product over steps that drafted them
        positions = sum(metrics.acceptance_per_position or ())
        must_equal(f"{name}: acceptance_length - 1", extra, "the sum of positions", positions)
    if metrics.mean_emitted_tokens is not None:
        label = f"{name}: mean_emitted_tokens"
        must_not_exceed(label, metrics.mean_emitted_tokens, "acceptance_length", 1 + extra)


def check_intervals(name: str, metrics: Metrics) -> None:
    """A rate lies within its interval. A speedup, which is a median, need not."""
    for key in INSIDE:
        value, ends = getattr(metrics, key), getattr(metrics, f"{key}_interval")
        if ends is not None:
            must_not_exceed(f"{name}: the lower end of {key}'s interval", ends[0], key, value)
            must_not_exceed(f"{name}: {key}", value, "the upper end of its interval", ends[1])


def check_speedups(name: str, metrics: Metrics, baseline: PassSamples, ours: PassSamples) -> None:
    """In each batch, the baseline's time for a token is the speedup times that of the strategy. The
    batches that emitted nothing after the first tokens have none."""
    batches = [i for i, n in enumerate(ours.num_tokens) if n and baseline.num_tokens[i]]
    for key in ("speedup", "net_speedup"):
        values = getattr(metrics, f"{key}_per_batch")
        if values is None:
            continue
        must_equal(f"{name}: {key}, batches", len(values), "batches with steps", len(batches))
        for value, batch in zip(values, batches, strict=True):
            mine, base = (_ms_per_token(s, batch, key != "speedup") for s in (ours, baseline))
            label = f"{name}, batch {batch}: {key} x ms for each token"
            must_equal(label, value * mine, "the baseline's ms for each token", base)
        must_equal(f"{name}: {key}", getattr(metrics, key), "the median", _median(values))


def _ms_per_token(samples: PassSamples, batch: int, is_net: bool) -> float:
    """Time for each token of a batch: of the steps, or of all from the end of prefill."""
    total = sum(samples.step_ms[batch])
    if is_net:
        total = samples.begin_ms[batch] + max(samples.sequence_ms[batch])
        total += 0.0 if samples.calibration_ms is None else samples.calibration_ms[batch]
    return total / sum(samples.sequence_tokens[batch])


def _median(values: Sequence[float]) -> float:
    ordered, middle = sorted(values), len(values) // 2
    return (ordered[middle] + ordered[-middle - 1]) / 2
