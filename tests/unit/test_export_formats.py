"""`magicdec export --format`: what each format holds of records written by hand, with the
definitions of the program that reads it, and what is refused."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from acceptance_records import acceptance_record
from conftest import Command
from synthetic_records import Batch, command_of, drafts_of
from written_records import (
    Line,
    failed,
    group,
    line_of,
    mismatch,
    run_line,
    served_pass,
    with_ties,
    write,
)

from magicdec.bench.export.pytorch import METRICS
from magicdec.bench.recording import MeasuredParts
from magicdec.names import EXPORTS, load_named
from magicdec.records.pass_record import RequestRecord

# Drafted, accepted and emitted tokens of each verification: the last one drafts a single token.
JUDGED = [(2, 2, 3), (2, 1, 2), (2, 0, 1), (1, 1, 2)]


def served(is_drafting: bool = False, **load: object) -> Line:
    """A pass of two requests that arrive at 0 s, with tokens at 1, 2 and 3 s and at 2, 3.5 and 6 s,
    and of one that arrives at 1.5 s, with tokens at 6 and 10 s. It is the only one of its command,
    so that nothing is compared."""
    times_s = [[1.0, 2.0, 3.0], [2.0, 3.5, 6.0], [6.0, 10.0]]
    requests = [
        RequestRecord(
            arrival_ms=1e3 * arrived_s,
            joined_ms=[0.0],
            preempted_ms=[],
            prefilled_ms=[1e3 * times[0]],
            first_token_ms=1e3 * times[0],
            finished_ms=1e3 * times[-1],
            prompt_len=prompt_len,
            output_len=len(times),
            output_hash="0",
            **(drafts_of(JUDGED, 4) if is_drafting and arrived_s == 0 and prompt_len == 4 else {}),
        )
        for times, prompt_len, arrived_s in zip(times_s, (4, 8, 16), (0.0, 0.0, 1.5), strict=True)
    ]
    gaps_ms = [1e3 * (b - a) for times in times_s for a, b in pairwise(times)]
    parts = MeasuredParts(requests, [group(3)])
    record = served_pass("inflight+draft", parts, gaps_ms, "2026-11-22T05:00:00+00:00", **load)
    return line_of(record) | UNVERIFIED


UNVERIFIED = {"status": "unverified", "reference": None, "num_differing": None}


def run_lines(rows: int = 1) -> list[Line]:
    """The passes of a run of three batches: two prompts of 8 tokens and one of 4, each with two
    tokens after the first, of which the baseline decodes one a step."""
    plain = [((0, 0, 1), (0, 0, 1))] * rows
    batches = [
        Batch(rows=plain, step_ms=step_ms, prefill_ms=prefill_ms, prompt_len=prompt_len)
        for step_ms, prefill_ms, prompt_len in (
            ([10.0, 10.0], 4.0, 8),
            ([15.0, 25.0], 8.0, 8),
            ([5.0, 5.0], 2.0, 4),
        )
    ]
    drafting = [replace(batch, rows=[((4, 1, 2),)] * rows, step_ms=[9.0]) for batch in batches]
    return [line_of(record) for record in command_of(drafting, baseline=batches)]


def run(rows: int = 1) -> Line:
    """Its pass without drafts."""
    return run_lines(rows)[0]


def forwards() -> dict[str, Any]:
    """A record of `magicdec latency`: decode steps of one row and of two, and a verification."""
    base = run_line()
    times = {"ms_median": 4.0, "ms_p10": 2.0, "ms_p90": 8.0, "bytes": 9, "roofline_fraction": 0.5}
    places = [("decode", 1, 1), ("verify", 1, 5), ("decode", 2, 1)]
    rows = [
        {
            "phase": phase,
            "B": B,
            "context": 8192,
            "T": T,
            "tokens": B * T,
            "budget": None,
            "kv_policy": None,
        }
        | times
        for phase, B, T in places
    ]
    kept = {key: base[key] for key in ("schema_version", "config", "environment")}
    return kept | {"kind": "latency", "status": "ok", "rows": rows}


def everywhere(**workload: Any) -> dict[str, Any]:
    """A record of `magicdec acceptance`."""
    found: dict[str, Any] = json.loads(acceptance_record(64, **workload).to_json())
    return found


class Exports:
    """Exports records in a folder."""

    def __init__(self, folder: Path, command: Command) -> None:
        self.folder = folder
        self.command = command

    def text(self, form: str, records: Sequence[dict[str, Any]], suffix: str = "json") -> str:
        code, _, self.printed = self.export(form, records, suffix)
        assert code == 0, self.printed
        return (self.folder / f"out.{suffix}").read_text(encoding="utf-8")

    def export(self, form: str, records: Sequence[dict[str, Any]], suffix: str) -> Any:
        path = write(self.folder / "records.jsonl", records)
        out = self.folder / f"out.{suffix}"
        return self.command("export", path, "--format", form, "--out", out)


@pytest.fixture
def exports(tmp_path: Path, command: Command) -> Exports:
    return Exports(tmp_path, command)


UNCOMPARED = UNVERIFIED | {"emulated": False}
# By hand: TTFT 1, 2 and 4.5 s, TPOT 1, 2 and 4 s, ITL 1, 1, 1.5, 2.5 and 4 s, E2EL 3, 6 and 8.5 s.
RESULT = {
    "date": "20261122-050000",
    "endpoint_type": "magicdec",
    "backend": "magicdec",
    "label": "inflight+draft",
    "model_id": "demo",
    "tokenizer_id": "demo",
    "num_prompts": 3,
    "request_rate": "inf",
    "duration": 10.0,
    "completed": 3,
    "failed": 0,
    "total_input_tokens": 28,
    "total_output_tokens": 8,
    "request_throughput": 0.3,
    "request_goodput": None,
    "output_throughput": 0.8,
    "total_token_throughput": 3.6,
    "input_lens": [4, 8, 16],
    "output_lens": [3, 3, 2],
    "ttfts": [1.0, 2.0, 4.5],
    "latencies": [3.0, 6.0, 8.5],
    "start_times": [0.0, 0.0, 1.5],
    "mean_ttft_ms": 2500.0,
    "median_ttft_ms": 2000.0,
    "std_ttft_ms": 1e3 * (13 / 6) ** 0.5,
    "p90_ttft_ms": 4000.0,
    "p99_ttft_ms": 4450.0,
    "mean_tpot_ms": 7000 / 3,
    "median_tpot_ms": 2000.0,
    "std_tpot_ms": 1e3 * (14 / 9) ** 0.5,
    "p90_tpot_ms": 3600.0,
    "p99_tpot_ms": 3960.0,
    "mean_itl_ms": 2000.0,
    "median_itl_ms": 1500.0,
    "p90_itl_ms": 3400.0,
    "p99_itl_ms": 3940.0,
    "mean_e2el_ms": 17500 / 3,
    "median_e2el_ms": 6000.0,
    "std_e2el_ms": 1e3 * (91 / 18) ** 0.5,
    "p90_e2el_ms": 8000.0,
    "p99_e2el_ms": 8450.0,
    "correctness": UNCOMPARED,
    "random_weights": False,
}

TRAFFIC = ("request_rate", "burstiness", "max_concurrency")


def test_a_pass_is_the_object_that_vllm_saves(exports: Exports) -> None:
    same(json.loads(exports.text("vllm", [served()])), RESULT)


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Equal keys and values, of which numbers may differ by their rounding."""
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        is_number = isinstance(value, float | list)
        assert found[key] == (pytest.approx(value) if is_number else value), key


def test_ties_are_exported(exports: Exports) -> None:
    """The requests that rounding explains."""
    correctness = {"status": "verified_with_ties", "reference": "static", "num_differing": 2}
    correctness |= {"emulated": False}
    ties = with_ties(run())
    found = json.loads(exports.text("llama-bench", [ties]))
    assert [row["correctness"] for row in found] == [correctness] * 4
    assert " | verified_with_ties |" in exports.text("llama-bench", [ties], "md")
    passed = with_ties(served()) | {"reference": "static"}
    assert json.loads(exports.text("vllm", [passed]))["correctness"] == correctness
    for load in json.loads(exports.text("pytorch", [passed])):
        assert load["metric"]["extra_info"]["correctness"] == correctness
    lines = list(csv.DictReader(io.StringIO(exports.text("table", [ties, passed], "csv"))))
    assert [row["status"] for row in lines] == ["verified_with_ties"] * 2
    assert [row["correctness.num_excused"] for row in lines] == ["2", "2"]
    assert [row["num_differing"] for row in lines] == ["2", "2"]


def test_two_ranks_compute_with_the_threads_of_both(exports: Exports) -> None:
    """llama-bench's `n_threads` are all that compute a test; two requests of two ranks are two."""
    ranks = run()
    ranks["environment"] |= {"world_size": 2, "threads": 3}
    rows = json.loads(exports.text("llama-bench", [ranks]))
    assert {(row["n_threads"], row["world_size"]) for row in rows} == {(6, 2)}
    assert rows[0]["samples_ns"] == [4_000_000, 8_000_000], "both ranks take part in one prefill"
    assert (
        exports.text("llama-bench", [ranks], "md")
        .splitlines()[2]
        .startswith("| demo | float32 | CPU | 6 | pp8 | 1500.00")
    )
    passed = served()
    passed["environment"] |= {"world_size": 2, "threads": 3}
    same(json.loads(exports.text("vllm", [passed])), RESULT)


def test_passes_are_lines_and_others_are_named(exports: Exports) -> None:
    right = [served(), served(arrival="poisson:250"), served(arrival="constant:500")]
    right.append(served(concurrency=4))
    lines = exports.text("vllm", [*right, forwards(), mismatch(served())]).splitlines()
    traffic = [
        {key: value for key, value in json.loads(line).items() if key in TRAFFIC} for line in lines
    ]
    rates = [{"request_rate": "inf"}, {"request_rate": 4.0, "burstiness": 1.0}]
    closed = {"request_rate": "inf", "max_concurrency": 4}
    assert traffic == [*rates, {"request_rate": 2.0}, closed]
    assert exports.printed.splitlines()[0] == (
        "records are left out, 1 of kind latency with status ok and 1 of kind pass with status "
        "mismatch: --format vllm holds passes with metrics, of kind pass"
    )


def test_a_pass_of_a_run_is_such_an_object_too(exports: Exports) -> None:
    """Three batches of one prompt each: 24, 48 and 12 ms of prefill and decoding in turn."""
    found = json.loads(exports.text("vllm", [run()]))
    assert (found["label"], found["request_rate"]) == ("static", "inf")
    assert found["start_times"] == pytest.approx([0.0, 0.024, 0.072])
    assert found["duration"] == pytest.approx(0.084)
    assert found["ttfts"] == pytest.approx([0.004, 0.008, 0.002])
    assert found["mean_tpot_ms"] == pytest.approx((10 + 20 + 5) / 3)
    assert found["correctness"]["reference"] == "static"


def test_another_program_is_named_by_its_api(exports: Exports) -> None:
    found = json.loads(exports.text("vllm", [served() | {"name": "endpoint"}]))
    assert found["backend"] == found["endpoint_type"] == "openai"


def test_acceptance_has_the_definitions_of_vllm(exports: Exports) -> None:
    """Four verifications drafted 7 tokens, of which 4 were accepted. Three of the four accepted the
    first one, and one of the four the second one, which only three of them drafted."""
    raw = served(is_drafting=True)
    found = json.loads(exports.text("vllm", [raw]))
    assert found["spec_decode_acceptance_rate"] == pytest.approx(400 / 7)
    assert found["spec_decode_acceptance_length"] == 2.0
    assert found["spec_decode_num_drafts"] == 4 and found["spec_decode_draft_tokens"] == 7
    assert found["spec_decode_accepted_tokens"] == 4
    assert found["spec_decode_per_position_acceptance_rates"] == [0.75, 0.25]
    ours = raw["metrics"]["acceptance_per_position"]
    assert ours == pytest.approx([0.75, 0.75 / 2]), "of the two that judged the second one"


@pytest.mark.parametrize("name", ["emulate_stage_ms", "emulate_link_ms"])
def test_stages_and_links_that_were_emulated_say_so(name: str, exports: Exports) -> None:
    raw = served()
    raw["config"]["workload"][name] = 3.0
    found = json.loads(exports.text("vllm", [raw]))
    assert found["correctness"] == UNCOMPARED | {"emulated": True}


def test_what_was_emulated_says_so(exports: Exports) -> None:
    raw = served(is_drafting=True)
    raw["config"]["decoding"]["emulate_acceptance"] = [0.5]
    raw["config"]["draft"] = {}
    found = json.loads(exports.text("vllm", [raw]))
    assert found["correctness"] == UNCOMPARED | {"emulated": True}


def test_the_database_has_an_object_for_each_metric(exports: Exports) -> None:
    found = json.loads(exports.text("pytorch", [served()]))
    assert [row["metric"]["name"] for row in found] == [
        name for name in METRICS if name != "std_itl_ms"
    ]
    mean = next(row for row in found if row["metric"]["name"] == "mean_ttft_ms")
    left_out = {*METRICS, "ttfts"}
    assert mean["metric"]["benchmark_values"] == [2500.0]
    assert {*mean["metric"]} == {"name", "benchmark_values", "extra_info"}
    kept = {key: value for key, value in RESULT.items() if key not in left_out}
    same(mean["metric"]["extra_info"], kept)
    for row in found:
        name = row["metric"]["name"]
        assert row["metric"]["benchmark_values"] == [pytest.approx(RESULT[name])]
    assert mean["model"] == {"name": "demo"} and mean["benchmark"]["name"] == "magicdec benchmark"
    assert mean["benchmark"]["extra_info"]["args"]["gen_len"] == 4


def test_a_run_is_the_tests_of_llama_bench(exports: Exports) -> None:
    """Two prompts of 8 tokens in 4 and 8 ms, and 2 tokens each in 20 and 40 ms. The deviation is
    that of a sample: of 4 and 8 it is the square root of 8. The pass with drafts is left out."""
    found = json.loads(exports.text("llama-bench", run_lines()))
    assert "records are left out, 1 of kind pass with status verified" in exports.printed
    keys = ("n_prompt", "n_gen", "n_depth")
    assert [tuple(row[key] for key in keys) for row in found] == [
        *((8, 0, 0), (4, 0, 0), (0, 2, 8), (0, 2, 4)),
    ]
    prefill, alone, decoding, _ = found
    assert prefill["samples_ns"] == [4_000_000, 8_000_000] and prefill["avg_ns"] == 6_000_000
    assert prefill["stddev_ns"] == 2_828_427 and prefill["samples_ts"] == [2000.0, 1000.0]
    assert prefill["avg_ts"] == 1500.0 and prefill["stddev_ts"] == pytest.approx(500 * 2**0.5)
    assert alone["avg_ts"] == 2000.0 and alone["stddev_ts"] == alone["stddev_ns"] == 0
    assert decoding["samples_ns"] == [20_000_000, 40_000_000] and decoding["avg_ts"] == 75.0
    assert decoding["test_time"] == "2026-11-22T05:00:00Z" and decoding["n_threads"] == 2
    compared = {"status": "verified", "reference": "static", "num_differing": 0}
    assert decoding["correctness"] == compared | {"emulated": False}


def test_a_forward_has_its_median_and_no_samples(exports: Exports) -> None:
    (row,) = json.loads(exports.text("llama-bench", [forwards()]))
    assert (row["n_prompt"], row["n_gen"], row["n_depth"]) == (0, 1, 8192)
    assert row["median_ns"] == 4_000_000 and row["median_ts"] == 250.0
    assert (row["p10_ns"], row["p90_ns"]) == (2_000_000, 8_000_000)
    assert not {"avg_ns", "stddev_ns", "avg_ts", "stddev_ts", "samples_ns"} & set(row)
    assert row["correctness"] == {"status": "ok", "reference": None, "num_differing": None}


def test_the_markdown_is_what_people_paste(exports: Exports) -> None:
    lines = exports.text("llama-bench", [run(), forwards()], "md").splitlines()
    weights = run()["config"]["model"]["target_dtype"]
    head = f"| demo | {weights} | CPU | 2 |"
    assert lines[0] == "| model | weights | backend | threads | test | t/s | tokens |"
    assert lines[2] == f"{head} pp8 | 1500.00 ± 707.11 | verified |"
    assert lines[4] == f"{head} tg2 @ d8 | 75.00 ± 35.36 | verified |"
    assert lines[6] == f"{head} tg1 @ d8192 | 250.00 (median) | not compared |"
    jsonl = exports.text("llama-bench", [run()], "jsonl").splitlines()
    assert [json.loads(line)["n_depth"] for line in jsonl] == [0, 0, 8, 4]


# For each format what it holds, and records that it does not hold.
HELD: dict[str, tuple[Callable[[], Line], list[Callable[[], Line]]]] = {
    "table": (served, []),
    "vllm": (served, [forwards, failed, lambda: mismatch(served())]),
    "pytorch": (served, [forwards, failed, lambda: mismatch(served())]),
    "llama-bench": (run, [served, lambda: mismatch(run()), failed, lambda: run(2), run_line]),
    "golden": (everywhere, [run, forwards, lambda: everywhere(random_weights=True)]),
}


@pytest.mark.parametrize("form", EXPORTS)
def test_each_format_has_what_it_holds_and_refuses_the_rest(form: str, exports: Exports) -> None:
    held, others = HELD[form]
    found = load_named(EXPORTS, form)
    suffix = found.suffixes[0].removeprefix(".")
    assert exports.text(form, [held()], suffix) and "left out" not in exports.printed
    (exports.folder / f"out.{suffix}").unlink()
    for other in others:
        raw = other()
        code, _, err = exports.export(form, [raw], suffix)
        assert code == 2 and err.count("\n") == 1
        assert f"no record has a row, 1 of kind {raw['kind']} with status {raw['status']}" in err
        assert f"--format {form} holds {found.holds}, of kind {' or '.join(found.rows)}" in err
        assert not (exports.folder / f"out.{suffix}").exists()
    code, _, err = exports.export(form, [held()], "txt")
    suffixes = " or ".join(found.suffixes)
    assert code == 2 and f"out.txt must end in {suffixes} with --format {form}" in err
