"""The metrics of a record, computed from its samples alone. A metric that does not apply is None,
never 0.

TTFT begins when the batch is submitted. TPOT of a sequence is its decode time / the number of
tokens after its first. The speedup of decode steps leaves out all time outside the steps, and a
stalled step (`stalls.py`) counts as the median of its kind; the total speedup counts stalls in
full. The net speedup counts all time from the end of prefill to the last token, a draft's prefill,
calibration and capture too, but no warm-up.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from magicdec.names import BASELINE
from magicdec.records.acceptance import acceptance_of
from magicdec.records.intervals import ratio_interval, speed_interval
from magicdec.records.performance import Metrics, without_chance
from magicdec.records.samples import PassSamples, PrefillSamples, SamplesRecord
from magicdec.records.stalls import PassSteps


def run_metrics(
    passes: dict[str, PassSamples],
    prefill: PrefillSamples,
    bandwidth: float,
    is_random: bool,
    categories: Sequence[str | None] | None = None,
) -> dict[str, Metrics]:
    """The metrics of each pass by its name. `bandwidth` is the read bandwidth of all ranks in
    bytes/s; `is_random`: target or draft has random weights; `categories` are those of the
    prompts."""
    by_pass = {}
    for name, samples in passes.items():
        metrics = decode_metrics(samples, bandwidth, name != BASELINE, categories)
        metrics = add_prefill(metrics, prefill)
        if name != BASELINE and BASELINE in passes:
            metrics = add_speedup(metrics, passes[BASELINE], samples)
        by_pass[name] = without_chance(metrics) if is_random and name != BASELINE else metrics
    return by_pass


def decode_metrics(
    samples: PassSamples,
    bandwidth: float,
    is_drafting: bool,
    categories: Sequence[str | None] | None = None,
) -> Metrics:
    """The metrics that follow from one pass alone. `bandwidth` and `categories` as in
    `run_metrics`."""
    steps = list(chain.from_iterable(samples.step_ms))
    num_steps = len(steps)
    step_ms = mean(steps)
    decode_s = sum(steps) / 1e3
    phases_ms = sum(map(sum, (samples.draft_ms, samples.verify_ms, samples.decode_ms)))
    drafted = sum(map(sum, samples.padded_gamma))
    read = sum(map(sum, samples.bytes_read))
    draft_rows = sum(samples.draft_rows)
    tpot_ms = tpots(samples)
    return Metrics(
        decode_tokens_per_s=sum(samples.num_tokens) / decode_s if decode_s else None,
        decode_tokens_per_s_interval=speed_interval(
            samples.num_tokens, list(map(sum, samples.step_ms))
        ),
        mean_step_ms=step_ms,
        **step_metrics(samples),
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
        **acceptance_of(samples, categories),
    )


def step_metrics(samples: PassSamples) -> dict[str, Any]:
    steps = PassSteps.of(samples)
    found = stall_metrics(steps)
    return {"num_steps": steps.num_steps, **found} if found else {}


def stall_metrics(steps: PassSteps) -> dict[str, Any]:
    """The median of the steps, and their stalls; empty without a step."""
    if not steps.num_steps:
        return {}
    stalls = steps.stalls
    worst = max(stalls, key=lambda stall: stall.lost_ms, default=None)
    return {
        "median_step_ms": statistics.median(chain.from_iterable(steps.step_ms)),
        "stalled_steps": len(stalls),
        "stalled_ms": math.fsum(stall.lost_ms for stall in stalls),
        "longest_stall_ms": None if worst is None else worst.ms,
        "longest_stall_median_ms": None if worst is None else worst.median_ms,
    }


def add_prefill(metrics: Metrics, prefill: PrefillSamples) -> Metrics:
    seconds = sum(prefill.prefill_ms) / 1e3
    return replace(
        metrics,
        prefill_tokens_per_s=sum(prefill.num_tokens) / seconds if seconds else None,
        prefill_tokens_per_s_interval=speed_interval(prefill.num_tokens, prefill.prefill_ms),
        mean_ttft_ms=mean(list(chain.from_iterable(prefill.ttft_ms))),
    )


def add_speedup(metrics: Metrics, baseline: PassSamples, ours: PassSamples) -> Metrics:
    of_steps = speedups(baseline, ours)
    net = net_speedups(baseline, ours)
    total = total_speedups(baseline, ours)
    if not of_steps:
        return metrics
    return replace(
        metrics,
        speedup=statistics.median(of_steps),
        speedup_per_batch=of_steps,
        speedup_interval=ratio_interval(of_steps),
        total_speedup=statistics.median(total),
        total_speedup_per_batch=total,
        net_speedup=statistics.median(net),
        net_speedup_per_batch=net,
        net_speedup_interval=ratio_interval(net),
        break_even_gen_len=break_even_gen_len(baseline, ours),
    )


def speedups(baseline: PassSamples, ours: PassSamples) -> list[float]:
    """The tokens/s of decode steps relative to the baseline's, by batch. A stalled step counts as
    the median of its kind."""
    return _ratios(baseline, ours, lambda samples: PassSteps.of(samples).steady_ms)


def total_speedups(baseline: PassSamples, ours: PassSamples) -> list[float]:
    """As `speedups`, with stalls in full."""
    return _ratios(baseline, ours, lambda samples: map(sum, samples.step_ms))


def net_speedups(baseline: PassSamples, ours: PassSamples) -> list[float]:
    """As `speedups`, from the end of prefill to the last token."""
    return _ratios(baseline, ours, net_ms)


def _ratios(
    baseline: PassSamples, ours: PassSamples, times: Callable[[PassSamples], Iterable[float]]
) -> list[float]:
    """Ratios of tokens per time, of batches in which both passes emitted tokens after the first."""
    batches = zip(ours.num_tokens, times(ours), baseline.num_tokens, times(baseline), strict=True)
    return [(n / ms) / (base_n / base_ms) for n, ms, base_n, base_ms in batches if n and base_n]


def net_ms(samples: PassSamples) -> list[float]:
    ends = [max(ends, default=0.0) for ends in samples.sequence_ms]
    return [added + end for added, end in zip(added_ms(samples), ends, strict=True)]


def added_ms(samples: PassSamples) -> list[float]:
    calibration = samples.calibration_ms or [0.0] * len(samples.begin_ms)
    return [begin + ms for begin, ms in zip(samples.begin_ms, calibration, strict=True)]


def break_even_gen_len(baseline: PassSamples, ours: PassSamples) -> int | None:
    """The smallest output length, in tokens a sequence, with a net speedup above 1, if later tokens
    take the average time: the upper median over batches, or None."""
    each = [
        _break_even(added, base_added, (ms - added) / n, (base_ms - base_added) / base_n)
        for added, base_added, ms, base_ms, n, base_n in zip(
            added_ms(ours),
            added_ms(baseline),
            net_ms(ours),
            net_ms(baseline),
            map(mean, ours.sequence_tokens),
            map(mean, baseline.sequence_tokens),
            strict=True,
        )
        if n and base_n
    ]
    middle = statistics.median_high(each) if each else math.inf
    return None if math.isinf(middle) else int(middle)


def _break_even(added: float, base_added: float, each: float, base_each: float) -> float:
    """The smallest number of tokens, the first of which prefill emits, that take less time than the
    baseline's."""
    if each >= base_each:
        return math.inf
    return max(0, math.floor((added - base_added) / (base_each - each))) + 2


def calibration_ms(samples: PassSamples) -> float | None:
    if samples.calibration_ms is None:
        return None
    return sum(samples.calibration_ms) + (samples.warmup_calibration_ms or 0.0)


def tpots(samples: SamplesRecord) -> list[float]:
    """TPOT in ms of the sequences that decoded a token after their first."""
    times = zip(chain(*samples.sequence_ms), chain(*samples.sequence_tokens), strict=True)
    return [ms / tokens for ms, tokens in times if tokens]


def percentile(values: Sequence[float], percent: float) -> float | None:
    if not values:
        return None
    import numpy as np

    return float(np.percentile(values, percent))


def mean(values: Sequence[float] | None) -> float | None:
    return statistics.fmean(values) if values else None
