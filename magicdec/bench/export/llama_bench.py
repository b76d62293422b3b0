"""Passes and timed forwards as llama-bench of llama.cpp writes its tests: JSON, JSON lines, or a
Markdown table with rows such as `pp2048` and `tg128 @ d8192`.

Names, units (ns, tokens/s) and statistics are those of its `tools/llama-bench` (08d0baac). Its
tests are of one sequence, without drafts: of a pass without drafts that decodes one prompt after
the other, `pp` is the prefill, which it shares with other passes, and `tg` the decoding, a sample
for each prompt. A forward of `magicdec latency` is `tg1`, of which the record has the median in
place of samples.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from magicdec.bench.export.export_format import (
    ExportFormat,
    Row,
    correctness_of,
    write_array,
    write_lines,
)
from magicdec.bench.latency.record import LatencyRecord
from magicdec.output.tables import Column, Table
from magicdec.records.pass_record import PassRecord
from magicdec.records.record import MeasuredRecord

TIME = "%Y-%m-%dT%H:%M:%SZ"
NS = 1e6  # in a ms


def rows_of_pass(number: int, source: str, record: PassRecord) -> Iterator[Row]:
    """The prefill and the decoding of a pass without drafts. Prompts of equal lengths are the
    samples of one test. A pass whose tokens are wrong has none, as it has no metrics."""
    is_one_by_one = all(group.num_requests == 1 for group in record.groups)
    if record.metrics is None or record.is_drafting or not is_one_by_one:
        return
    prefills: dict[int, list[float]] = defaultdict(list)
    decodings: dict[tuple[int, int], list[float]] = defaultdict(list)
    for group, (request,) in record.groups_of_requests:
        if group.prefill_ms is None:
            return
        prefills[request.prompt_len].append(group.prefill_ms)
        decodings[request.prompt_len, request.output_len - 1].append(sum(group.step_ms))
    about = _head(record)
    correctness = {"correctness": correctness_of(record)}
    for prompt_len, times_ms in prefills.items():
        yield about | _test(prompt_len, 0, 0) | _measured(prompt_len, times_ms) | correctness
    for (prompt_len, gen_len), times_ms in decodings.items():
        if gen_len:
            yield about | _test(0, gen_len, prompt_len) | _measured(gen_len, times_ms) | correctness


def rows_of_forwards(number: int, source: str, record: LatencyRecord) -> Iterator[Row]:
    """The decode steps of one row, whose tokens were compared with nothing."""
    uncompared = {"status": record.status, "reference": None, "num_differing": None}
    for row in record.rows:
        if row.phase == "decode" and row.B == 1:
            times = {
                "median_ns": round(NS * row.ms_median),
                "p10_ns": round(NS * row.ms_p10),
                "p90_ns": round(NS * row.ms_p90),
                "median_ts": 1e3 / row.ms_median,
            }
            test = _test(0, 1, row.context) | times
            yield _head(record) | test | {"correctness": uncompared}


def _test(n_prompt: int, n_gen: int, n_depth: int) -> Row:
    return {"n_prompt": n_prompt, "n_gen": n_gen, "n_depth": n_depth}


def _measured(num_tokens: int, times_ms: Sequence[float]) -> Row:
    samples_ns = [round(NS * ms) for ms in times_ms]
    samples_ts = [1e3 * num_tokens / ms for ms in times_ms]
    return {
        "avg_ns": round(statistics.fmean(samples_ns)),
        "stddev_ns": round(_stddev(samples_ns)),
        "avg_ts": statistics.fmean(samples_ts),
        "stddev_ts": _stddev(samples_ts),
        "samples_ns": samples_ns,
        "samples_ts": samples_ts,
    }


def _stddev(values: Sequence[float]) -> float:
    """Of a sample, as llama-bench computes it: 0 of one value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _head(record: MeasuredRecord) -> Row:
    model = record.config["model"]
    at = record.environment
    start = datetime.fromisoformat(at.time_utc).astimezone(UTC)
    return {
        "cpu_info": at.cpu,
        "gpu_info": at.gpu or "",
        "backends": str(record.config["parallel"]["device"]).upper(),
        "model_filename": model["model"],
        "n_threads": at.world_size * at.threads,  # all that compute a test, as llama-bench counts
        "test_time": start.strftime(TIME),
        "dtype": model["dtype"],
        "target_dtype": model["target_dtype"],
        "attention": record.config["attention"]["backend"],
        "world_size": at.world_size,
        "magicdec": at.magicdec,
        "revision": at.revision,
    }


def name_of(row: Row) -> str:
    """Such as pp2048, or tg128 @ d8192."""
    name = f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}"
    return f"{name} @ d{row['n_depth']}" if row["n_depth"] else name


def _speed(row: Row) -> str:
    if "avg_ts" in row:
        return f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}"
    return f"{row['median_ts']:.2f} (median)"


def _tokens(row: Row) -> str:
    found = row["correctness"]
    return found["status"] if found["reference"] else "not compared"


def markdown(rows: Sequence[Row]) -> str:
    """The table that llama-bench prints, with a column that says whether tokens were compared."""
    texts = ("model", "weights", "backend")
    columns: list[Column | str] = [
        *(Column(name, is_text=True) for name in texts),
        "threads",
        "test",
        "t/s",
        Column("tokens", is_text=True),
    ]
    lines = [
        (
            row["model_filename"],
            row["target_dtype"],
            row["backends"],
            row["n_threads"],
            name_of(row),
            _speed(row),
            _tokens(row),
        )
        for row in rows
    ]
    return Table(columns, lines).markdown()


def write(path: Path, rows: list[Row]) -> None:
    if path.suffix == ".md":
        path.write_text(markdown(rows), encoding="utf-8")
        return
    write_rows = write_array if path.suffix == ".json" else write_lines
    write_rows(path, rows)


LLAMA_BENCH = ExportFormat(
    rows={"pass": rows_of_pass, "latency": rows_of_forwards},
    holds="passes without drafts of one prompt after the other that share its prefill, and decode "
    "forwards of one row",
    suffixes=(".json", ".jsonl", ".md"),
    write=write,
)
