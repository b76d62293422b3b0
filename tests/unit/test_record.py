"""PassRecord: docs/record.md says what is in it; what may not be in it cannot be made, written or
read."""

from __future__ import annotations

import gzip
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from identities import check_record
from synthetic_records import (
    IDENTICAL,
    KINDS,
    PLAIN,
    STEPS,
    Batch,
    command_of,
    parts_of,
    served,
)

from magicdec.bench.recording import MeasuredParts
from magicdec.config.machine import Machine
from magicdec.config.resolve import resolve
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import DecodingSection, DraftSection
from magicdec.names import load_object
from magicdec.records.computing import Beside, pass_metrics
from magicdec.records.correctness import (
    Correctness,
    Divergence,
    ForwardErrors,
    JudgedAgain,
    Misjudged,
)
from magicdec.records.describe import verdict_of
from magicdec.records.pass_record import PassRecord
from magicdec.records.reading import load_passes
from magicdec.records.record import Status, append_together
from magicdec.records.workload import ModelRecord
from magicdec.setup.memory_plan import MemoryPlan
from magicdec.setup.memory_sampler import MemoryTaken, describe_memory
from magicdec.systems.modes import SYSTEMS

DOCUMENT = Path(__file__).parents[2] / "docs" / "record.md"
OTHERS = "## Records of other commands"  # the heading behind which the page has no pass's tables
WORST = Divergence(1, 3, 5, 9, 0.5)
DIVERGED = replace(
    IDENTICAL, identical=False, first_divergence=WORST, num_excused=0, num_diverged=1
)
TIED = replace(DIVERGED, num_excused=1, num_diverged=0)
MISJUDGED = replace(
    IDENTICAL,
    judged_again=JudgedAgain(9, 9, 12, 1, Misjudged(1, 3, 5, 9)),
    forwards=ForwardErrors(9, 0),
)
UNCOMPARED = Correctness(None, num_tokens=12)
MEMORY = describe_memory(MemoryPlan(1, 2), None, MemoryTaken(10**8, 3 * 10**8))
NO_METRICS: dict[str, Any] = {
    "metrics": None,
    "details": None,
    "times_by_turn": None,
    "acceptance_by_context": None,
}
MISMATCH: dict[str, Any] = {"status": Status.MISMATCH, "num_differing": 1, **NO_METRICS}
ALONE: dict[str, Any] = {
    "status": Status.UNVERIFIED,
    "correctness": UNCOMPARED,
    "reference": None,
    "num_differing": None,
}


def batches(has_draft: bool = False) -> list[Batch]:
    """Two batches of one row, which emit 4 and 3 tokens after the first."""
    rows = [[(4, 1, 2), (4, 1, 2)]], [[(4, 2, 3)]]
    return [
        Batch(
            rows=batch_rows,
            step_ms=[300.0 / len(batch_rows[0])] * len(batch_rows[0]),
            begin_ms=1.0 + number,
            draft_prefill_ms=1.0 + number if has_draft else None,
            prefill_ms=100.0 * (1 + number),
            draft_ms=[2.0] * len(batch_rows[0]),
            verify_ms=[1.0] * len(batch_rows[0]),
            bytes_read=[10**9],
            peak_memory_bytes=[10**8],
        )
        for number, batch_rows in enumerate(rows)
    ]


def plain_batches() -> list[Batch]:
    return [
        Batch(
            rows=[[(0, 0, 1)] * count],
            step_ms=[300.0 / count] * count,
            begin_ms=1.0,
            prefill_ms=100.0 * (1 + number),
            decode_ms=[1.0] * count,
        )
        for number, count in enumerate((4, 3))
    ]


def run_records(has_draft: bool = False, **beside: Any) -> tuple[PassRecord, PassRecord]:
    """Both passes of a run."""
    command = command_of(batches(has_draft), baseline=plain_batches(), **beside)
    plain, drafting = (replace(record, memory=MEMORY) for record in command)
    return plain, drafting


def random_record() -> PassRecord:
    """The drafting pass of a model with random weights: nothing of drafts stands in it."""
    record = run_records(is_random=True)[1]
    assert record.workload is not None
    silent = dict.fromkeys(
        (
            "num_draft_tokens",
            "num_accepted_draft_tokens",
            "num_spec_steps",
            "acceptance_histogram",
            "per_step_drafted",
            "per_step_accepted",
            "per_step_emitted",
        )
    )
    requests = [replace(request, **silent) for request in record.requests]  # type: ignore[arg-type]
    workload = replace(record.workload, random_weights=True)
    return replace(record, requests=requests, workload=workload, acceptance_by_context=None)


def drafted_record() -> PassRecord:
    """Of a run with a standalone draft."""
    record = run_records(has_draft=True)[1]
    draft = ModelRecord(model="d", random_weights=False, model_sha256="s")
    assert record.workload is not None
    decoding = DecodingSection("speculative", "model")
    config = resolve(RunConfig(draft=DraftSection(), decoding=decoding), Machine(2)).to_dict()
    return replace(record, config=config, workload=replace(record.workload, draft=draft))


def categorized_record() -> PassRecord:
    categories: list[str | None] = ["qa", None]
    record = run_records(categories=categories)[1]
    assert record.workload is not None
    return replace(record, workload=replace(record.workload, categories=categories))


def failed_record() -> PassRecord:
    ran = run_records()[1]
    return PassRecord(
        status=Status.FAILED,
        name=ran.name,
        config=ran.config,
        environment=ran.environment,
        error="RuntimeError: no",
        workload=ran.workload,
        memory=describe_memory(MemoryPlan(1, 2), None),
        requests=[],
        groups=[],
    )


def drafting(**fields: Any) -> PassRecord:
    return replace(run_records()[1], **fields)


RECORDS = {
    "drafting": drafting,
    "plain": lambda: run_records()[0],
    "tie": lambda: drafting(status=Status.VERIFIED_WITH_TIES, correctness=TIED, num_differing=1),
    "mismatch": lambda: drafting(correctness=DIVERGED, **MISMATCH),
    "misjudged": lambda: drafting(correctness=MISJUDGED, **(MISMATCH | {"num_differing": 0})),
    "alone": lambda: drafting(**ALONE),
    "random": random_record,
    "drafted": drafted_record,
    "categorized": categorized_record,
    "failed": failed_record,
    **{f"served {kind}": lambda kind=kind: served(kind) for kind in KINDS},  # type: ignore[misc]
}


def documented() -> dict[str, dict[str, str]]:
    """Section path -> key -> when it is null, from a run's tables; the top level is ''."""
    run_lines, _, others = DOCUMENT.read_text(encoding="utf-8").partition(OTHERS)
    assert others, f"{DOCUMENT.name} has the heading {OTHERS}"
    sections: dict[str, dict[str, str]] = {}
    names: list[str] = []
    for line in run_lines.splitlines():
        if line.startswith("#"):
            names = re.findall(r"`([^`]+)`", line) or [""]
        elif row := re.match(r"\| `([^`]+)` \|", line):
            for name in names:
                keys = sections.setdefault(name, {})
                assert row[1] not in keys, f"{name}.{row[1]} is documented twice"
                keys[row[1]] = line.split("|")[-2].strip()
    return sections


HASHES = "environment.kernels"  # by the names of libraries, which are no keys of the schema
NAMED = {
    "metrics.acceptance_by_category": "<category>",
    "acceptance_by_turn": "<turns>",
    "acceptance_by_hit": "<hit>",
    "acceptance_by_grown_context": "<tokens>",
}
DETAIL = "details"  # whose keys are those of the class of its kind


def objects(value: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object of a record by path; names of categories are one name, and objects in lists
    are one."""
    if path in NAMED:
        value = {NAMED[path]: next(iter(value.values()))}
    yield path, value
    for key, inner in value.items():
        place = f"{path}.{key}".lstrip(".")
        if isinstance(inner, dict) and place not in (HASHES, DETAIL, "config.workload"):
            yield from objects(inner, place)
        if isinstance(inner, list) and inner and isinstance(inner[0], dict):
            yield from objects(inner[0], f"{place}[]")


@pytest.mark.parametrize("kind", RECORDS)
def test_the_document_has_the_keys_of_real_records(kind: str) -> None:
    tables = documented()
    for path, value in objects(json.loads(RECORDS[kind]().to_json())):
        if kind.startswith("served ") and path == "config":
            assert set(value) <= set(tables[path]), "it has no section `output`"
        else:
            assert set(value) == set(tables[path]), path
        for key, inner in value.items():
            absent = tables[path][key]
            assert inner is not None or not absent.startswith("never"), f"{path}.{key} is null"


def test_every_documented_object_is_in_some_record() -> None:
    seen = {p for make in RECORDS.values() for p, _ in objects(json.loads(make().to_json()))}
    kinds = {load_object(system.details).name() for system in SYSTEMS.values() if system.details}
    details = {f"Details of kind `{kind}`" for kind in kinds}
    page = DOCUMENT.read_text(encoding="utf-8")
    assert all(heading in page for heading in details)
    assert {*documented()} - kinds == seen | {"config.workload"}


def test_the_documented_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [RECORDS[kind]() for kind in ("plain", "drafting", "failed", "mismatch", "tie")]
    append_together(tmp_path / "results/runs.jsonl", records)
    monkeypatch.chdir(tmp_path)
    example = DOCUMENT.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["speedups"] == [1.0, 1.0]


def test_only_passes_that_are_not_known_to_be_wrong_have_metrics() -> None:
    for kind, make in RECORDS.items():
        record = make()
        is_correct = kind not in ("mismatch", "misjudged", "failed")
        assert (record.metrics is not None) == is_correct == record.passed, kind
        if is_correct and kind != "random" and record.shares_prefill:
            check_record(record)


def test_a_pass_has_the_mean_score_of_its_answers() -> None:
    parts = parts_of(batches())
    assert pass_metrics(parts, Beside(is_drafting=True)).answer_score is None
    scored = [
        replace(request, answer_score=score)
        for request, score in zip(parts.requests, (0.5, 1.0), strict=True)
    ]
    found = pass_metrics(MeasuredParts(scored, parts.groups), Beside(is_drafting=True))
    assert found.answer_score == 0.75


def test_a_pass_says_what_it_is() -> None:
    plain, ours = run_records()
    assert (plain.is_drafting, ours.is_drafting) == (False, True)
    assert plain.is_reference and not ours.is_reference and plain.shares_prefill
    assert failed_record().shares_prefill and not served(PLAIN).shares_prefill
    lone = served(STEPS)
    assert not lone.is_reference and lone.mode == lone.name
    assert replace(lone, name="inflight, 4 at once").mode == "inflight"


def test_random_weights_have_times_but_no_acceptance() -> None:
    found = [RECORDS[kind]().metrics for kind in ("random", "drafting")]
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
        "throughput_ratio",
        "throughput_ratio_per_group",
        "output_throughput",
        "steady_output_throughput",
        "mean_tpot_ms",
        "p50_tpot_ms",
        "p90_tpot_ms",
        "p99_tpot_ms",
    }


METRICS = run_records()[1].metrics


@pytest.mark.parametrize(
    "fields",
    [
        MISMATCH | {"correctness": DIVERGED, "metrics": METRICS},
        {"status": Status.FAILED, "error": "E: no", "metrics": METRICS},
        {"status": Status.FAILED, **NO_METRICS},
        {"status": Status.VERIFIED, "error": "E: no"},
        {"status": Status.VERIFIED, **NO_METRICS},
        {"status": Status.VERIFIED, "correctness": MISJUDGED},
        {"status": Status.UNVERIFIED, "correctness": MISJUDGED},
        {"status": Status.VERIFIED, "num_differing": None},
        {"status": Status.VERIFIED, "num_differing": 1},
        {"status": Status.VERIFIED_WITH_TIES, "num_differing": 0},
        {"status": Status.VERIFIED_WITH_TIES, "num_differing": None},
        MISMATCH | {"num_differing": 0},
        MISMATCH | {"num_differing": None},
        {"status": Status.UNVERIFIED, "num_differing": None, "correctness": None},
        {"correctness": None},
        {"workload": None},
        {"requests": []},
        {"groups": []},
        {"status": "passed"},
    ],
)
def test_contradictions_cannot_be_made(fields: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        small(**fields)


def test_where_some_tokens_cannot_be_compared_others_can_be_wrong() -> None:
    """As with `--repeats` of a server that once sends no ids."""
    record = small(**MISMATCH | {"num_differing": None, "correctness": DIVERGED})
    verdict = verdict_of(record)
    assert "some of its 99 tokens are not compared, because a server sent no token ids" in verdict
    assert verdict.startswith("MISMATCH") and "and others differ" in verdict
    alone = small(**ALONE | {"reference": "static"})
    assert verdict_of(alone).startswith("unverified, its 12 tokens are not compared, because a ser")


def small(**fields: Any) -> PassRecord:
    """A record that passed, the same each time, with these fields."""
    record = run_records()[1]
    environment = replace(record.environment, host_load=1.5, revision=None)
    return replace(record, **({"environment": environment} | fields))


def test_a_record_is_one_line_that_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "runs.jsonl"
    odd = replace(small().environment, argv=["a\nb", "\u2028", "é"])
    records = [small(environment=odd), small(margin=0.1)]
    append_together(path, records)
    assert path.read_bytes().count(b"\n") == 2 and path.read_bytes().endswith(b"\n")
    loaded = load_passes(path)
    assert [json.loads(r.to_json()) for r in loaded] == [json.loads(r.to_json()) for r in records]
    assert loaded[0].environment.argv == ["a\nb", "\u2028", "é"]
    assert [record.margin for record in loaded] == [None, 0.1]


@pytest.mark.parametrize("before", [b"", b"\n", b'{"cut of', b'{"whole": 1}\n', b"\xff\n\nx"])
def test_appending_closes_a_cut_line_and_rewrites_nothing(tmp_path: Path, before: bytes) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_bytes(before)
    append_together(path, [small()])
    closed = b"\n" if before and not before.endswith(b"\n") else b""
    assert path.read_bytes() == before + closed + small().to_json().encode() + b"\n"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_a_number_is_neither_written_nor_read(tmp_path: Path, value: float) -> None:
    path = tmp_path / "runs.jsonl"
    append_together(path, [small()])
    written = path.read_bytes()
    with pytest.raises(ValueError, match="not JSON compliant"):
        append_together(path, [small(metrics=replace(METRICS, speedup=value))])  # type: ignore[type-var]
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
        ('{"schema_version": 1}', "schema_version is 1, this program reads 4; measure it again"),
        ('{"schema_version": 4}', "not a record; its kind is None, none of pass,"),
        ('{"schema_version": 4, "kind": "walk"}', "not a record; its kind is walk, none of pass,"),
        ('{"kind": "pass", "schema_version": 4}', "not a record; it has no "),
    ],
)
def test_a_bad_line_is_named_with_its_file(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(f"{small().to_json()}\n\n{line}\n")
    with pytest.raises(ValueError, match=re.escape(f"{path}:3: {message}")) as error:
        load_passes(path, is_strict=True)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("torn", [b'{"kind": "pass", "stat', b"\xff\xfe", b"{}}", b"[1]"])
def test_a_torn_line_costs_no_other_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], torn: bytes
) -> None:
    path = tmp_path / "runs.jsonl"
    append_together(path, [small()])
    with path.open("ab") as file:
        file.write(torn)
    append_together(path, [small()])
    assert len(load_passes(path)) == 2
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 1
    assert warnings[0].startswith(f"{path}:2: ") and warnings[0].endswith("; this line is skipped")
    with pytest.raises(ValueError, match=f"{path}:2: "):
        load_passes(path, is_strict=True)


@pytest.mark.parametrize("version", [0, 1, 2, 5])
def test_a_record_of_another_version_is_refused_by_name(tmp_path: Path, version: int) -> None:
    """It is whole, so it is not skipped as a damaged line is. The error says how it was made."""
    path = tmp_path / "runs.jsonl"
    other = json.loads(small().to_json()) | {"schema_version": version}
    path.write_text(f"{small().to_json()}\n{json.dumps(other)}\n")
    again = shlex.join(other["environment"]["argv"])
    message = (
        f"{path}:2: schema_version is {version}, this program reads 4; measure it again: {again}"
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
