"""The verdict on whole runs of the demo model whose bits depend on the shape of a forward: rounding
is excused, a lossy rule is not."""

from __future__ import annotations

import pytest
from lossy import plant, short_run

from magicdec.distributed.groups import Launch
from magicdec.records.reading import parse_line
from magicdec.records.record import RunRecord
from magicdec.run.run import execute
from magicdec.setup.prepare import prepare


def run(dtype: str, num_rows: int = 16) -> RunRecord:
    config = short_run(dtype, num_rows=num_rows)
    return execute(prepare(config, Launch(0, 1, 0, 1)), is_leader=False).record


def test_rounding_in_bfloat16_is_ok_with_ties() -> None:
    record = run("bfloat16")
    found = record.correctness
    assert found is not None and found.identical is False, "on this CPU too, rounding shows"
    assert record.status == "ok_with_ties" and record.passed and record.metrics is not None
    assert found.num_diverged == 0 and found.first_divergence is not None
    assert found.num_excused and found.most_differing and found.expected_differing
    assert found.num_excused <= found.most_differing < 16
    assert 0.5 < found.expected_differing < found.most_differing
    assert found.first_divergence.margin is not None and found.margin_bound is not None
    assert found.first_divergence.margin <= found.margin_bound < 0.25, "less than a fixed bound was"
    assert parse_line(record.to_json(), RunRecord).to_json() == record.to_json()


def test_a_lossy_rule_in_bfloat16_diverges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most margins of this rule are less than 0.25, which was once excused without limit."""
    plant(monkeypatch, 0.2)
    record = run("bfloat16")
    found = record.correctness
    assert record.status == "diverged" and record.metrics is None and found is not None
    assert found.num_excused == 0 and found.num_diverged and found.most_differing
    assert found.num_diverged > found.most_differing


def test_float32_is_identical_and_a_lossy_rule_diverges(monkeypatch: pytest.MonkeyPatch) -> None:
    record = run("float32", 4)
    assert record.status == "ok" and record.correctness is not None
    assert record.correctness.identical and record.correctness.margin_bound is None
    plant(monkeypatch, 0.2)
    record = run("float32", 4)
    assert record.status == "diverged" and record.correctness is not None
    assert record.correctness.most_differing == 0
    assert record.correctness.margin_bound is not None and record.correctness.margin_bound < 1e-4
