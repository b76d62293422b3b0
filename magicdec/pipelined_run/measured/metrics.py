"""SpeculationMetrics: how fast the requests were served by pipelined speculation; and
SpeculationRecord, the JSON line of each pass of `magicdec pipeline`
(docs/pipelined_speculation.md is made from these classes).

Owns the definition of every metric of time. Must not know how anything is measured. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from magicdec.pipelined_run.measured.use import PipelineUse
from magicdec.records.fields import Part, recorded
from magicdec.request import Request
from magicdec.serving.metrics import ONE_TOKEN, Moves, gaps_ms, request_ms, summary
from magicdec.serving.record import PassRecord


@dataclass(frozen=True, kw_only=True)
class SpeculationMetrics(Part):
    """Shares of time are of the time between the first token and the last. Percentiles are
    interpolated linearly, as in numpy."""

    request_tokens_per_s: float = recorded(
        "tokens of a request after its first, divided by the time from the first to the last; "
        "mean over the requests", "tokens/s", label="tokens/s of a request", digits=2,
    )  # fmt: skip
    predicted_request_tokens_per_s: float | None = recorded(
        "the same as simulated, with the measured times of the stages, links and drafts, and with "
        "the candidates that the drafter gave", "tokens/s", label="predicted", digits=2,
        null="of the baseline, and where requests have several output lengths",
    )  # fmt: skip
    output_throughput: float = recorded(
        "output tokens of all requests divided by the makespan", "tokens/s",
        label="output tokens/s", digits=2,
    )  # fmt: skip
    makespan_s: float = recorded(
        "time from the arrival of the requests to the last token", "s", label="makespan, s",
        digits=2,
    )  # fmt: skip
    prefill_tokens_per_s: float = recorded(
        "prompt tokens of a request divided by the time from the launch of its first run, or the "
        "begin of its first step in one process, to its first token; the time that it waits for a "
        "lane does not count; mean over the requests", "tokens/s",
        label="prefill, tokens/s", digits=1,
    )  # fmt: skip
    mean_ttft_ms: float = recorded(
        "time to first token; mean over the requests", "ms", label="TTFT mean, ms", digits=1
    )
    p50_ttft_ms: float = recorded("median of the same", "ms")
    p90_ttft_ms: float = recorded("its 90th percentile", "ms")
    p99_ttft_ms: float = recorded("its 99th percentile", "ms")
    mean_itl_ms: float | None = recorded(
        "time between two commits of tokens of the same request; mean over all of them", "ms",
        label="ITL mean, ms", digits=2, null=ONE_TOKEN,
    )  # fmt: skip
    p50_itl_ms: float | None = recorded(
        "median of the same", "ms", label="ITL p50, ms", digits=2, null=ONE_TOKEN
    )
    p90_itl_ms: float | None = recorded("its 90th percentile", "ms", null=ONE_TOKEN)
    p99_itl_ms: float | None = recorded(
        "its 99th percentile", "ms", label="ITL p99, ms", digits=2, null=ONE_TOKEN
    )
    use: PipelineUse | None = recorded(
        "what was launched and skipped, and how the ranks spent their time", null="of the baseline"
    )


def speculation_metrics(
    requests: Sequence[Request],
    moves: Mapping[int, Moves],
    use: PipelineUse | None,
    predicted: float | None,
) -> SpeculationMetrics:
    """The metrics of finished requests, which arrived together. `moves` says by the id of a request
    when it got its lane. `predicted` are the tokens/s of a request as simulated."""
    times = [request_ms(request) for request in requests]
    ends = [request.token_times_s[-1] for request in requests]
    makespan_s = max(ends) - min(request.arrived_s for request in requests)
    rates = [1e3 / of["tpot"] for of in times if of.get("tpot")]
    return SpeculationMetrics(
        request_tokens_per_s=sum(rates) / len(times),
        predicted_request_tokens_per_s=predicted,
        output_throughput=sum(len(request.output_ids) for request in requests) / makespan_s,
        makespan_s=makespan_s,
        prefill_tokens_per_s=fmean(prefill_speed(r, moves[r.request_id]) for r in requests),
        use=use,
        **summary("ttft", [of["ttft"] for of in times]),
        **summary("itl", [gap for request in requests for gap in gaps_ms(request)]),
    )


def prefill_speed(request: Request, moves: Moves) -> float:
    """The prompt tokens of a finished request, divided by the seconds from when it got its lane to
    its first token."""
    assert request.first_token_s is not None, "what has ended has a first token"
    (joined_s,) = moves.joined_s  # nothing is preempted here
    return len(request.prompt_ids) / (request.first_token_s - joined_s)


@dataclass(frozen=True, kw_only=True)
class SpeculationRecord(PassRecord):
    """A pass of `magicdec pipeline`: a name of `--modes`."""

    kind: Literal["speculation"] = recorded("`speculation`", default="speculation")
    metrics: SpeculationMetrics | None = recorded("its metrics", null="if `diverged`")
