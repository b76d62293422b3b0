"""`scripts/convert_records.py`: what it makes of records of the version before, which a run and
`magicdec serve` have written."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from identities import check_command, check_record

from magicdec.records.pass_record import PassRecord, commands_of
from magicdec.records.reading import load_passes
from magicdec.records.recomputing import follows

OLD = Path(__file__).parent / "records_of_version_3.jsonl"
# New names of metrics, and those whose meaning is another one now.
RENAMED = {
    "tokens_per_verification": "tokens_per_verification",
    "tokens_per_verification_interval": "tokens_per_verification_interval",
    "duration_s": "duration_s",
}
OF_RUNS = RENAMED | {"num_steps": "num_decode_steps"}
OF_RUNS |= {f"{name}_per_batch": f"{name}_per_group" for name in ("speedup", "net_speedup")}
OF_RUNS |= {"total_speedup_per_batch": "total_speedup_per_group"}
OF_SERVING = RENAMED | {"prefill_tokens_per_s": "request_prefill_tokens_per_s"}
OTHER = {f"{of}_tpot_ms" for of in ("mean", "p50", "p90", "p99")}
# What version 3 said of the steps of a mode without their times.
LEFT_OUT = {
    "steady_output_throughput",
    "num_decode_steps",
    "median_step_ms",
    "stalled_steps",
    "stalled_ms",
    "longest_stall_ms",
    "longest_stall_median_ms",
}


@pytest.fixture
def convert_records(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    import convert_records

    return convert_records


def old_records() -> list[dict[str, Any]]:
    return [json.loads(line) for line in OLD.read_text(encoding="utf-8").splitlines()]


def converted(convert_records: ModuleType, folder: Path) -> list[PassRecord]:
    new = folder / "new.jsonl"
    convert_records.main(OLD, new)
    return load_passes(new, is_strict=True)


def is_kept(old: dict[str, Any], new: PassRecord, names: dict[str, str], other: set[str]) -> None:
    """Every metric of version 3 has its value, but for those of `other`."""
    for name, value in old.items():
        if name not in other and value is not None:
            assert follows(getattr(new.metrics, names.get(name, name)), value), name


def test_records_of_version_3_become_passes(convert_records: ModuleType, tmp_path: Path) -> None:
    """A run becomes two, with the metrics that it had; TPOT is from the first token on now."""
    run, *modes = old_records()
    plain, drafting, *served = converted(convert_records, tmp_path)
    assert [each.name for each in (plain, drafting, *served)] == [
        "static",
        "static+draft",
        *(mode["name"] for mode in modes),
    ]
    is_kept(run["baseline_metrics"], plain, OF_RUNS, OTHER)
    is_kept(run["metrics"], drafting, OF_RUNS, OTHER)
    for mode, record in zip(modes, served, strict=True):
        is_kept(mode["metrics"], record, OF_SERVING, LEFT_OUT)
        assert record.output_hashes == [each["output_hash"] for each in mode["requests"]]
    samples = run["samples"]["speculative"]
    assert drafting.output_hashes == plain.output_hashes == samples["output_hashes"]
    assert [each.step_ms for each in drafting.groups] == samples["step_ms"]
    assert plain.shares_prefill and drafting.shares_prefill and not served[0].shares_prefill
    assert {each.status for each in (plain, drafting, *served)} == {"verified"}
    assert [each.reference for each in (plain, drafting)] == ["static", "static"]


def test_what_was_converted_follows_from_its_requests(
    convert_records: ModuleType, tmp_path: Path
) -> None:
    records = converted(convert_records, tmp_path)
    commands = commands_of(records)
    assert [len(command) for command in commands] == [2, 2]
    assert [check_command(command) for command in commands] == [[], []]
    for record in commands[0]:
        check_record(record)
    assert commands[1][1].metrics is not None
    assert commands[1][1].metrics.throughput_ratio == pytest.approx(
        old_records()[2]["metrics"]["output_throughput"]
        / old_records()[1]["metrics"]["output_throughput"]
    )


def test_another_version_is_refused_with_file_and_line(
    convert_records: ModuleType, tmp_path: Path
) -> None:
    old = tmp_path / "old.jsonl"
    raw = old_records()[0]
    lines = [json.dumps(each) for each in (raw, raw | {"schema_version": 2})]
    old.write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(SystemExit, match=r"old\.jsonl:2: .*version is 2.*leave this line out"):
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
