"""What the documents, the table and the JSON Schema say of a record's fields comes from its
dataclasses; real records are as the schema says; what is malformed is refused by its line."""

import json
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from record_pages import DOCS, PAGES, SCHEMA, TABLE, renewed, schema_text
from synthetic_records import parse_record
from test_record import RECORDS, small

from magicdec import names
from magicdec.bench.latency.record import LatencyRecord, LatencyRow, tables
from magicdec.bench.showing import GROUPS
from magicdec.names import load_named, load_object
from magicdec.records.fields import described_fields, description_of, without_none
from magicdec.records.metrics import PassMetrics
from magicdec.records.pass_record import PassRecord
from magicdec.records.reading import load_passes, parse_line, read_records
from magicdec.records.record import append_together
from magicdec.systems.modes import SYSTEMS

DETAILS = tuple(load_object(system.details) for system in SYSTEMS.values() if system.details)
TOPS = (*(load_named(names.RECORDS, kind) for kind in names.RECORDS), *DETAILS)
BASELINES = ROOT / "magicdec" / "bench" / "gate" / "baselines" / "acceptance.jsonl"


def kinds(kind: type) -> Iterator[type]:
    """A dataclass, and those that its fields hold."""
    yield kind
    for _, hint, _ in described_fields(kind):
        for inner in (hint, *typing.get_args(hint)):
            if is_dataclass(inner):
                assert isinstance(inner, type)
                yield from kinds(inner)


def test_the_committed_documents_are_what_the_code_makes() -> None:
    """Else run `python scripts/dev/record_pages.py`."""
    for name in PAGES:
        text = (DOCS / name).read_text(encoding="utf-8")
        assert renewed(text) == text, name
    assert (DOCS / SCHEMA).read_text(encoding="utf-8") == schema_text()


def test_every_part_of_a_record_has_its_table() -> None:
    text = "".join((DOCS / name).read_text(encoding="utf-8") for name in PAGES)
    shown = {f"{found[2]}:{found[3]}" for found in TABLE.finditer(text)}
    expected = {kind for top in TOPS for kind in kinds(top)}
    assert shown == {f"{kind.__module__}:{kind.__name__}" for kind in expected}


@pytest.mark.parametrize(
    "kind",
    sorted({kind for top in TOPS for kind in kinds(top)}, key=str),
    ids=lambda kind: kind.__name__,
)
def test_a_field_can_be_none_where_its_null_rule_says_so(kind: type) -> None:
    hints = typing.get_type_hints(kind)
    for item in fields(kind):
        description = description_of(item)
        can_be_null = type(None) in typing.get_args(hints[item.name]) or hints[item.name] is Any
        assert can_be_null == (description.null is not None), item.name
        assert description.meaning and "|" not in description.meaning, "it stands in a table"


def test_every_labelled_metric_has_a_row() -> None:
    labelled = [item.name for item in fields(PassMetrics) if description_of(item).label]
    assert sorted(key for keys in GROUPS.values() for key in keys) == sorted(labelled)


@cache
def validator() -> Draft202012Validator:
    return Draft202012Validator(json.loads(schema_text()))


def problems(raw: Any) -> list[str]:
    """Where the JSON value of a record is not as the schema says, at most one place."""
    deepest = best_match(validator().iter_errors(raw))
    return [] if deepest is None else [f"{deepest.json_path}: {deepest.message}"]


@pytest.mark.parametrize("kind", RECORDS)
def test_real_records_are_as_the_schema_says(kind: str) -> None:
    assert problems(json.loads(RECORDS[kind]().to_json())) == []


def test_committed_records_are_read_and_as_the_schema_says() -> None:
    every = BASELINES.read_text(encoding="utf-8").splitlines()
    lines = [line for line in every if json.loads(line)["kind"] == "pass"]
    assert len(load_passes(BASELINES)) == len(lines) > 0
    for line in lines:
        raw = json.loads(line)
        assert problems(raw) == []
        written = kept(raw, json.loads(parse_line(line, PassRecord).to_json()))
        # The seal is that of a line, which has more keys today.
        assert written | {"seal": raw["seal"]} == raw


def kept(raw: Any, written: Any) -> Any:
    """`written` with only the keys of `raw`: an older record lacks keys that are written today."""
    if isinstance(raw, list) and isinstance(written, list):
        return [kept(*pair) for pair in zip(raw, written, strict=True)]
    if not isinstance(raw, dict) or not isinstance(written, dict):
        return written
    return {key: kept(value, written[key]) for key, value in raw.items()}


BROKEN: list[tuple[str, Any, str]] = [
    ("metrics.duration_s", None, "metrics.duration_s has another type"),
    ("metrics.bytes_read", 1.5, "metrics.bytes_read has another type"),
    ("metrics.speedup", "fast", "metrics.speedup has another type"),
    ("metrics.speedup", True, "metrics.speedup has another type"),
    ("metrics.acceptance_per_position", [0.5, "x"], "metrics.acceptance_per_position[1] has"),
    ("metrics", [], "metrics has another type"),
    ("groups", [{"num_requests": 2.5}], "groups[0].num_requests has another type"),
    ("environment", None, "environment has another type"),
    ("workload", None, "it has no workload"),
    ("config.model", None, "it has no config.model"),
    ("config", [], "config has another type"),
    ("config.decoding", {"strategy": "speculative"}, "it has no config.decoding.drafter"),
    ("status", "mismatch", "metrics exist only, and always, where its tokens are not known to be"),
    ("status", "passed", "status is passed; choose from verified, verified_with_ties, mismatch"),
    ("num_differing", None, "it is verified, but tokens differ, or were compared with nothing"),
    ("error", "E: no", "an error belongs to status failed, and only to it"),
]


@pytest.mark.parametrize(("path", "value", "message"), BROKEN)
def test_a_malformed_record_is_named_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str, value: Any, message: str
) -> None:
    raw = json.loads(RECORDS["drafting"]().to_json())
    *parents, last = path.split(".")
    inner = raw
    for key in parents:
        inner = inner[key]
    inner[last] = value
    file = tmp_path / "runs.jsonl"
    whole = small().to_json()
    file.write_text(f"{whole}\n{json.dumps(raw)}\n")
    with pytest.raises(ValueError) as refused:
        load_passes(file, is_strict=True)
    text = str(refused.value)
    assert text.startswith(f"{file}:2: not a record; {message}") and "\n" not in text
    assert [record.to_json() for record in load_passes(file)] == [whole]
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"{file}:2: not a record; {message}")
    assert warning.endswith("; this line is skipped")


def test_metrics_of_a_pass_with_wrong_tokens_are_refused() -> None:
    raw = json.loads(RECORDS["mismatch"]().to_json())
    raw["metrics"] = json.loads(RECORDS["drafting"]().to_json())["metrics"]
    with pytest.raises(ValueError, match="metrics exist only, and always, where its tokens"):
        parse_record(raw)


def test_a_key_is_needed_unless_it_can_be_null() -> None:
    whole = json.loads(RECORDS["drafted"]().to_json())
    for top in ("environment", "workload", "metrics", "memory", "correctness"):
        kind = without_none(typing.get_type_hints(PassRecord)[top])
        for item in fields(kind):
            raw = json.loads(json.dumps(whole))
            del raw[top][item.name]
            if description_of(item).null is not None:
                assert getattr(getattr(parse_record(raw), top), item.name) is None
                assert problems(raw) == []
                continue
            with pytest.raises(ValueError, match=f"it has no {top}.{item.name}"):
                parse_record(raw)
            assert f"'{item.name}' is a required property" in problems(raw)[0]


def test_latency_is_a_record_with_a_table(tmp_path: Path) -> None:
    row = LatencyRow(
        "decode",
        2,
        64,
        1,
        tokens=2,
        ms_median=1.0,
        ms_p10=0.5,
        ms_p90=2.0,
        bytes=9,
        roofline_fraction=0.5,
        products_fraction=0.2,
        attention_fraction=0.3,
    )
    base = small()
    config = base.config | {"grid": {"repeats": 3}, "attention": {"backend": "native"}}
    environment = replace(base.environment, read_bandwidth_bytes_per_s=1e9)
    record = LatencyRecord(config=config, environment=environment, rows=[row])
    append_together(tmp_path / "runs.jsonl", [record])
    (read,) = read_records(tmp_path / "runs.jsonl", LatencyRecord)
    assert read.to_json() == record.to_json()
    (table,) = tables([record])
    (cells,) = table.body
    assert cells[:8] == ["2", "64", "decode", "1.000", "0.500", "2.000", "1.00x", "0.0"]
    assert cells[8:] == ["50.0 %", "20.0 %", "30.0 %"]
    raw = json.loads(record.to_json())
    assert list(raw) == ["kind", "schema_version", "status", "config", "environment", "rows"]
    assert (raw["schema_version"], raw["kind"]) == (4, "latency")
