"""`scripts/convert_records.py`: what it makes of a record of the version before."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from magicdec.records.reading import parse_line
from magicdec.records.record import RunRecord

ROOT = Path(__file__).parents[2]
BASELINES = ROOT / "results" / "baselines" / "acceptance.jsonl"
METRICS = {
    "draft_acceptance_rate": "acceptance_rate",
    "mean_acceptance_length": "acceptance_length",
    "draft_acceptance_rate_interval": "acceptance_rate_interval",
    "mean_acceptance_length_interval": "acceptance_length_interval",
}


@pytest.fixture
def convert_records(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    import convert_records

    return convert_records


def renamed(values: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in values.items()}


def as_before(line: str, tree: str | None = None) -> str:
    """The record as version 2 wrote it, as far as names and the keys of draft trees go."""
    raw = json.loads(line)
    raw["schema_version"] = 2
    decoding = raw["config"]["decoding"]
    raw["config"]["decoding"] = renamed(decoding, {"gamma": "num_draft_tokens"})
    raw["config"]["decoding"] |= {"tree": tree, "tree_nodes": None}
    names = {"padded_gamma": "num_drafted", "num_drafted": "num_proposed"}
    raw["samples"] = {name: renamed(part, names) for name, part in raw["samples"].items()}
    raw["metrics"] = renamed(raw["metrics"], METRICS)
    return json.dumps(raw)


def test_a_record_of_version_2_becomes_the_one_of_version_3(
    convert_records: ModuleType, tmp_path: Path
) -> None:
    """The acceptance is computed from the samples, and the seal is that of the new line."""
    lines = [
        parse_line(line, RunRecord).to_json() for line in BASELINES.read_text().splitlines()[:2]
    ]
    old = tmp_path / "old.jsonl"
    new = tmp_path / "new.jsonl"
    old.write_text("".join(f"{as_before(line)}\n" for line in lines))
    convert_records.main(old, new)
    assert new.read_text().splitlines() == lines


def test_a_tree_is_refused_with_file_and_line(convert_records: ModuleType, tmp_path: Path) -> None:
    line = BASELINES.read_text().splitlines()[0]
    old = tmp_path / "old.jsonl"
    old.write_text(f"{as_before(line)}\n{as_before(line, tree='3,2')}\n")
    with pytest.raises(SystemExit, match=r"old\.jsonl:2: .*--tree 3,2.*leave this line out"):
        convert_records.main(old, tmp_path / "new.jsonl")
    assert not (tmp_path / "new.jsonl").exists()


def test_the_parts_of_systems_become_details(convert_records: ModuleType) -> None:
    """Of the committed passes, written as before there were details, the same become."""
    lines = [json.loads(line) for line in BASELINES.read_text().splitlines()]
    passes = [raw for raw in lines if raw["kind"] == "serving"]
    old_names = {"pipeline+draft": "sync", "pipeinfer": "async"}
    parts = {"mdi_llm": "ring", "pipeinfer": "speculation"}
    kinds = set()
    for raw in passes:
        details = raw["details"] or {"kind": None}
        kinds.add(details["kind"])
        old = {key: value for key, value in raw.items() if key != "details"}
        old |= dict.fromkeys(("ring", "speculation", "server", "occupancy"))
        if raw["details"] is not None:
            part = {k: v for k, v in details.items() if k not in ("kind", "occupancy")}
            old |= {parts[details["kind"]]: part, "occupancy": details["occupancy"]}
        old["name"] = old_names.get(raw["name"], raw["name"])
        workload = dict(raw["config"]["workload"])
        workload["modes"] = [old_names.get(name, name) for name in workload["modes"]]
        workload["mode"] = old_names.get(raw["name"], workload["mode"])
        old["config"] = raw["config"] | {"workload": workload}
        assert convert_records.with_details(old) == raw
    assert kinds == {None, "mdi_llm", "pipeinfer"}
