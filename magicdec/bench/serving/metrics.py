"""ServingMetrics: how long requests waited and how many were served, computed from the time stamps
of the requests and from what the scheduler's `StepCounts` counted. The names are those of serving
benchmarks such as vLLM's.

Owns the definition of every metric. Imports no torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from magicdec.engine.scheduler import StepCounts
from magicdec.records.acceptance import AcceptanceMetrics, Verifications, acceptance_metrics
from magicdec.records.fields import RecordPart, recorded
from magicdec.records.metrics import mean, percentile, stall_metrics
from magicdec.records.performance import SUFFIX
from magicdec.records.stalls import PassSteps, TimedStep
from magicdec.runner.request import Moves, Request
from magicdec.systems.details import Details

OF_SERVER = "of `endpoint`"  # another program counts these
ONE_TOKEN = "if every request has a single output token"
NOT_TIMED = "if no step decodes, or in modes whose steps wait for each other"
NO_PREFIXES = "without `--prefix_cache`; of a server that does not say it"
FIRST_CONTEXT = 2048  # tokens of the longest prompts of the first group by context
of_request = partial(recorded, unit="ms", digits=1)
of_later = partial(recorded, unit="ms", digits=2, null=ONE_TOKEN)  # tokens after the first


@dataclass(frozen=True, kw_only=True)
class ServedTimes(RecordPart):
    """How long the requests of one pass waited, and how many were served. Percentiles are
    interpolated linearly, as in numpy."""

    makespan_s: float = recorded(
        "time from the first arrival to the end of the last request",
        "s",
        label="makespan, s",
        digits=2,
    )
    request_throughput: float = recorded(
        "requests divided by the makespan", "requests/s", label="requests/s", digits=2
    )
    output_throughput: float = recorded(
        "output tokens divided by the makespan", "tokens/s", label="output tokens/s", digits=1
    )
    steady_output_throughput: float | None = recorded(
        "output tokens divided by the makespan without `stalled_ms`",
        "tokens/s",
        label="output tokens/s without stalls",
        digits=1,
        null=NOT_TIMED,
    )
    request_goodput: float | None = recorded(
        "requests that kept every bound of `--goodput`, divided by the makespan; a request with "
        "one output token keeps any bound of `tpot`",
        "requests/s",
        label="goodput, requests/s",
        digits=2,
        null="without `--goodput`",
    )
    arrival_rate: float | None = recorded(
        "requests after the first one divided by the time from the first arrival to the last",
        "requests/s",
        label="arrivals/s",
        digits=2,
        null="if all arrive at once",
    )
    mean_ttft_ms: float = of_request(
        "time to first token: from the arrival of a request to its first output token; mean over "
        "the requests",
        label="TTFT mean, ms",
    )
    p50_ttft_ms: float = of_request("median of the same", label="TTFT p50, ms")
    p90_ttft_ms: float = of_request("its 90th percentile", label="TTFT p90, ms")
    p99_ttft_ms: float = of_request("its 99th percentile", label="TTFT p99, ms")
    mean_tpot_ms: float | None = of_later(
        "time per output token: from the first output token of a request to its last, divided by "
        "the number of tokens after the first; mean over the requests that have such tokens",
        label="TPOT mean, ms",
    )
    p50_tpot_ms: float | None = of_later("median of the same", label="TPOT p50, ms")
    p90_tpot_ms: float | None = of_later("its 90th percentile", label="TPOT p90, ms")
    p99_tpot_ms: float | None = of_later("its 99th percentile", label="TPOT p99, ms")
    mean_itl_ms: float | None = of_later(
        "inter-token latency: the time between two steps that emitted tokens of the same request; "
        "mean over all of them",
        label="ITL mean, ms",
    )
    p50_itl_ms: float | None = of_later("median of the same", label="ITL p50, ms")
    p90_itl_ms: float | None = of_later("its 90th percentile", label="ITL p90, ms")
    p99_itl_ms: float | None = of_later("its 99th percentile", label="ITL p99, ms")
    mean_e2el_ms: float = of_request(
        "end-to-end latency: from the arrival of a request to its last output token; mean over the "
        "requests",
        label="E2EL mean, ms",
    )
    p50_e2el_ms: float = of_request("median of the same", label="E2EL p50, ms")
    p90_e2el_ms: float = of_request("its 90th percentile", label="E2EL p90, ms")
    p99_e2el_ms: float = of_request("its 99th percentile", label="E2EL p99, ms")
    request_tokens_per_s: float | None = recorded(
        "tokens of a request after its first, divided by the time from the first to the last; mean "
        "over the requests that have such tokens",
        "tokens/s",
        label="tokens/s of a request",
        digits=2,
        null=ONE_TOKEN,
    )
    prefill_tokens_per_s: float = recorded(
        "prompt tokens of a request, without those that the prefix cache had when it first joined, "
        "divided by the time from when it first got a row, or a lane of pipelined speculation, to "
        "its first token; mean over the requests",
        "tokens/s",
        label="prefill, tokens/s of a request",
        digits=1,
    )
    mean_in_flight: float | None = recorded(
        "requests that a step prefills or decodes; mean over the steps",
        "requests",
        label="in flight, mean",
        digits=2,
        null=f"in pipelined speculation, whose runs are of one request, or {OF_SERVER}",
    )
    num_steps: int | None = recorded(
        "steps of the engine or of the lanes of a ring, or runs of pipelined speculation",
        label="steps",
        null=OF_SERVER,
    )
    num_decode_steps: int | None = recorded(
        "steps that decode", "steps", label="decode steps", null=NOT_TIMED
    )
    median_step_ms: float | None = recorded(
        "median time of these", "ms", label="decode step median, ms", digits=2, null=NOT_TIMED
    )
    stalled_steps: int | None = recorded(
        "those of them that stalled: steps of a kind take equally many prompt tokens, draft tokens "
        "and rows; see *Definitions* of a run's record",
        "steps",
        label="stalled steps",
        null=NOT_TIMED,
    )
    stalled_ms: float | None = recorded(
        "time of the stalled steps beyond the medians of their kinds",
        "ms",
        label="lost in stalled steps, ms",
        digits=1,
        null=NOT_TIMED,
    )
    longest_stall_ms: float | None = recorded(
        "time of the stalled step that lost most", "ms", null="if no step stalled"
    )
    longest_stall_median_ms: float | None = recorded(
        "the median of its kind, which it would have taken", "ms", null="if no step stalled"
    )
    num_preemptions: int | None = recorded(
        "times that a request gave its KV cache back before its end, because no block was free",
        label="preemptions",
        null=OF_SERVER,
    )
    prefix_hit_rate: float | None = recorded(
        "tokens of requests that the prefix cache had when they joined, divided by all of their "
        "tokens; a preempted request joins again",
        "0 to 1",
        label="prefix cache hits",
        digits=3,
        null=NO_PREFIXES,
    )
    peak_memory_bytes: int | None = recorded(
        "largest memory use of each rank while the requests were served, summed over ranks: "
        "resident memory on a CPU, allocated device memory on CUDA",
        "bytes",
        label="peak memory, GB",
        digits=2,
        scale=1e-9,
        null=f"if the system does not let a process reset its own peak, or {OF_SERVER}",
    )


@dataclass(frozen=True, kw_only=True)
class ServingMetrics(AcceptanceMetrics, ServedTimes):
    """The metrics of one pass. The fields of the last base come first."""


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
    """How long the requests of one turn of all conversations waited for their first tokens."""

    turn: int = recorded("the turn, from 1")
    num_requests: int = recorded("conversations that have it", "requests")
    mean_prompt_len: float = recorded(
        "length of its prompts, with the conversation before; mean",
        "tokens",
        label="prompt, tokens",
        digits=0,
    )
    mean_ttft_ms: float = of_request("time to first token; mean", label="TTFT mean, ms")
    p50_ttft_ms: float = of_request("median of the same", label="TTFT p50, ms")
    p90_ttft_ms: float = of_request("its 90th percentile", label="TTFT p90, ms")
    p99_ttft_ms: float = of_request("its 99th percentile", label="TTFT p99, ms")
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
    each.name
    for each in fields(AcceptanceMetrics)
    if not each.name.endswith(SUFFIX) and each.name not in NOT_REPORTABLE
)


def serving_metrics(
    requests: Sequence[Request],
    counts: StepCounts,
    goodput: Mapping[str, float] = {},
    peak_memory_bytes: int | None = None,
    verifications: Verifications | None = None,
    steps: Sequence[TimedStep] = (),
    categories: Sequence[str | None] | None = None,
) -> ServingMetrics:
    """The metrics of finished requests, whose ids are 0, 1, ... `goodput` has the most ms for some
    of `GOODPUT_OF`; `verifications` are None where acceptance has no meaning; `steps` are those
    that decode, none where they wait for each other; `categories` are those of the requests."""
    times = [request.times_ms() for request in requests]
    begin_s = min(request.arrived_s for request in requests)
    makespan_s = max(_finished_s(request) for request in requests) - begin_s
    good = [all(of[name] <= most for name, most in goodput.items() if name in of) for of in times]
    num_tokens = sum(len(request.output_ids) for request in requests)
    of_steps = stall_metrics(PassSteps.of_steps(steps))
    steady_s = makespan_s - of_steps.get("stalled_ms", 0.0) / 1e3
    return ServingMetrics(
        makespan_s=makespan_s,
        request_throughput=len(requests) / makespan_s,
        output_throughput=num_tokens / makespan_s,
        steady_output_throughput=num_tokens / steady_s if of_steps and steady_s > 0 else None,
        num_decode_steps=len(steps) or None,
        request_goodput=sum(good) / makespan_s if goodput else None,
        arrival_rate=rate_of([request.arrived_s for request in requests]),
        request_tokens_per_s=mean([1e3 / of["tpot"] for of in times if of.get("tpot")]),
        prefill_tokens_per_s=statistics.fmean(
            prefill_speed(request, counts.moves[request.request_id]) for request in requests
        ),
        mean_in_flight=counts.num_in_flight / counts.num_steps if counts.num_in_flight else None,
        num_steps=counts.num_steps or None,
        num_preemptions=counts.num_preemptions if counts.num_steps else None,
        peak_memory_bytes=peak_memory_bytes,
        prefix_hit_rate=hit_rate([counts]),
        **(
            {}
            if verifications is None
            else acceptance_metrics(verifications, len(requests), categories)
        ),
        **of_steps,
        **summary("ttft", [of["ttft"] for of in times]),
        **summary("tpot", [of["tpot"] for of in times if "tpot" in of]),
        **summary("itl", [gap for request in requests for gap in request.gaps_ms()]),
        **summary("e2el", [of["e2el"] for of in times]),
    )


def categories_of(
    requests: Sequence[Request], of_prompts: Sequence[str | None] | None
) -> list[str | None] | None:
    """The category of each request: that of its prompt, or of the first of its conversation."""
    if of_prompts is None:
        return None
    places = [r.request_id if r.turn is None else r.turn.conversation for r in requests]
    return [of_prompts[place] for place in places]


def times_by_turn(
    requests: Sequence[Request], moves: Mapping[int, Moves]
) -> list[TurnTimes] | None:
    """The times of requests by their turns; None where they are no conversations."""
    turns = dict[int, list[Request]]()
    for request in requests:
        if request.turn is not None:
            turns.setdefault(request.turn.number, []).append(request)
    return [
        TurnTimes(
            turn=turn,
            num_requests=len(members),
            mean_prompt_len=statistics.fmean(len(request.prompt_ids) for request in members),
            prefix_hit_rate=hit_rate([moves[request.request_id] for request in members]),
            **summary("ttft", [request.times_ms()["ttft"] for request in members]),
        )
        for turn, members in sorted(turns.items())
    ] or None


def hit_rate(counts: Sequence[Moves | StepCounts]) -> float | None:
    """The share of looked-up tokens that a prefix cache had; None if none were looked up."""
    num_looked_up = sum(each.num_looked_up for each in counts)
    return sum(each.num_found for each in counts) / num_looked_up if num_looked_up else None


def acceptance_by_context(
    requests: Sequence[Request], verifications: Verifications | None
) -> list[ContextAcceptance] | None:
    """The acceptance of requests by the length of their prompts; None where it is not known by
    request, or has no meaning."""
    if verifications is None:
        return None
    ids = dict[int, list[int]]()
    for request in requests:
        most = FIRST_CONTEXT
        while most < len(request.prompt_ids):
            most *= 2
        ids.setdefault(most, []).append(request.request_id)
    groups = [
        ContextAcceptance(
            most_context=most,
            num_requests=len(members),
            **acceptance_metrics(verifications.of_requests(members), len(members)),
        )
        for most, members in sorted(ids.items())
    ]
    return groups if any(each.num_draft_tokens or each.num_spec_steps for each in groups) else None


def completed(
    details: Details | None, metrics: ServingMetrics | None, verifications: Verifications
) -> Details | None:
    """The details with the names of the metrics of acceptance that the pass does not have."""
    if details is None:
        return None
    missing = [name for name in REPORTABLE if getattr(metrics, name, None) is None]
    return details.completed(missing, verifications.has_drafts)


def prefill_speed(request: Request, moves: Moves) -> float:
    """The prompt tokens of a finished request that were computed, divided by the seconds from when
    it first got a row to its first token."""
    assert request.first_token_s is not None, "what has ended has a first token"
    num_computed = len(request.prompt_ids) - sum(moves.found[:1])
    return num_computed / max(request.first_token_s - moves.joined_s[0], 1e-9)


def rate_of(times_s: Sequence[float]) -> float | None:
    """Events a second between the first and the last of these times; None if they are equal."""
    span = max(times_s) - min(times_s)
    return (len(times_s) - 1) / span if span else None


def summary(name: str, values: Sequence[float]) -> dict[str, Any]:
    """The mean and the percentiles of `values` as fields of `ServingMetrics`."""
    percentiles = {f"p{p}_{name}_ms": percentile(values, p) for p in (50, 90, 99)}
    return {f"mean_{name}_ms": mean(values), **percentiles}


def _finished_s(request: Request) -> float:
    assert request.finished_s is not None, "metrics are of requests that have ended"
    return request.finished_s
