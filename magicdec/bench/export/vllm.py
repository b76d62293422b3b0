"""Serving passes as `vllm bench serve --save-result --save-detailed --append-result` writes them:
an object for each pass, one a line.

Names and units are those of vLLM 0.32.0 (`vllm/benchmarks/serve.py`): times that end in `_ms` are
in ms, others in s. docs/results.md lists the keys that are left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from datetime import datetime

from magicdec.bench.export.form import ExportFormat, Row, known, outcome, write_lines
from magicdec.bench.serving.metrics import ServingMetrics
from magicdec.bench.serving.record import RequestRecord, ServingRecord
from magicdec.systems.declaration import Ranks
from magicdec.systems.modes import Pass
from magicdec.workload.request_shapes import BURST, TRACE, parse_arrival

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


def result_of(record: ServingRecord) -> Row:
    """The object of a pass that has metrics."""
    assert record.metrics is not None, "a pass without metrics has no object"
    setup = {
        "date": datetime.fromisoformat(record.environment.time_utc).strftime("%Y%m%d-%H%M%S"),
        **_program(record),
        "label": record.name,
        "model_id": record.workload.model,
        "tokenizer_id": record.workload.tokenizer,
        "num_prompts": len(record.requests),
        **_traffic(record),
    }
    own = {"correctness": outcome(record), "random_weights": record.workload.is_random}
    acceptance = _acceptance(record.metrics)
    return setup | _served(record) | acceptance | _latencies(record) | own


def _program(record: ServingRecord) -> Row:
    is_other = Pass.named(record.name).ranks is Ranks.NONE
    name = COMPLETIONS if is_other else BACKEND
    return {"endpoint_type": name, "backend": name}


def _traffic(record: ServingRecord) -> Row:
    """The mean arrivals a second, and the requests in flight of a closed loop. vLLM's burstiness is
    the shape of gamma distributed distances, of which a Poisson process has 1."""
    text = str(record.config["workload"]["arrival"])
    if record.concurrency is not None:
        return {"request_rate": "inf", "max_concurrency": record.concurrency}
    if text == BURST:
        return {"request_rate": "inf"}
    if text.startswith(f"{TRACE}:"):
        return {}
    arrival = parse_arrival(text)
    rate = {"request_rate": 1e3 / arrival.mean_ms}
    return rate | ({"burstiness": 1.0} if arrival.process == POISSON else {})


def _served(record: ServingRecord) -> Row:
    metrics = record.metrics
    assert metrics is not None, "as in result_of"
    requests = record.requests
    prompt_tokens = sum(each.prompt_len for each in requests)
    output_tokens = sum(each.output_len for each in requests)
    return {
        "duration": metrics.makespan_s,
        "completed": len(requests),
        "failed": 0,  # a pass in which a request fails has no metrics
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": metrics.request_throughput,
        "request_goodput": metrics.request_goodput,
        "output_throughput": metrics.output_throughput,
        "total_token_throughput": (prompt_tokens + output_tokens) / metrics.makespan_s,
        "input_lens": [each.prompt_len for each in requests],
        "output_lens": [each.output_len for each in requests],
        "ttfts": [_ttft_ms(each) / 1e3 for each in requests],
        "latencies": [_e2el_ms(each) / 1e3 for each in requests],
        "start_times": [each.arrival_ms / 1e3 for each in requests],
    }


def _acceptance(metrics: ServingMetrics) -> Row:
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


def _latencies(record: ServingRecord) -> Row:
    """Mean, median, standard deviation and percentiles. A record has no single inter-token
    latencies, and so no deviation of them."""
    requests = record.requests
    times_ms = {
        "ttft": [_ttft_ms(each) for each in requests],
        "tpot": [
            (each.finished_ms - each.first_token_ms) / (each.output_len - 1)
            for each in requests
            if each.output_len > 1
        ],
        "e2el": [_e2el_ms(each) for each in requests],
    }
    found = Row()
    for name in NAMES:
        for theirs, ours in STATISTICS.items():
            found[f"{theirs}_{name}_ms"] = getattr(record.metrics, f"{ours}_{name}_ms")
        values = times_ms.get(name)
        found[f"std_{name}_ms"] = statistics.pstdev(values) if values else None
    return known(found)


def _ttft_ms(request: RequestRecord) -> float:
    return request.first_token_ms - request.arrival_ms


def _e2el_ms(request: RequestRecord) -> float:
    return request.finished_ms - request.arrival_ms


def rows_of(number: int, source: str, record: ServingRecord) -> Iterator[Row]:
    if record.metrics is not None:
        yield result_of(record)


VLLM = ExportFormat(
    kinds=("serving",),
    holds="passes with metrics",
    suffixes=(".json", ".jsonl"),
    rows=rows_of,
    write=write_lines,
)
