"""Passes as PyTorch's benchmark database takes them: a list with an object for each metric.

The objects, metrics and keys are those that `vllm bench serve` of vLLM 0.32.0 writes with
SAVE_TO_PYTORCH_BENCHMARK_FORMAT (`convert_to_pytorch_benchmark_format` in
`vllm/benchmarks/lib/utils.py`). What it says of torch.compile is left out.
"""

from __future__ import annotations

from collections.abc import Iterator

from magicdec.bench.export.export_format import ExportFormat, Row, write_array
from magicdec.bench.export.vllm import result_of
from magicdec.records.pass_record import PassRecord

BENCHMARK = "magicdec benchmark"
METRICS = (
    "median_ttft_ms",
    "mean_ttft_ms",
    "std_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "median_tpot_ms",
    "std_tpot_ms",
    "p99_tpot_ms",
    "median_itl_ms",
    "mean_itl_ms",
    "std_itl_ms",
    "p99_itl_ms",
)
TOO_LONG = ("ttfts", "itls", "generated_texts", "errors")  # which vLLM leaves out


def rows_of(number: int, source: str, record: PassRecord) -> Iterator[Row]:
    """An object for each metric that the record has; values are in ms."""
    if record.metrics is None or record.workload is None:
        return
    result = result_of(record)
    more = {key: value for key, value in result.items() if key not in (*METRICS, *TOO_LONG)}
    for name in METRICS:
        if name in result:
            yield {
                "benchmark": {
                    "name": BENCHMARK,
                    "extra_info": {"args": dict(record.config["workload"])},
                },
                "model": {"name": record.workload.model},
                "metric": {
                    "name": name,
                    "benchmark_values": [result[name]],
                    "extra_info": dict(more),
                },
            }


PYTORCH = ExportFormat(
    rows={"pass": rows_of},
    holds="passes with metrics",
    suffixes=(".json",),
    write=write_array,
)
