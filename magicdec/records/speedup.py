"""The two speedups of a pass over the baseline of the same run, batch by batch. Both passes decode
the same prompts from the same prefill. Imports no torch.

The speedup of decode steps leaves out everything outside the steps. The net speedup counts all the
time from the end of prefill to the last token: what a method does before its first step (the choice
of a KV policy, a standalone draft's own prefill, calibration, the capture of CUDA graphs) and the
time between steps. It leaves out the warm-up, which a server pays once and not for each batch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from magicdec.records.samples import PassSamples


def speedups(baseline: PassSamples, ours: PassSamples) -> list[float]:
    """The ratio of the tokens/s of decode steps to the baseline's, for each batch."""
    return _ratios(
        baseline, [sum(s) for s in baseline.step_ms], ours, [sum(s) for s in ours.step_ms]
    )


def net_speedups(baseline: PassSamples, ours: PassSamples) -> list[float]:
    """The same ratio, of the tokens/s from the end of prefill to the last token."""
    return _ratios(baseline, net_ms(baseline), ours, net_ms(ours))


def net_ms(samples: PassSamples) -> list[float]:
    """The time from the end of prefill to the last token, by batch."""
    ends = [max(ends, default=0.0) for ends in samples.sequence_ms]
    return [added + end for added, end in zip(added_ms(samples), ends, strict=True)]


def added_ms(samples: PassSamples) -> list[float]:
    """The time between prefill and the first decode step, by batch."""
    calibration = samples.calibration_ms or [0.0] * len(samples.begin_ms)
    return [begin + ms for begin, ms in zip(samples.begin_ms, calibration, strict=True)]


def break_even_gen_len(baseline: PassSamples, ours: PassSamples) -> int | None:
    """The smallest output length, in tokens of each sequence, for which the net speedup is above 1,
    if each further token takes as long as it took on average. The median over the batches, and the
    larger of the two middle ones for an even number; None if the net speedup is never above 1."""
    each = [
        _break_even(added, base_added, (ms - added) / n, (base_ms - base_added) / base_n)
        for added, base_added, ms, base_ms, n, base_n in zip(
            added_ms(ours), added_ms(baseline), net_ms(ours), net_ms(baseline),
            _mean_tokens(ours), _mean_tokens(baseline), strict=True,
        )
        if n and base_n
    ]  # fmt: skip
    middle = statistics.median_high(each) if each else math.inf
    return None if math.isinf(middle) else int(middle)


def _break_even(added: float, base_added: float, each: float, base_each: float) -> float:
    """The smallest number of tokens, the first of which prefill emits, for which `added` and
    `each` for every later token are less than the baseline's."""
    if each >= base_each:
        return math.inf
    return max(0, math.floor((added - base_added) / (base_each - each))) + 2


def _mean_tokens(samples: PassSamples) -> list[float]:
    """Tokens after the first one of a sequence, by batch."""
    return [statistics.fmean(tokens) if tokens else 0.0 for tokens in samples.sequence_tokens]


def _ratios(
    baseline: PassSamples, base_ms: Sequence[float], ours: PassSamples, ms: Sequence[float]
) -> list[float]:
    return [
        (n / time) / (base_n / base_time)
        for n, time, base_n, base_time in zip(
            ours.num_tokens, ms, baseline.num_tokens, base_ms, strict=True
        )
        if n and base_n
    ]
