"""Uncertainty: the fields of a record's metrics that say what their numbers are worth, and the
computation of these fields from the samples. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from magicdec.records.fields import Part, recorded
from magicdec.records.samples import PassSamples, PrefillSamples
from magicdec.records.speedup import net_speedups, speedups
from magicdec.records.statistics.by_prompt import Array, PromptCounts, count_by_prompt
from magicdec.records.statistics.intervals import (
    FEWEST_BATCHES,
    FEWEST_PROMPTS,
    interval,
    ratio_interval,
    without_each,
)

SUFFIX = "_interval"
FEW_PROMPTS = (
    f"with fewer than {FEWEST_PROMPTS} prompts; if the number is the largest or smallest possible, "
    "or the same for every prompt; if nothing was drafted; with random weights"
)
FEW_BATCHES = f"with fewer than {FEWEST_BATCHES} batches; if the number itself is null"


def _interval(of: str, unit: str, null: str = FEW_PROMPTS, by_chance: bool = True) -> Any:
    return recorded(
        f"lower and upper end of the 95 % interval of `{of}`", unit, null=null,
        by_chance=by_chance,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Uncertainty(Part):
    """The intervals of a pass's rates, and the counts behind its acceptance per position. The
    intervals of acceptance are over prompts, those of speeds over batches."""

    prefill_tokens_per_s_interval: list[float] | None = _interval(
        "prefill_tokens_per_s", "tokens/s", FEW_BATCHES, by_chance=False
    )
    decode_tokens_per_s_interval: list[float] | None = _interval(
        "decode_tokens_per_s", "tokens/s", FEW_BATCHES
    )
    speedup_interval: list[float] | None = _interval("speedup", "ratio", FEW_BATCHES)
    net_speedup_interval: list[float] | None = _interval("net_speedup", "ratio", FEW_BATCHES)
    acceptance_rate_interval: list[float] | None = _interval("acceptance_rate", "0 to 1")
    acceptance_length_interval: list[float] | None = _interval("acceptance_length", "tokens")
    mean_emitted_tokens_interval: list[float] | None = _interval("mean_emitted_tokens", "tokens")
    acceptance_per_position_interval: list[list[float]] | None = recorded(
        "lower and upper end of the 95 % interval of each of `acceptance_per_position`; an empty "
        "list where there is none",
        "0 to 1",
        null=FEW_PROMPTS,
        by_chance=True,
    )
    judged_per_position: list[int] | None = recorded(
        "number of verifications that judged the position: they drafted it and accepted all drafts "
        "before it",
        "verifications",
        null="if nothing was drafted; with random weights",
        by_chance=True,
    )


def uncertainty_of(
    samples: PassSamples, prefill: PrefillSamples, baseline: PassSamples | None
) -> dict[str, Any]:
    """The fields of `Uncertainty` by name. `baseline` holds the samples of the baseline's pass of
    the same run; None in the baseline itself, and without one."""
    decode_ms = [sum(steps) for steps in samples.step_ms]
    found: dict[str, Any] = {
        "prefill_tokens_per_s_interval": _speed_interval(prefill.num_tokens, prefill.prefill_ms),
        "decode_tokens_per_s_interval": _speed_interval(samples.num_tokens, decode_ms),
    }
    if baseline is not None:
        found["speedup_interval"] = ratio_interval(speedups(baseline, samples))
        found["net_speedup_interval"] = ratio_interval(net_speedups(baseline, samples))
    is_drafting = any(map(any, samples.num_drafted))
    return found | (acceptance_uncertainty(count_by_prompt(samples)) if is_drafting else {})


def acceptance_uncertainty(counts: PromptCounts) -> dict[str, Any]:
    """The fields that concern acceptance. Prompts without a verification say nothing about it, and
    are left out."""
    counts = counts.of_prompts(counts.verifications > 0)
    estimates, longest = estimates_of(counts), 1 + counts.judged.shape[1]
    positions = [interval(values, 0, 1) or [] for values in estimates.per_position.T]
    return {
        "acceptance_rate_interval": interval(estimates.rate, 0, 1),
        "acceptance_length_interval": interval(estimates.length, 1, longest),
        "mean_emitted_tokens_interval": interval(estimates.emitted, 1, longest),
        "acceptance_per_position_interval": positions if any(positions) else None,
        "judged_per_position": [int(count) for count in counts.judged.sum(axis=0)],
    }


@dataclass(frozen=True)
class Estimates(Part):
    """The acceptance metrics of all prompts, then without each prompt."""

    rate: Array  # [1 + P]
    length: Array  # [1 + P]
    emitted: Array  # [1 + P]
    per_position: Array  # [1 + P, K]


def estimates_of(counts: PromptCounts) -> Estimates:
    """A number without a prompt is not finite if no other prompt has a verification."""
    totals = counts.totals()
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(totals.judged > 0, totals.accepted / totals.judged, 0.0)
        return Estimates(
            totals.accepted_tokens() / totals.drafted,
            1 + totals.accepted_tokens() / totals.verifications,
            totals.emitted / totals.verifications,
            shares.cumprod(axis=1),
        )


def _speed_interval(tokens: list[int], times_ms: list[float]) -> list[float] | None:
    """Of the tokens/s over all batches, in which a batch without steps has no part."""
    pairs = [(count, ms / 1e3) for count, ms in zip(tokens, times_ms, strict=True) if ms]
    values = without_each([count for count, _ in pairs], [s for _, s in pairs])
    return interval(values, 0, np.inf, FEWEST_BATCHES)
