"""Metrics: the performance of one pass in a record. docs/record.md has the definitions."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from magicdec.records.acceptance import AcceptanceMetrics
from magicdec.records.fields import RecordPart, description_of, recorded
from magicdec.records.intervals import FEWEST_BATCHES

SUFFIX = "_interval"  # of the name of a metric, for that of its interval
NO_STEP = "if no step was needed"
CHANCE = "; with random weights"
UNTIMED = "on CUDA without `--benchmark`"
NO_TPOT = "if no sequence decoded a second token; with random weights, where drafted"
UNCALIBRATED = "without `--gamma auto`; in `baseline_metrics`"
NO_BASELINE = "in `baseline_metrics`; without a baseline" + CHANCE + "; " + NO_STEP

FEW_BATCHES = f"with fewer than {FEWEST_BATCHES} batches; if the number itself is null"


def _chance(meaning: str, unit: str, null: str, label: str = "", **more: Any) -> Any:
    return recorded(meaning, unit, null=null, label=label, by_chance=True, **more)


def _interval(of: str, unit: str, null: str) -> Any:
    return _chance(f"lower and upper end of the 95 % interval of `{of}`", unit, null)


def _ms(meaning: str, null: str, label: str, digits: int = 2) -> Any:
    return recorded(meaning, "ms", null=null, label=label, digits=digits)


def _phase(meaning: str, name: str, null: str = "if nothing is drafted; " + UNTIMED) -> Any:
    return _ms(meaning, null, f"  {name}, ms/step")


def _tpot(meaning: str, name: str) -> Any:
    return _chance(meaning, "ms", NO_TPOT, f"TPOT {name}, ms", digits=2)


@dataclass(frozen=True, kw_only=True)
class SpeedMetrics(RecordPart):
    """The speed of a pass over all measured batches, without the warm-up. Intervals of speeds are
    over batches."""

    prefill_tokens_per_s_interval: list[float] | None = recorded(
        "lower and upper end of the 95 % interval of `prefill_tokens_per_s`",
        "tokens/s",
        null=FEW_BATCHES,
    )
    decode_tokens_per_s_interval: list[float] | None = _interval(
        "decode_tokens_per_s", "tokens/s", FEW_BATCHES
    )
    speedup_interval: list[float] | None = _interval("speedup", "ratio", FEW_BATCHES)
    net_speedup_interval: list[float] | None = _interval("net_speedup", "ratio", FEW_BATCHES)
    prefill_tokens_per_s: float | None = recorded(
        "prompt tokens divided by the time of all prefills; both passes share one prefill",
        "tokens/s",
        null="if no batch was measured",
        label="prefill, tokens/s",
    )
    mean_ttft_ms: float | None = _ms(
        "mean TTFT; both passes share one prefill and therefore this value",
        "if no batch was measured",
        "TTFT mean, ms (shared prefill)",
        0,
    )
    decode_tokens_per_s: float | None = _chance(
        "emitted tokens of all rows, divided by the time of all decode steps",
        "tokens/s",
        NO_STEP + "; with random weights, where drafted",
        "decode, tokens/s",
        digits=1,
    )
    mean_step_ms: float | None = _ms(
        "mean time of a decode step, which is one forward, or drafting and one verification",
        NO_STEP,
        "step mean, ms",
    )
    median_step_ms: float | None = _ms("median time of a decode step", NO_STEP, "step median, ms")
    num_steps: int | None = recorded(
        "decode steps of all batches",
        "steps",
        null=NO_STEP,
        label="decode steps",
    )
    stalled_steps: int | None = recorded(
        "those of them that stalled; see *Definitions*",
        "steps",
        null=NO_STEP,
        label="stalled steps",
    )
    stalled_ms: float | None = _ms(
        "time of the stalled steps beyond the medians of their kinds",
        NO_STEP,
        "lost in stalled steps, ms",
    )
    longest_stall_ms: float | None = _ms(
        "time of the stalled step that lost most", "if no step stalled", ""
    )
    longest_stall_median_ms: float | None = _ms(
        "the median of its kind, which it would have taken",
        "if no step stalled",
        "",
    )
    begin_ms: float | None = _ms(
        "mean time for each batch between prefill and the first decode step, without calibration: "
        "what a KV policy chooses, a standalone draft's own prefill, the capture of CUDA graphs",
        "if no batch was measured",
        "before the first step, ms/batch",
    )
    draft_prefill_ms: float | None = _ms(
        "`begin_ms` of a standalone draft, which is its own prefill; it is not part of the decode "
        "steps or of TTFT",
        "without a standalone draft; in `baseline_metrics`",
        "draft's own prefill, ms/batch",
        0,
    )
    calibration_ms: float | None = _ms(
        "time that `--gamma auto` spends on measuring steps, over all batches and the warm-up; it "
        "is not part of the decode steps, of `begin_ms` or of TTFT",
        UNCALIBRATED,
        "calibration for gamma, ms in all",
        0,
    )
    warmup_calibration_ms: float | None = _ms(
        "the part of `calibration_ms` that was spent in the warm-up; `net_speedup` leaves it out",
        UNCALIBRATED,
        "  of it in the warm-up, ms",
        0,
    )
    draft_ms: float | None = _phase("mean time of drafting, over the steps that draft", "draft")
    verify_ms: float | None = _phase("mean time of verifying, over the same steps", "verify")
    decode_ms: float | None = _phase(
        "mean time of the forward and of sampling, over the steps without drafts",
        "decode",
        "if every step drafts; " + UNTIMED,
    )
    other_ms: float | None = _phase(
        "the rest of `mean_step_ms` without these phases", "other", "if no phase is known"
    )
    mean_draft_tokens: float | None = _chance(
        "mean number of draft tokens for each row in a step, over all steps, "
        "including those without drafts",
        "tokens",
        "in `baseline_metrics`; " + NO_STEP + CHANCE,
        "draft positions a step",
        digits=2,
    )
    bytes_read: int = recorded(
        "smallest number of bytes that the decode steps, including drafting, must read from "
        "memory, summed over ranks: the weights once in each forward, and the KV cache as far as "
        "each forward sees it",
        "bytes",
        label="bytes to read, GB",
        digits=2,
        scale=1e-9,
    )
    kv_tokens_read: float | None = recorded(
        "mean number of tokens whose K and V a draft forward reads for each row: of the context at "
        "most the budget, and the step's own tokens",
        "tokens",
        null="in `baseline_metrics`; if no model drafted",
        label="KV tokens read by a draft forward",
        digits=1,
    )
    roofline_fraction: float | None = recorded(
        "share of the memory roofline that was reached; above 1 if part of the data was read from "
        "CPU or GPU caches, or if the host was slower when its bandwidth was measured",
        "ratio",
        null=NO_STEP,
        label="of the memory roofline",
        digits=1,
        scale=100,
        suffix=" %",
    )
    peak_memory_bytes: int | None = recorded(
        "largest memory use of a batch, summed over ranks: allocated device memory on CUDA, "
        "resident memory on CPU",
        "bytes",
        null="if unknown",
        label="peak memory, all ranks, MB",
        scale=1e-6,
    )
    answer_score: float | None = recorded(
        "see *Definitions*; mean over prompts",
        "0 to 1",
        null="if the workload has no known answers" + CHANCE,
        label="answer score",
        digits=3,
    )
    speedup: float | None = _chance(
        "speedup of the decode steps over the baseline's of the same run, in which a stalled step "
        "counts as the median of its kind: the median of `speedup_per_batch`",
        "ratio",
        NO_BASELINE,
        "speedup",
        digits=2,
        suffix="x",
    )
    speedup_per_batch: list[float] | None = _chance(
        "the speedup of each batch, in order", "ratio", NO_BASELINE
    )
    total_speedup: float | None = _chance(
        "the same of all the time of the decode steps, stalls included: the median of "
        "`total_speedup_per_batch`",
        "ratio",
        NO_BASELINE,
        "total speedup",
        digits=2,
        suffix="x",
    )
    total_speedup_per_batch: list[float] | None = _chance(
        "the total speedup of each batch, in order", "ratio", NO_BASELINE
    )
    net_speedup: float | None = _chance(
        "speedup from the end of prefill to the last token: the median of "
        "`net_speedup_per_batch`; see *Definitions*",
        "ratio",
        NO_BASELINE,
        "net speedup",
        digits=2,
        suffix="x",
    )
    net_speedup_per_batch: list[float] | None = _chance(
        "the net speedup of each batch, in order", "ratio", NO_BASELINE
    )
    break_even_gen_len: int | None = _chance(
        "smallest output length of each sequence for which the net speedup is above 1, if each "
        "further token takes as long as it took on average; the median over batches, and of an "
        "even number the larger of the two middle ones",
        "tokens",
        "if the net speedup is above 1 for no length; " + NO_BASELINE,
        "net speedup is above 1x from, tokens",
    )
    mean_tpot_ms: float | None = _tpot("mean TPOT over sequences", "mean")
    p50_tpot_ms: float | None = _tpot("median TPOT over sequences", "p50")
    p90_tpot_ms: float | None = _tpot(
        "90th percentile, linear between the two nearest ranks", "p90"
    )
    p99_tpot_ms: float | None = _tpot("99th percentile, computed likewise", "p99")


@dataclass(frozen=True, kw_only=True)
class Metrics(AcceptanceMetrics, SpeedMetrics):
    """The metrics of one pass of a run. Fields of the last base come first."""


def without_chance(metrics: Metrics) -> Metrics:
    """The metrics with None for what depends on acceptance, which random weights make meaningless.
    Times of steps stay."""
    absent: dict[str, Any] = {
        item.name: None for item in fields(Metrics) if description_of(item).by_chance
    }
    return replace(metrics, **absent)
