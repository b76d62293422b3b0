"""From raw times and counts to the flat metrics of a record. A metric that does not apply is None,
never 0.

Definitions: acceptance rate = accepted / drafted; acceptance length = tokens a verification yields,
bonus included; acceptance per position k = share of verifications that accepted at least k drafts
(as vLLM counts it). TTFT runs from submission of the batch; TPOT of a request is its decode time
over the tokens after its first.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from magicdec.request import Request, StepOutput


@dataclass
class PassSamples:
    """What one strategy did over all measured batches."""

    step_s: list[list[float]] = field(default_factory=list)  # a list a batch
    num_accepted: list[list[list[int]]] = field(default_factory=list)  # batch, step, row
    num_tokens: list[int] = field(default_factory=list)  # decoded after the first, a number a batch
    tpot_s: list[float] = field(default_factory=list)  # one a request
    draft_prefill_s: list[float] = field(default_factory=list)  # a number a batch
    bytes_read: int = 0  # over all ranks
    peak_memory_bytes: int = 0  # over all ranks
    phase_ms: dict[str, float | None] = field(default_factory=dict)

    def begin_batch(self) -> None:
        self.step_s.append([])
        self.num_accepted.append([])

    def observe(self, output: StepOutput, seconds: float) -> None:
        self.step_s[-1].append(seconds)
        if output.num_accepted is not None:
            self.num_accepted[-1].append(output.num_accepted)

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


def decode_metrics(
    samples: PassSamples, bandwidth: float, num_draft_tokens: int | None
) -> dict[str, Any]:
    """Metrics of one pass; `num_draft_tokens` is None where nothing was drafted."""
    tokens, seconds, prefills = sum(samples.num_tokens), samples.seconds, samples.draft_prefill_s
    draft, verify = samples.phase_ms.get("draft"), samples.phase_ms.get("verify")
    step_ms = 1e3 * seconds / samples.num_steps if samples.num_steps else None
    timed = [ms for ms in (samples.phase_ms.get("decode"), draft, verify) if ms is not None]
    return {
        "decode_tokens_per_s": tokens / seconds if seconds else None,
        "mean_step_ms": step_ms,
        "draft_prefill_ms": 1e3 * statistics.fmean(prefills) if prefills else None,
        "draft_ms": draft,
        "verify_ms": verify,
        "decode_ms": samples.phase_ms.get("decode"),
        "other_ms": step_ms - sum(timed) if step_ms is not None and timed else None,
        "bytes_read": samples.bytes_read,
        "roofline_fraction": samples.bytes_read / bandwidth / seconds if seconds else None,
        "peak_memory_bytes": samples.peak_memory_bytes or None,
        "answer_score": None,  # needs the answers: whoever has them fills it in
        "speedup": None,  # needs another pass: likewise
        "speedup_per_batch": None,
        **_tpot(samples.tpot_s),
        **acceptance(samples.num_accepted, num_draft_tokens),
    }


def acceptance(num_accepted: list[list[list[int]]], num_draft_tokens: int | None) -> dict[str, Any]:
    counts = [count for batch in num_accepted for step in batch for count in step]
    if not counts or num_draft_tokens is None:
        return {"acceptance_rate": None, "acceptance_length": None, "acceptance_per_position": None}
    survived = [sum(c >= k for c in counts) / len(counts) for k in range(1, num_draft_tokens + 1)]
    return {
        "acceptance_rate": sum(counts) / (len(counts) * num_draft_tokens),
        "acceptance_length": 1 + statistics.fmean(counts),
        "acceptance_per_position": survived,
    }


def prefill_metrics(ttft_s: Sequence[float], num_tokens: int, seconds: float) -> dict[str, Any]:
    """Both passes of a run share one prefill, so they share these."""
    return {
        "prefill_tokens_per_s": num_tokens / seconds if seconds else None,
        "mean_ttft_ms": 1e3 * statistics.fmean(ttft_s) if ttft_s else None,
    }


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear interpolation between the two nearest ranks, as numpy does it."""
    if not values:
        return None
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def speedups(baseline: PassSamples, ours: PassSamples) -> list[float]:
    """Tokens a second against the baseline's, batch by batch (the same prompts within one run)."""
    return [
        (n / sum(s)) / (base_n / sum(base_s))
        for n, s, base_n, base_s in zip(
            ours.num_tokens, ours.step_s, baseline.num_tokens, baseline.step_s, strict=True
        )
        if n and base_n
    ]


def _tpot(values: Sequence[float]) -> dict[str, float | None]:
    def ms(value: float | None) -> float | None:
        return None if value is None else 1e3 * value

    mean = statistics.fmean(values) if values else None
    named = {f"p{p}_tpot_ms": ms(percentile(values, p)) for p in (50, 90, 99)}
    return {"mean_tpot_ms": ms(mean), **named}
