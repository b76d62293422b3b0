"""`magicdec table` shows the intervals, and says which differences are inside the noise."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Command
from synthetic_records import drawn, with_fields, with_losses

from magicdec.cli import table
from magicdec.records.record import append_record
from magicdec.report import listing
from magicdec.report.listing import noise_lines

BEST = drawn(budget=129)
NEAR = with_losses(drawn(budget=65), 0.01, seed=3)
FAR = with_losses(drawn(budget=33), 0.3)


def test_differences_inside_the_noise_are_said() -> None:
    (line,) = noise_lines([FAR, BEST, NEAR])
    assert BEST.metrics is not None
    rate = f"{BEST.metrics.acceptance_rate:.3f}"
    assert f"the best (self-speculation, streaming_llm 129, gamma 4: {rate})" in line
    assert line.endswith("over 8 prompts: self-speculation, streaming_llm 65, gamma 4")


def test_records_of_other_prompts_and_without_samples_are_not_compared() -> None:
    assert noise_lines([BEST, with_fields(NEAR, workload__sha256="x")]) == []
    assert noise_lines([BEST, with_fields(NEAR, config__decoding__num_draft_tokens=2)]) == []
    assert noise_lines([BEST, with_fields(NEAR, samples=None)]) == []
    assert noise_lines([BEST, FAR]) == [] and noise_lines([BEST]) == [] and noise_lines([]) == []


def test_a_table_has_the_interval_and_the_statement(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "runs.jsonl"
    append_record(path, BEST)
    assert "±" not in command(table, path, "--format", "csv").out
    append_record(path, NEAR)
    out = " ".join(command(table, path).out.split())
    assert BEST.metrics is not None and BEST.metrics.acceptance_rate_interval is not None
    low, high = BEST.metrics.acceptance_rate_interval
    assert f"{BEST.metrics.acceptance_rate:.2f}±{(high - low) / 2:.2f}" in out
    assert "inside the noise of the best" in out
    assert "noise" not in command(table, path, "--group_by", "B").out


def test_a_long_table_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "MOST_RECORDS", 2)
    assert noise_lines([BEST, NEAR]) != [] and noise_lines([BEST, NEAR, FAR]) == []
