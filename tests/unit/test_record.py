"""PassRecord: docs/record.md says what is in it; what may not be in it cannot be made, written or
read."""

from __future__ import annotations

import datetime
import gzip
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from conftest import TINY
from identities import check_record
from magicdec.records.performance import Metrics
from magicdec.records.samples import PassSamples, PrefillSamples
from synthetic_samples import pass_samples

from magicdec.bench.run.outcome import MeasuredRun, make_record
from magicdec.config.machine import Machine
from magicdec.config.resolve import resolve
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import DecodingSection, DraftSection
from magicdec.distributed.groups import Launch
from magicdec.hardware.environment import describe_environment
from magicdec.model.checkpoint.source import ModelSource
from magicdec.records.correctness import (
    Correctness,
    Divergence,
    ForwardErrors,
    JudgedAgain,
    Misjudged,
)
from magicdec.records.pass_record import PassRecord
from magicdec.records.reading import load_passes
from magicdec.records.record import append_record
from magicdec.runner.request import Request, SamplingParams
from magicdec.setup.memory_plan import MemoryPlan
from magicdec.setup.memory_sampler import MemoryTaken, describe_memory
from magicdec.setup.prepare import Prepared
from magicdec.workload.answers import Answer, Continuation
from magicdec.workload.workload import Workload

DOCUMENT = Path(__file__).parents[2] / "docs" / "record.md"
OTHERS = "## Records of other commands"  # the heading behind which the page has no run's tables
PASSED = Correctness("autoregressive", True, 12, None, 0, 0, 1e-4)
WORST = Divergence(1, 3, 5, 9, 0.5)
DIVERGED = Correctness("autoregressive", False, 12, WORST, 0, 1, 1e-4)
TIED = replace(DIVERGED, num_excused=1, num_diverged=0)
MISJUDGED = replace(
    PASSED,
    judged_again=JudgedAgain(9, 9, 12, 1, Misjudged(1, 3, 5, 9)),
    forwards=ForwardErrors(9, 0),
)
UNCOMPARED = Correctness(None, num_tokens=12)
NO_METRICS = Metrics(bytes_read=0)


def sample_pass(name: str) -> PassSamples:
    """Two batches of one row, which emit 4 and 3 tokens after the first."""
    batches = {"autoregressive": [[0] * 4, [0] * 3], "speculative": [[1, 1], [2]]}[name]
    is_drafting = name == "speculative"
    num_steps = sum(map(len, batches))
    return pass_samples(
        begin_ms=[1.0, 2.0],
        step_ms=[[300.0 / len(batch)] * len(batch) for batch in batches],
        padded_gamma=[[4 * is_drafting for _ in batch] for batch in batches],
        num_accepted=[[[count] if is_drafting else [] for count in batch] for batch in batches],
        num_emitted=[[[1 + count] for count in batch] for batch in batches],
        sequence_tokens=[[4], [3]],
        sequence_ms=[[320.0], [300.0]],
        draft_ms=[2.0] * num_steps if is_drafting else [],
        verify_ms=[1.0] * num_steps if is_drafting else [],
        decode_ms=[] if is_drafting else [1.0] * num_steps,
        bytes_read=[[10**9], [10**9]],
        peak_memory_bytes=[[10**8], [10**8]],
        threads=[[2], [2]],
    )


def finished(name: str) -> list[Request]:
    """Two prompts' outputs; the two passes differ in the last token, as after a tie."""
    last = 9 if name == "speculative" else 8
    outputs = [[5, 6], [7, last]]
    return [Request(i, (1, 2), SamplingParams(2), ids) for i, ids in enumerate(outputs)]


ANSWERS = (Continuation((5, 6)), Continuation((7, 8)))


def run_record(
    strategy: str,
    correctness: Correctness,
    is_random: bool = False,
    answers: tuple[Answer, ...] | None = None,
    has_draft: bool = False,
    categories: tuple[str | None, ...] | None = None,
) -> PassRecord:
    """What a run of these samples would write, without the run."""
    launch = Launch(0, 1, 0, 1)
    drafter = None if strategy == "autoregressive" else "model" if has_draft else "self"
    decoding = DecodingSection(strategy, drafter)
    draft = DraftSection() if has_draft else None
    config = resolve(RunConfig(draft=draft, decoding=decoding), Machine(2))
    prompts = (1, 2), (3, 4)
    places = (0, 1), (2, 3)
    workload = Workload("demo", prompts, places, 9, 0, 123, "c0ffee", answers, categories)
    weights = SimpleNamespace(tensors={}, read=lambda _: torch.ones(TINY.hidden_size))
    source = ModelSource("demo", TINY, weights, None, is_random)  # type: ignore[arg-type]
    draft_source = source if has_draft else None
    prepared = Prepared(
        config,
        launch,
        Machine(2),
        source,
        draft_source,
        tokenizer=cast(Any, None),
        tokenizer_name="demo",
        workload=workload,
    )
    passes = dict.fromkeys((*(["autoregressive"] if correctness.reference else []), strategy))
    samples = {name: sample_pass(name) for name in passes}
    if has_draft:
        samples[strategy].draft_prefill_ms = [1.0, 2.0]
    measured = MeasuredRun(
        samples,
        {name: finished(name) for name in passes},
        PrefillSamples(prefill_ms=[100.0, 200.0], ttft_ms=[[100.0], [200.0]], num_tokens=[2, 2]),
        MemoryTaken(10**8, 3 * 10**8),
    )
    started = datetime.datetime.now(datetime.UTC)
    environment = describe_environment(launch, "cpu", started)
    environment = replace(environment, read_bandwidth_bytes_per_s=1e10)
    return make_record(prepared, measured, correctness, environment)


def failed_record() -> PassRecord:
    ran = run_record("autoregressive", UNCOMPARED)
    environment = describe_environment(Launch(0, 2, 0, 2), "cpu", datetime.datetime.now())
    memory = describe_memory(MemoryPlan(1, 2), None)
    error = "RuntimeError: no"
    return PassRecord(
        status="failed",
        config=ran.config,
        environment=environment,
        error=error,
        workload=ran.workload,
        memory=memory,
    )


RECORDS = {
    "speculative": lambda: run_record("speculative", PASSED),
    "tie": lambda: run_record("speculative", TIED),
    "diverged": lambda: run_record("speculative", DIVERGED),
    "misjudged": lambda: run_record("speculative", MISJUDGED),
    "baseline": lambda: run_record("autoregressive", UNCOMPARED),
    "alone": lambda: run_record("speculative", UNCOMPARED),
    "random": lambda: run_record("speculative", PASSED, is_random=True),
    "drafted": lambda: run_record("speculative", UNCOMPARED, has_draft=True),
    "answered": lambda: run_record("speculative", PASSED, answers=ANSWERS),
    "categorized": lambda: run_record("speculative", PASSED, categories=("qa", None)),
    "failed": failed_record,
}


def documented() -> dict[str, dict[str, str]]:
    """Section path -> key -> when it is null, from a run's tables; the top level is ''."""
    of_runs, _, others = DOCUMENT.read_text(encoding="utf-8").partition(OTHERS)
    assert others, f"{DOCUMENT.name} has the heading {OTHERS}"
    sections: dict[str, dict[str, str]] = {}
    names: list[str] = []
    for line in of_runs.splitlines():
        if line.startswith("#"):
            names = re.findall(r"`([^`]+)`", line) or [""]
        elif row := re.match(r"\| `([^`]+)` \|", line):
            for name in names:
                keys = sections.setdefault(name, {})
                assert row[1] not in keys, f"{name}.{row[1]} is documented twice"
                keys[row[1]] = line.split("|")[-2].strip()
    return sections


HASHES = "environment.kernels"  # by the names of libraries, which are no keys of the schema
NAMED = {"samples": "<pass>", "metrics.acceptance_by_category": "<category>"}


def objects(value: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object of a record by path; names of passes are one name, and those of categories."""
    if path in NAMED:
        value = {NAMED[path]: next(iter(value.values()))}
    yield path, value
    for key, inner in value.items():
        if isinstance(inner, dict) and f"{path}.{key}" != HASHES:
            yield from objects(inner, f"{path}.{key}".lstrip("."))


@pytest.mark.parametrize("kind", RECORDS)
def test_the_document_has_the_keys_of_real_records(kind: str) -> None:
    tables = documented()
    for path, value in objects(json.loads(RECORDS[kind]().to_json())):
        assert set(value) == set(tables[path]), path
        for key, inner in value.items():
            absent = tables[path][key]
            assert inner is not None or not absent.startswith("never"), f"{path}.{key} is null"


def test_every_documented_object_is_in_some_record() -> None:
    seen = {p for make in RECORDS.values() for p, _ in objects(json.loads(make().to_json()))}
    assert set(documented()) == seen


def test_the_documented_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("speculative", "failed", "diverged", "tie"):
        append_record(tmp_path / "results/runs.jsonl", RECORDS[kind]())
    monkeypatch.chdir(tmp_path)
    example = DOCUMENT.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["speedups"] == [1.0, 1.0]


def test_the_workload_is_described_without_its_prompts() -> None:
    workload = RECORDS["speculative"]().workload
    assert workload is not None
    assert (workload.num_prompts, workload.prefix_len, workload.num_available) == (2, 2, 9)
    assert workload.sources == [[0, 1], [2, 3]]


def test_only_correct_runs_have_performance() -> None:
    for kind, make in RECORDS.items():
        record = make()
        is_correct = kind not in ("diverged", "misjudged", "failed")
        assert (record.metrics is not None) == is_correct, kind
        assert (record.baseline_metrics is not None) == (
            kind in ("speculative", "tie", "random", "answered", "categorized")
        )
        if is_correct and kind != "random":
            check_record(record)


def test_each_pass_has_the_score_of_its_own_answers() -> None:
    record = RECORDS["answered"]()
    assert record.metrics is not None and record.baseline_metrics is not None
    assert record.metrics.answer_score == 0.75
    assert record.baseline_metrics.answer_score == 1.0
    for strategy, is_random, answers in (
        ("speculative", True, ANSWERS),
        ("speculative", False, None),
        ("autoregressive", True, ANSWERS),
    ):
        metrics = run_record(strategy, UNCOMPARED, is_random, answers).metrics
        assert metrics is not None and metrics.answer_score is None


def test_random_weights_have_times_but_no_acceptance() -> None:
    found = [RECORDS[kind]().metrics for kind in ("random", "speculative")]
    metrics, trained = (asdict(m) for m in found if m is not None)
    withheld = {key for key in metrics if metrics[key] is None} - {
        key for key in trained if trained[key] is None
    }
    assert withheld == {
        "draft_acceptance_rate",
        "mean_acceptance_length",
        "acceptance_per_position",
        "num_spec_steps",
        "num_draft_tokens",
        "num_accepted_draft_tokens",
        "acceptance_histogram",
        "judged_per_position",
        "mean_draft_tokens",
        "tokens_per_verification",
        "speedup",
        "speedup_per_group",
        "net_speedup",
        "net_speedup_per_group",
        "total_speedup",
        "total_speedup_per_group",
        "decode_tokens_per_s",
        "mean_tpot_ms",
        "p50_tpot_ms",
        "p90_tpot_ms",
        "p99_tpot_ms",
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"status": "diverged", "correctness": DIVERGED, "metrics": NO_METRICS},
        {"status": "diverged", "correctness": DIVERGED, "baseline_metrics": NO_METRICS},
        {"status": "failed", "error": "E: no", "metrics": NO_METRICS},
        {"status": "failed", "error": "E: no", "baseline_metrics": NO_METRICS},
        {"status": "failed", "error": "E: no", "correctness": PASSED, "metrics": NO_METRICS},
        {"status": "failed"},
        {"status": "ok", "correctness": PASSED, "error": "E: no"},
        {"status": "ok"},
        {"status": "ok", "correctness": DIVERGED},
        {"status": "ok", "correctness": MISJUDGED},
        {"status": "ok", "correctness": Correctness("autoregressive")},
        {"status": "ok_with_ties", "correctness": PASSED},
        {"status": "ok_with_ties", "correctness": UNCOMPARED},
        {"status": "ok_with_ties", "correctness": DIVERGED},
        {"status": "diverged", "correctness": TIED},
        {"status": "diverged", "correctness": PASSED},
        {"status": "diverged", "correctness": UNCOMPARED},
        {"status": "passed", "correctness": PASSED},
    ],
)
def test_contradictions_cannot_be_made(fields: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        small(**({"correctness": None, "metrics": None} | fields))


def small(**fields: Any) -> PassRecord:
    """A record that passed, the same each time, with these fields."""
    record = RECORDS["baseline"]()
    time_utc = "2026-11-22T05:00:00+00:00"
    environment = replace(record.environment, time_utc=time_utc, host_load=1.5, revision=None)
    return replace(record, **({"environment": environment, "correctness": PASSED} | fields))


def test_a_record_is_one_line_that_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "runs.jsonl"
    odd = replace(small().environment, argv=["a\nb", "\u2028", "é"])
    records = [small(environment=odd), small(margin=0.1)]
    for record in records:
        append_record(path, record)
    assert path.read_bytes().count(b"\n") == 2 and path.read_bytes().endswith(b"\n")
    loaded = load_passes(path)
    assert [json.loads(r.to_json()) for r in loaded] == [json.loads(r.to_json()) for r in records]
    assert loaded[0].environment.argv == ["a\nb", "\u2028", "é"]
    assert [record.margin for record in loaded] == [None, 0.1]


@pytest.mark.parametrize("before", [b"", b"\n", b'{"cut of', b'{"whole": 1}\n', b"\xff\n\nx"])
def test_appending_closes_a_cut_line_and_rewrites_nothing(tmp_path: Path, before: bytes) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_bytes(before)
    append_record(path, small())
    closed = b"\n" if before and not before.endswith(b"\n") else b""
    assert path.read_bytes() == before + closed + small().to_json().encode() + b"\n"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_a_number_is_neither_written_nor_read(tmp_path: Path, value: float) -> None:
    path = tmp_path / "runs.jsonl"
    append_record(path, small())
    written = path.read_bytes()
    with pytest.raises(ValueError, match="not JSON compliant"):
        append_record(path, small(metrics=replace(NO_METRICS, speedup=value)))
    assert path.read_bytes() == written
    path.write_text(json.dumps(json.loads(small().to_json()) | {"margin": value}))
    with pytest.raises(ValueError, match=f"{path}:1: not a JSON record"):
        load_passes(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"cut of', "not a JSON record"),
        ("[1]", "not a record; it is not an object"),
        ("{}", "not a record; schema_version is None"),
        ('{"schema_version": 1}', "schema_version is 1, this program reads 3; measure it again"),
        ('{"schema_version": 3}', "not a record; its kind is None, none of run, serving,"),
        ('{"schema_version": 3, "kind": "walk"}', "not a record; its kind is walk, none of run,"),
        ('{"kind": "run", "schema_version": 3}', "not a record; it has no "),
    ],
)
def test_a_bad_line_is_named_with_its_file(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(f"{small().to_json()}\n\n{line}\n")
    with pytest.raises(ValueError, match=re.escape(f"{path}:3: {message}")) as error:
        load_passes(path, is_strict=True)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("torn", [b'{"kind": "run", "stat', b"\xff\xfe", b"{}}", b"[1]"])
def test_a_torn_line_costs_no_other_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], torn: bytes
) -> None:
    path = tmp_path / "runs.jsonl"
    append_record(path, small())
    with path.open("ab") as file:
        file.write(torn)
    append_record(path, small())
    assert len(load_passes(path)) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"{path}:2: ") and said[0].endswith("; this line is skipped")
    with pytest.raises(ValueError, match=f"{path}:2: "):
        load_passes(path, is_strict=True)


@pytest.mark.parametrize("version", [0, 1, 4])
def test_a_record_of_another_version_is_refused_by_name(tmp_path: Path, version: int) -> None:
    """It is whole, so it is not skipped as a damaged line is. The error says how it was made."""
    path = tmp_path / "runs.jsonl"
    other = json.loads(small().to_json()) | {"schema_version": version}
    path.write_text(f"{small().to_json()}\n{json.dumps(other)}\n")
    again = shlex.join(other["environment"]["argv"])
    message = (
        f"{path}:2: schema_version is {version}, this program reads 3; measure it again: {again}"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        load_passes(path)


def test_a_compressed_file_is_read_and_a_torn_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl.gz"
    packed = gzip.compress(f"{small().to_json()}\n".encode())
    path.write_bytes(packed)
    assert [record.to_json() for record in load_passes(path)] == [small().to_json()]
    for torn in (packed[:-12], b"no gzip", packed[:20] + bytes(8) + packed[28:]):
        path.write_bytes(torn)
        with pytest.raises(ValueError, match=f"{re.escape(str(path))}: .*; give a file of records"):
            load_passes(path)
