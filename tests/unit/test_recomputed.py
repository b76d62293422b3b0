"""`magicdec table --check`: every metric of a record is what its samples give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Command
from test_record import RECORDS

from magicdec.cli import table
from magicdec.records.record import append_record


@pytest.mark.parametrize("kind", RECORDS)
def test_every_metric_is_computed_again_from_the_record_alone(
    kind: str, tmp_path: Path, command: Command
) -> None:
    """And a metric that was changed in the file is named with its record."""
    path = tmp_path / "runs.jsonl"
    append_record(path, RECORDS[kind]())
    assert command(table, "--check", path).code == 0
    raw = json.loads(path.read_text())
    for part in ("metrics", "baseline_metrics"):
        for name, value in (raw[part] or {}).items():
            wrong = raw | {part: raw[part] | {name: other_than(name, value)}}
            path.write_text(f"{json.dumps(raw)}\n{json.dumps(wrong)}\n")
            code, out, _ = command(table, "--check", path)
            assert code == 1 and "1 of 2 records have" in out
            assert "record 2 (strategy=" in out and f"{part}.{name} differs" in out


def test_the_committed_baselines_have_the_metrics_of_their_samples(command: Command) -> None:
    baselines = ROOT / "results" / "baselines" / "acceptance.jsonl"
    code, out, _ = command(table, "--check", baselines)
    assert code == 0, out


def other_than(name: str, value: Any) -> Any:
    """Another value that this metric could have."""
    if value is None and name.endswith("_interval"):
        return [[0.5, 0.6]] if "position" in name else [0.5, 0.6]
    if value is None and name == "judged_per_position":
        return [1]
    if value is None:
        return [0.5] if name.endswith(("_per_batch", "_per_position")) else 1
    if isinstance(value, list):
        return [*value[:-1], value[-1] + (1 if isinstance(value[-1], int) else 1e-6)]
    return value + (1 if isinstance(value, int) else 1e-6 * value)


def test_samples_that_lack_something_cannot_be_checked(tmp_path: Path, command: Command) -> None:
    raw = json.loads(RECORDS["speculative"]().to_json())
    (tmp_path / "none").write_text(json.dumps(raw | {"samples": None}))
    raw = json.loads(RECORDS["speculative"]().to_json())
    raw["samples"]["speculative"]["num_tokens"][0] += 1
    (tmp_path / "tokens").write_text(json.dumps(raw))
    raw = json.loads(RECORDS["speculative"]().to_json())
    raw["samples"]["speculative"]["num_emitted"][1][0][0] += 1
    (tmp_path / "emitted").write_text(json.dumps(raw))
    code, out, _ = command(table, "--check", *(tmp_path / n for n in ("none", "tokens", "emitted")))
    assert code == 1 and "0 of 3 records have" in out
    for name, message in (
        ("none", "its metrics cannot be computed again, it has no samples"),
        ("emitted", "its samples contradict each other: speculative, batch 1"),
        ("tokens", "samples.speculative.num_tokens differs from its samples"),
    ):
        (line,) = (line for line in out.splitlines() if line.startswith(str(tmp_path / name)))
        assert message in line and "record 1 (strategy=speculative" in line
