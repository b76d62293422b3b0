"""`scripts/convert_records.py`: what it makes of records of the version before, which a run and
`magicdec serve` have written."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import ROOT
from identities import check_command, check_record

from magicdec.records.pass_record import PassRecord
from magicdec.records.reading import load_passes
from magicdec.records.recomputing import follows
from magicdec.records.record import commands_of

OLD = Path(__file__).parent / "records_of_version_3.jsonl"
BASELINES = ROOT / "magicdec" / "bench" / "gate" / "baselines" / "acceptance.jsonl"
# New names of metrics, and those whose meaning is another one now.
RENAMED = {
    "mean_emitted_tokens": "tokens_per_verification",
    "mean_emitted_tokens_interval": "tokens_per_verification_interval",
    "makespan_s": "duration_s",
}
RUN_NAMES = RENAMED | {"num_steps": "num_decode_steps"}
RUN_NAMES |= {f"{name}_per_batch": f"{name}_per_group" for name in ("speedup", "net_speedup")}
RUN_NAMES |= {"total_speedup_per_batch": "total_speedup_per_group"}
SERVING_NAMES = RENAMED | {"prefill_tokens_per_s": "request_prefill_tokens_per_s"}
OTHER = {f"{statistic}_tpot_ms" for statistic in ("mean", "p50", "p90", "p99")}
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
    assert [passed.name for passed in (plain, drafting, *served)] == [
        "static",
        "static+draft",
        *(mode["name"] for mode in modes),
    ]
    is_kept(run["baseline_metrics"], plain, RUN_NAMES, OTHER)
    is_kept(run["metrics"], drafting, RUN_NAMES, OTHER)
    for mode, record in zip(modes, served, strict=True):
        is_kept(mode["metrics"], record, SERVING_NAMES, LEFT_OUT)
        assert record.output_hashes == [request["output_hash"] for request in mode["requests"]]
    samples = run["samples"]["speculative"]
    assert drafting.output_hashes == plain.output_hashes == samples["output_hashes"]
    assert [group.step_ms for group in drafting.groups] == samples["step_ms"]
    assert plain.shares_prefill and drafting.shares_prefill and not served[0].shares_prefill
    assert {passed.status for passed in (plain, drafting, *served)} == {"verified"}
    assert [passed.reference for passed in (plain, drafting)] == ["static", "static"]


def test_what_was_converted_follows_from_its_requests(
    convert_records: ModuleType, tmp_path: Path
) -> None:
    records = converted(convert_records, tmp_path)
    commands = list(commands_of(records))
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
    lines = [json.dumps(record) for record in (raw, raw | {"schema_version": 2})]
    old.write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(SystemExit, match=r"old\.jsonl:2: .*version is 2.*leave this line out"):
        convert_records.main(old, tmp_path / "new.jsonl")
    assert not (tmp_path / "new.jsonl").exists()


@pytest.mark.parametrize(
    ("old_name", "name", "part"),
    [("ring+draft", "ring+draft", "ring"), ("async", "pipeinfer", "speculation")],
)
def test_the_parts_of_systems_become_details(
    convert_records: ModuleType, old_name: str, name: str, part: str
) -> None:
    """They are those of a committed pass, under their names of version 3."""
    (committed,) = [baseline for baseline in load_passes(BASELINES) if baseline.name == name]
    details = json.loads(committed.to_json())["details"]
    del details["kind"]
    raw = old_records()[1]
    raw |= {"name": old_name, "occupancy": details.pop("occupancy"), part: details}
    raw["config"]["workload"] |= {"modes": [old_name], "mode": old_name}
    (record,) = convert_records.converted(raw)
    assert record.name == name and record.details == committed.details
    workload = record.config["workload"]
    assert workload["modes"] == [name] and workload["mode"] == name.removesuffix("+draft")
