"""Passes as `vllm bench serve --save-result --save-detailed --append-result` writes them:
an object for each pass, one a line.

Names and units are those of vLLM 0.32.0 (`vllm/benchmarks/serve.py`): times that end in `_ms` are
in ms, others in s. docs/results.md lists the keys that are left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from datetime import datetime

from magicdec.bench.export.export_format import (
    ExportFormat,
    Row,
    correctness_of,
    known,
    write_lines,
)
from magicdec.records.metrics import PassMetrics
from magicdec.records.pass_record import PassRecord, RequestRecord
from magicdec.systems.declaration import Ranks
from magicdec.systems.modes import Pass
from magicdec.workload.request_shapes import BURST, parse_arrival

BACKEND = "magicdec"
COMPLETIONS = "openai"  # vLLM's name of the API that `endpoint` asks
POISSON = "poisson"
STATISTICS = {"mean": "mean", "median": "p50", "p90": "p90", "p99": "p99"}  # theirs: ours
ACCEPTANCE = {  # theirs: ours
    "spec_decode_acceptance_length": "mean_acceptance_length",
    "spec_decode_num_drafts": "num_spec_steps",
    "spec_decode_draft_tokens": "num_draft_tokens",
    "spec_decode_accepted_tokens": "num_accepted_draft_tokens",
}
NAMES = ("ttft", "tpot", "itl", "e2el")


def result_of(record: PassRecord) -> Row:
    """The object of a pass that has metrics."""
    assert record.metrics is not None, "a pass without metrics has no object"
    assert record.workload is not None, "it has metrics"
    setup = {
        "date": datetime.fromisoformat(record.environment.time_utc).strftime("%Y%m%d-%H%M%S"),
        **_program(record),
        "label": record.name,
        "model_id": record.workload.model,
        "tokenizer_id": record.workload.tokenizer,
        "num_prompts": len(record.requests),
        **_traffic(record),
    }
    own = {"correctness": correctness_of(record), "random_weights": record.workload.is_random}
    acceptance = _acceptance(record.metrics)
    return setup | _served(record) | acceptance | _latencies(record) | own


def _program(record: PassRecord) -> Row:
    is_other = Pass.named(record.name).ranks is Ranks.NONE
    name = COMPLETIONS if is_other else BACKEND
    return {"endpoint_type": name, "backend": name}


def _traffic(record: PassRecord) -> Row:
    """The mean arrivals a second, and the requests in flight of a closed loop. vLLM's burstiness is
    the shape of gamma distributed distances, of which a Poisson process has 1."""
    text = record.config["workload"].get("arrival", BURST)
    if record.concurrency is not None:
        return {"request_rate": "inf", "max_concurrency": record.concurrency}
    if text == BURST:
        return {"request_rate": "inf"}
    arrival = parse_arrival(text)
    if arrival.trace is not None:
        return {}
    rate = {"request_rate": 1e3 / arrival.mean_ms}
    return rate | ({"burstiness": 1.0} if arrival.process == POISSON else {})


def _served(record: PassRecord) -> Row:
    metrics = record.metrics
    assert metrics is not None, "as in result_of"
    requests = record.requests
    prompt_tokens = sum(request.prompt_len for request in requests)
    output_tokens = sum(request.output_len for request in requests)
    return {
        "duration": metrics.duration_s,
        "completed": len(requests),
        "failed": 0,  # a pass in which a request fails has no metrics
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": metrics.request_throughput,
        "request_goodput": metrics.request_goodput,
        "output_throughput": metrics.output_throughput,
        "total_token_throughput": (prompt_tokens + output_tokens) / metrics.duration_s,
        "input_lens": [request.prompt_len for request in requests],
        "output_lens": [request.output_len for request in requests],
        "ttfts": [_ttft_ms(request) / 1e3 for request in requests],
        "latencies": [_e2el_ms(request) / 1e3 for request in requests],
        "start_times": _start_times(record),
    }


def _start_times(record: PassRecord) -> list[float]:
    """When each request arrived, in s; a group begins when the last request of the one before it
    has ended."""
    found = list[float]()
    begin_ms = 0.0
    for _, requests in record.groups_of_requests:
        first_ms = min(request.arrival_ms for request in requests)
        found += [(begin_ms + request.arrival_ms - first_ms) / 1e3 for request in requests]
        begin_ms += max(request.finished_ms for request in requests) - first_ms
    return found


def _acceptance(metrics: PassMetrics) -> Row:
    """Acceptance by vLLM's definitions. Its rate is in per cent. Its rate of a position is the
    share of all verifications that accepted the draft there, also of those that drafted fewer
    tokens, where `acceptance_per_position` of a record multiplies the rates of those that judged
    each position."""
    histogram = metrics.acceptance_histogram
    steps = metrics.num_spec_steps
    rate = metrics.draft_acceptance_rate
    if rate is None or not histogram or not steps:
        return {}
    return {
        "spec_decode_acceptance_rate": 100 * rate,
        **{theirs: getattr(metrics, ours) for theirs, ours in ACCEPTANCE.items()},
        "spec_decode_per_position_acceptance_rates": [
            sum(histogram[position:]) / steps for position in range(1, len(histogram))
        ],
    }


def _latencies(record: PassRecord) -> Row:
    """Mean, median, standard deviation and percentiles. A record has no single inter-token
    latencies, and so no deviation of them."""
    requests = record.requests
    times_ms = {
        "ttft": [_ttft_ms(request) for request in requests],
        "tpot": [tpot for request in requests if (tpot := request.tpot_ms) is not None],
        "e2el": [_e2el_ms(request) for request in requests],
    }
    found = Row()
    for name in NAMES:
        for theirs, ours in STATISTICS.items():
            found[f"{theirs}_{name}_ms"] = getattr(record.metrics, f"{ours}_{name}_ms")
        values = times_ms.get(name)
        is_known = getattr(record.metrics, f"mean_{name}_ms") is not None
        found[f"std_{name}_ms"] = statistics.pstdev(values) if values and is_known else None
    return known(found)


def _ttft_ms(request: RequestRecord) -> float:
    return request.first_token_ms - request.arrival_ms


def _e2el_ms(request: RequestRecord) -> float:
    return request.finished_ms - request.arrival_ms


def rows_of(number: int, source: str, record: PassRecord) -> Iterator[Row]:
    if record.metrics is not None:
        yield result_of(record)


VLLM = ExportFormat(
    rows={"pass": rows_of},
    holds="passes with metrics",
    suffixes=(".json", ".jsonl"),
    write=write_lines,
)
