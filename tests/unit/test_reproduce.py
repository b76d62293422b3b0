"""The scripts that reproduce published tables: each table has one, they say what they need, and the
committed predictions are those of the plan."""

from __future__ import annotations

import csv
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from test_compare import make

from magicdec.records.reading import parse_record

sys.path.insert(0, str(ROOT / "scripts" / "reproduce"))

import table

TABLES = sorted(path.stem for path in table.PAPER.glob("magicdec_*.csv"))


def published(name: str) -> list[table.Cell]:
    return [cell for cell in table.read(table.PAPER / f"{name}.csv") if not cell.is_demo]


def test_every_table_has_a_script() -> None:
    scripts = {path.stem for path in (ROOT / "scripts" / "reproduce").glob("*.sh")}
    assert scripts == set(TABLES) and len(scripts) > 3


@pytest.mark.parametrize("name", TABLES)
def test_the_committed_predictions_are_those_of_the_plan(name: str) -> None:
    """Otherwise run the script with --predict."""
    for cell in published(name):
        assert cell.published and cell.source
        assert table.predict(cell) == cell


@pytest.mark.parametrize("name", TABLES)
def test_every_line_says_what_exists_and_why_not(name: str) -> None:
    for cell in table.read(table.PAPER / f"{name}.csv"):
        for column in ("published", "predicted", "measured"):
            assert (f"not {column}: " in cell.exists) == (getattr(cell, column) == "")


def test_full_size_needs_its_gpus(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "reproduce" / "magicdec_speedups_a100.sh"
    done = subprocess.run(
        [script], capture_output=True, text=True, check=False,
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr.count("\n") == 1 and "needs 8 CUDA devices, this machine has 0" in done.stderr
    )


def test_a_command_has_the_shape_of_its_cell() -> None:
    cell = next(c for c in published("magicdec_speedups_a100") if c.draft == "self")
    words = table.command(replace(cell, batch_size="64", gamma="3", prefix_len="32000"))
    pairs = dict(zip(words[1::2], words[2::2], strict=True))
    assert pairs["--nproc"] == "8" and pairs["--B"] == "64" and pairs["--gamma"] == "3"
    assert pairs["--prefix_len"] == "32000" and pairs["--budget"] == "512"
    assert pairs["--model"].startswith("togethercomputer/") and pairs["--draft"] == "self"


def test_the_demo_fits_a_small_machine() -> None:
    for name in TABLES:
        small = table.demo_cells(published(name))
        assert small and len(small) == len(set(small))
        assert all(int(cell.prefix_len) <= 4096 and int(cell.batch_size) <= 8 for cell in small)
        assert all(not cell.published and not cell.predicted for cell in small)


def test_what_runs_measured_is_written_beside_what_was_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command runs once, and a second run replaces the lines of the first."""
    started: list[tuple[object, ...]] = []
    record = parse_record(make())

    def run_command(ranks: int, *words: object) -> None:
        started.append(words)
        Path(str(words[-1])).write_text(record.to_json() + "\n")

    name = "magicdec_speedups_h100"
    (tmp_path / f"{name}.csv").write_bytes((table.PAPER / f"{name}.csv").read_bytes())
    for file in ("magicdec_acceptance.csv",):
        (tmp_path / file).write_bytes((table.PAPER / file).read_bytes())
    monkeypatch.setattr(table, "PAPER", tmp_path)
    monkeypatch.setattr(table, "run_command", run_command)
    monkeypatch.setattr(sys, "argv", ["table.py", name, "--demo"])
    for _ in range(2):
        table.main()
    with (tmp_path / f"{name}.csv").open(newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    demo = [row for row in rows if row["model"] == "demo"]
    assert record.metrics is not None
    assert {row["measured"] for row in demo} == {f"{record.metrics.speedup:.3f}"}
    assert len(started) == 2 * len(demo) and len(rows) == len(demo) + len(published(name))
    assert all(row["published"] for row in rows if row["model"] != "demo")
