"""PassMetrics: the declaration of every metric of a pass. `computing.py` computes them, from the
requests and the groups of a record alone; docs/record.md has the definitions. Imports no torch.

Names are those of serving benchmarks such as vLLM's. Percentiles are interpolated linearly, as in
numpy.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from magicdec.records.acceptance import AcceptanceMetrics
from magicdec.records.fields import RecordPart, description_of, recorded
from magicdec.records.intervals import FEWEST_BATCHES

SUFFIX = "_interval"  # of the name of a metric, for that of its interval
FIRST_CONTEXT = 2048  # tokens of the longest prompts of the first group by context
FIRST_GROWN = 512  # tokens of the longest texts of the first group by grown context
CHANCE = "; with random weights, where drafted"
ONE_TOKEN = "if every request has a single output token"
NOT_TIMED = "if no step decodes, or in modes whose steps wait for each other"
UNTIMED = f"{NOT_TIMED}; on CUDA without `--benchmark`"
NO_SESSIONS = "without conversations or sessions of a trace"
NO_HASHES = "without a trace of sessions by hash ids"
NO_OFFLOAD = "without `--kv_offload`"
NO_PREFIXES = "without `--prefix_cache`; of a server that does not say it"
COUNTED_ELSEWHERE = "of `endpoint`"  # another program counts these
NOT_KEPT = "where each pass prefills its own prompts"
NOT_COUNTED = "of systems that do not count it, such as stages"
NO_REFERENCE = "of the pass that others are compared with; without such a pass" + CHANCE
NO_SPEEDUP = f"{NO_REFERENCE}; {NOT_KEPT}; if no step was needed"
UNCALIBRATED = "without `--gamma auto`; if nothing is drafted"
FEW_GROUPS = f"with fewer than {FEWEST_BATCHES} groups; if the number itself is null"

latency = partial(recorded, unit="ms", digits=1)


def _token_latency(meaning: str, label: str) -> Any:
    """Of tokens after the first, whose times depend on acceptance."""
    return recorded(meaning, "ms", null=ONE_TOKEN + CHANCE, label=label, digits=2, by_chance=True)


def _chance(meaning: str, unit: str, null: str, label: str = "", **more: Any) -> Any:
    return recorded(meaning, unit, null=null, label=label, by_chance=True, **more)


def _interval(metric: str, unit: str) -> Any:
    meaning = f"lower and upper end of the 95 % interval of `{metric}` over the groups"
    return _chance(meaning, unit, FEW_GROUPS)


def _ms(meaning: str, null: str, label: str, digits: int = 2) -> Any:
    return recorded(meaning, "ms", null=null, label=label, digits=digits)


@dataclass(frozen=True, kw_only=True)
class Throughput(RecordPart):
    """How much was served. Times of groups are added."""

    duration_s: float = recorded(
        "time from the first arrival of a group to the end of its last request, summed over the "
        "groups",
        "s",
        label="duration, s",
        digits=2,
    )
    request_throughput: float = recorded(
        "requests divided by the duration", "requests/s", label="requests/s", digits=2
    )
    output_throughput: float | None = _chance(
        "output tokens divided by the duration",
        "tokens/s",
        "with random weights, where drafted",
        "output tokens/s",
        digits=1,
    )
    output_throughput_interval: list[float] | None = _interval("output_throughput", "tokens/s")
    steady_output_throughput: float | None = _chance(
        "output tokens divided by the duration without `stalled_ms`",
        "tokens/s",
        NOT_TIMED + CHANCE,
        "output tokens/s without stalls",
        digits=1,
    )
    request_goodput: float | None = recorded(
        "requests that kept every bound of `--goodput`, divided by the duration; a request with "
        "one output token keeps any bound of `tpot`",
        "requests/s",
        label="goodput, requests/s",
        digits=2,
        null="without `--goodput`",
    )
    sessions_per_hour: float | None = recorded(
        "conversations, or sessions of a trace, divided by the duration: all that were served, "
        "each once and to its end",
        "sessions/h",
        label="sessions/h",
        digits=1,
        null=NO_SESSIONS,
    )
    arrival_rate: float | None = recorded(
        "requests of a group after the first one divided by the time from its first arrival to the "
        "last",
        "requests/s",
        label="arrivals/s",
        digits=2,
        null="if all arrive at once",
    )


@dataclass(frozen=True, kw_only=True)
class RequestTimes(RecordPart):
    """How long requests waited."""

    mean_ttft_ms: float = latency(
        "time to first token: from the arrival of a request to its first output token; mean over "
        "the requests. Passes that share a prefill share it too",
        label="TTFT mean, ms",
    )
    p50_ttft_ms: float = latency("median of the same", label="TTFT p50, ms")
    p90_ttft_ms: float = latency("its 90th percentile", label="TTFT p90, ms")
    p99_ttft_ms: float = latency("its 99th percentile", label="TTFT p99, ms")
    mean_tpot_ms: float | None = _token_latency(
        "time per output token: from the first output token of a request to its last, divided by "
        "the number of tokens after the first; mean over the requests that have such tokens",
        "TPOT mean, ms",
    )
    p50_tpot_ms: float | None = _token_latency("median of the same", "TPOT p50, ms")
    p90_tpot_ms: float | None = _token_latency("its 90th percentile", "TPOT p90, ms")
    p99_tpot_ms: float | None = _token_latency("its 99th percentile", "TPOT p99, ms")
    mean_itl_ms: float | None = _token_latency(
        "inter-token latency: the time between two steps that emitted tokens of the same request; "
        "mean over all of them",
        "ITL mean, ms",
    )
    p50_itl_ms: float | None = _token_latency("median of the same", "ITL p50, ms")
    p90_itl_ms: float | None = _token_latency("its 90th percentile", "ITL p90, ms")
    p99_itl_ms: float | None = _token_latency("its 99th percentile", "ITL p99, ms")
    mean_e2el_ms: float = latency(
        "end-to-end latency: from the arrival of a request to its last output token; mean over the "
        "requests",
        label="E2EL mean, ms",
    )
    p50_e2el_ms: float = latency("median of the same", label="E2EL p50, ms")
    p90_e2el_ms: float = latency("its 90th percentile", label="E2EL p90, ms")
    p99_e2el_ms: float = latency("its 99th percentile", label="E2EL p99, ms")
    mean_session_ms: float | None = latency(
        "time of a session: from the arrival of its first request to the end of its last one, with "
        "all waits between them; mean over the sessions",
        label="session mean, ms",
        null=NO_SESSIONS,
    )
    p50_session_ms: float | None = latency(
        "median of the same", label="session p50, ms", null=NO_SESSIONS
    )
    p90_session_ms: float | None = latency(
        "its 90th percentile", label="session p90, ms", null=NO_SESSIONS
    )
    p99_session_ms: float | None = latency(
        "its 99th percentile", label="session p99, ms", null=NO_SESSIONS
    )
    request_tokens_per_s: float | None = recorded(
        "tokens of a request after its first, divided by the time from the first to the last; mean "
        "over the requests that have such tokens",
        "tokens/s",
        label="tokens/s of a request",
        digits=2,
        null=ONE_TOKEN,
    )
    request_prefill_tokens_per_s: float = recorded(
        "prompt tokens of a request, without those that the prefix cache had when it first joined, "
        "divided by the time from when it first got a row, or a lane of pipelined speculation, to "
        "its first token; mean over the requests",
        "tokens/s",
        label="prefill, tokens/s of a request",
        digits=1,
    )


@dataclass(frozen=True, kw_only=True)
class StepMetrics(RecordPart):
    """What steps took, and what they read. Steps are those that decode, without the warm-up."""

    prefill_tokens_per_s: float | None = recorded(
        "prompt tokens divided by the time of all prefills, which passes share",
        "tokens/s",
        null=NOT_KEPT,
        label="prefill, tokens/s",
    )
    prefill_tokens_per_s_interval: list[float] | None = recorded(
        "lower and upper end of the 95 % interval of `prefill_tokens_per_s` over the groups",
        "tokens/s",
        null=FEW_GROUPS,
    )
    decode_tokens_per_s: float | None = _chance(
        "emitted tokens after the first ones, divided by the time of all steps that decode",
        "tokens/s",
        NOT_TIMED + CHANCE,
        "decode, tokens/s",
        digits=1,
    )
    decode_tokens_per_s_interval: list[float] | None = _interval("decode_tokens_per_s", "tokens/s")
    mean_in_flight: float | None = recorded(
        "requests that a step prefills or decodes; mean over the steps",
        "requests",
        label="in flight, mean",
        digits=2,
        null=f"in pipelined speculation, whose runs are of one request, or {COUNTED_ELSEWHERE}",
    )
    num_steps: int | None = recorded(
        "steps of the engine or of the lanes of a ring, or runs of pipelined speculation; without "
        "those of a prefill that passes share",
        "steps",
        label="steps",
        null=COUNTED_ELSEWHERE,
    )
    num_decode_steps: int | None = recorded(
        "steps that decode, each one forward, or drafting and one verification",
        "steps",
        label="decode steps",
        null=NOT_TIMED,
    )
    mean_step_ms: float | None = _ms("mean time of these", NOT_TIMED, "step mean, ms")
    median_step_ms: float | None = _ms("median time of these", NOT_TIMED, "step median, ms")
    stalled_steps: int | None = recorded(
        "those of them that stalled; see *Definitions*",
        "steps",
        label="stalled steps",
        null=NOT_TIMED,
    )
    stalled_ms: float | None = _ms(
        "time of the stalled steps beyond the medians of their kinds",
        NOT_TIMED,
        "lost in stalled steps, ms",
    )
    longest_stall_ms: float | None = _ms(
        "time of the stalled step that lost most", "if no step stalled", ""
    )
    longest_stall_median_ms: float | None = _ms(
        "the median of its kind, which it would have taken", "if no step stalled", ""
    )
    begin_ms: float | None = _ms(
        "mean time for each group between prefill and the first decode step, without calibration: "
        "what a KV policy chooses, a standalone draft's own prefill, the capture of CUDA graphs",
        NOT_KEPT,
        "before the first step, ms/batch",
    )
    draft_prefill_ms: float | None = _ms(
        "`begin_ms` of a standalone draft, which is its own prefill; it is not part of the decode "
        "steps or of TTFT",
        f"without a standalone draft; {NOT_KEPT}",
        "draft's own prefill, ms/batch",
        0,
    )
    calibration_ms: float | None = _ms(
        "time that `--gamma auto` spends on measuring steps, over all groups and the warm-up; it "
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
    draft_ms: float | None = _ms(
        "mean time of drafting, over the steps that draft",
        f"if nothing is drafted; {UNTIMED}",
        "  draft, ms/step",
    )
    verify_ms: float | None = _ms(
        "mean time of verifying, over the same steps",
        f"if nothing is drafted; {UNTIMED}",
        "  verify, ms/step",
    )
    decode_ms: float | None = _ms(
        "mean time of the forward and of sampling, over the steps without drafts",
        f"if every step drafts; {UNTIMED}",
        "  decode, ms/step",
    )
    other_ms: float | None = _ms(
        "the rest of `mean_step_ms` without these phases",
        "if no phase is known",
        "  other, ms/step",
    )
    mean_draft_tokens: float | None = _chance(
        "mean number of draft tokens of the row with the most in a step, over all steps, including "
        "those without drafts",
        "tokens",
        f"if nothing is drafted; {NOT_TIMED}; with random weights",
        "draft positions a step",
        digits=2,
    )
    bytes_read: int | None = recorded(
        "smallest number of bytes that the decode steps, including drafting, must read from "
        "memory, summed over ranks: the weights once in each forward, and the KV cache as far as "
        "each forward sees it; with the prompts that such a step prefills",
        "bytes",
        null=NOT_COUNTED,
        label="bytes to read, GB",
        digits=2,
        scale=1e-9,
    )
    kv_tokens_read: float | None = recorded(
        "mean number of tokens whose K and V a draft forward reads for each row: of the context at "
        "most the budget, and the step's own tokens",
        "tokens",
        null="if no model drafted, or it is not counted",
        label="KV tokens read by a draft forward",
        digits=1,
    )
    roofline_fraction: float | None = recorded(
        "share of the memory roofline that was reached by the decode steps; above 1 if part of the "
        "data was read from CPU or GPU caches, or if the host was slower when its bandwidth was "
        "measured",
        "ratio",
        null=f"if no step was needed; {NOT_COUNTED}",
        label="of the memory roofline",
        digits=1,
        scale=100,
        suffix=" %",
    )
    num_preemptions: int | None = recorded(
        "times that a request gave its KV cache back before its end, because no block was free",
        label="preemptions",
        null=COUNTED_ELSEWHERE,
    )
    prefix_hit_rate: float | None = recorded(
        "tokens of requests that the prefix cache had when they joined, divided by all of their "
        "tokens; a preempted request joins again",
        "0 to 1",
        label="prefix cache hits",
        digits=3,
        null=NO_PREFIXES,
    )
    theoretical_hit_rate: float | None = recorded(
        "what `prefix_hit_rate` would be with a cache without limits, by the hash ids of the "
        "trace: the tokens of the longest beginning of the blocks of a prompt that have all come "
        "before, in the order of the recorded times and in the namespace of the ids, divided by "
        "all tokens of prompts",
        "0 to 1",
        label="hits of an unlimited cache",
        digits=3,
        null=NO_HASHES,
    )
    host_hit_rate: float | None = recorded(
        "as `prefix_hit_rate`, of tokens that were in host memory, which are in that too",
        "0 to 1",
        label="of host memory",
        digits=3,
        null=f"{NO_OFFLOAD}; if none were",
    )
    peak_memory_bytes: int | None = recorded(
        "largest memory use of each rank while a group was served, summed over ranks; the largest "
        "of the groups: resident memory on a CPU, allocated device memory on CUDA",
        "bytes",
        label="peak memory, GB",
        digits=2,
        scale=1e-9,
        null=f"if the system does not let a process reset its own peak, or {COUNTED_ELSEWHERE}",
    )
    answer_score: float | None = recorded(
        "see *Definitions*; mean over prompts",
        "0 to 1",
        null="if the workload has no known answers; if the target has random weights",
        label="answer score",
        digits=3,
    )


def _ratio(name: str, meaning: str, label: str, null: str) -> tuple[Any, Any, Any]:
    """The fields of a ratio to the reference: its median over groups, its interval, and that of
    each group."""
    return (
        _chance(
            f"{meaning}: the median of `{name}_per_group`",
            "ratio",
            null,
            label,
            digits=2,
            suffix="x",
        ),
        _interval(name, "ratio"),
        _chance("the same of each group, in order", "ratio", null),
    )


THROUGHPUT_RATIO = _ratio(
    "throughput_ratio", "output tokens/s over those of `reference`", "times reference", NO_REFERENCE
)
SPEEDUP = _ratio(
    "speedup",
    "tokens/s of the decode steps over those of `reference`, in which a stalled step counts as the "
    "median of its kind",
    "speedup",
    NO_SPEEDUP,
)
TOTAL_SPEEDUP = _ratio(
    "total_speedup",
    "the same of all the time of the decode steps, stalls included",
    "total speedup",
    NO_SPEEDUP,
)
NET_SPEEDUP = _ratio(
    "net_speedup",
    "tokens/s from the end of prefill to the last token over those of `reference`; see "
    "*Definitions*",
    "net speedup",
    NO_SPEEDUP,
)


@dataclass(frozen=True, kw_only=True)
class Ratios(RecordPart):
    """How a pass compares with `reference`, group by group."""

    throughput_ratio: float | None = THROUGHPUT_RATIO[0]
    throughput_ratio_interval: list[float] | None = THROUGHPUT_RATIO[1]
    throughput_ratio_per_group: list[float] | None = THROUGHPUT_RATIO[2]
    speedup: float | None = SPEEDUP[0]
    speedup_interval: list[float] | None = SPEEDUP[1]
    speedup_per_group: list[float] | None = SPEEDUP[2]
    total_speedup: float | None = TOTAL_SPEEDUP[0]
    total_speedup_interval: list[float] | None = TOTAL_SPEEDUP[1]
    total_speedup_per_group: list[float] | None = TOTAL_SPEEDUP[2]
    net_speedup: float | None = NET_SPEEDUP[0]
    net_speedup_interval: list[float] | None = NET_SPEEDUP[1]
    net_speedup_per_group: list[float] | None = NET_SPEEDUP[2]
    break_even_gen_len: int | None = _chance(
        "smallest output length of each request for which the net speedup is above 1, if each "
        "further token takes as long as it took on average; the median over groups, and of an even "
        "number the larger of the two middle ones",
        "tokens",
        f"if the net speedup is above 1 for no length; {NO_SPEEDUP}",
        "net speedup is above 1x from, tokens",
    )


@dataclass(frozen=True, kw_only=True)
class PassMetrics(AcceptanceMetrics, StepMetrics, Ratios, RequestTimes, Throughput):
    """The metrics of a pass over all groups. The fields of the last base come first."""


@dataclass(frozen=True, kw_only=True)
class ContextAcceptance(AcceptanceMetrics):
    """The acceptance of the requests whose prompts have similar lengths."""

    most_context: int = recorded(
        "length of the longest prompts that the group can have; those of the next group are up to "
        "twice as long",
        "tokens",
    )
    num_requests: int = recorded("requests of the group, with those without drafts", "requests")


@dataclass(frozen=True, kw_only=True)
class TurnTimes(RecordPart):
    """How long the requests of one turn of all conversations waited for their tokens."""

    turn: int = recorded("the turn, from 1")
    num_requests: int = recorded("conversations that have it", "requests")
    mean_prompt_len: float = recorded(
        "length of its prompts, with the conversation before; mean",
        "tokens",
        label="prompt, tokens",
        digits=0,
    )
    mean_ttft_ms: float = latency("time to first token; mean", label="TTFT mean, ms")
    p50_ttft_ms: float = latency("median of the same", label="TTFT p50, ms")
    p90_ttft_ms: float = latency("its 90th percentile", label="TTFT p90, ms")
    p99_ttft_ms: float = latency("its 99th percentile", label="TTFT p99, ms")
    mean_tpot_ms: float | None = _token_latency("time per output token; mean", "TPOT mean, ms")
    p50_tpot_ms: float | None = _token_latency("median of the same", "TPOT p50, ms")
    p90_tpot_ms: float | None = _token_latency("its 90th percentile", "TPOT p90, ms")
    p99_tpot_ms: float | None = _token_latency("its 99th percentile", "TPOT p99, ms")
    prefix_hit_rate: float | None = recorded(
        "as in `metrics`, of these requests",
        "0 to 1",
        label="prefix cache hits",
        digits=3,
        null=NO_PREFIXES,
    )


NOT_REPORTABLE = ("num_cancelled_draft_tokens", "acceptance_by_category")
# Of `AcceptanceMetrics` those that a server may report, or that follow from it.
REPORTABLE = tuple(
    item.name
    for item in fields(AcceptanceMetrics)
    if not item.name.endswith(SUFFIX) and item.name not in NOT_REPORTABLE
)


def without_chance(metrics: PassMetrics) -> PassMetrics:
    """The metrics with None for what depends on acceptance, which random weights make meaningless.
    Times of steps stay."""
    absent: dict[str, Any] = {
        item.name: None for item in fields(PassMetrics) if description_of(item).by_chance
    }
    return replace(metrics, **absent)
