"""`magicdec reproduce`: each table has a script, it says what it needs, and the committed
predictions are those of the plan."""

import csv
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Command
from synthetic_records import drawn_command, with_fields
from test_gate_coverage import wait_for

from magicdec.cli import reproduce
from magicdec.distributed.ranks import Ended
from magicdec.distributed.watching.processes import is_alive
from magicdec.predict import published_table
from magicdec.predict.published_table import (
    COLUMNS,
    TABLES,
    Missing,
    PublishedRow,
    PublishedTable,
    command_of,
    read_measured,
)
from magicdec.records.reading import load_passes

PAPER = published_table.PACKAGED
NAME = "magicdec_speedups_h100"
WITH_ROOT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def lines_of_a_run() -> str:
    """The records of its two passes."""
    return "".join(f"{record.to_json()}\n" for record in drawn_command())


def published(name: str) -> list[PublishedRow]:
    return PublishedTable(name, PAPER).part(is_demo=False)


def flags_of(row: PublishedRow) -> dict[str, str]:
    """The first value of each flag of the command of a line; empty for a flag without one."""
    pairs = itertools.pairwise([*command_of(row).split(), "--"])
    return {a: "" if b.startswith("--") else b for a, b in pairs if a.startswith("--")}


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """A copy of the published tables."""
    folder = tmp_path / "tables"
    folder.mkdir()
    for name in TABLES:
        (folder / f"{name}.csv").write_bytes((PAPER / f"{name}.csv").read_bytes())
    return folder


def test_every_table_has_a_script_and_a_file() -> None:
    scripts = {path.stem for path in (ROOT / "scripts" / "reproduce").glob("*.sh")}
    assert scripts == set(TABLES) and len(scripts) > 3
    for name in TABLES:
        assert f"reproduce {name} " in (ROOT / "scripts" / "reproduce" / f"{name}.sh").read_text()
        assert published(name)


@pytest.mark.parametrize("name", TABLES)
def test_the_committed_predictions_are_those_of_the_plan(name: str) -> None:
    """Otherwise run the script with --predict --tables results/paper."""
    table = PublishedTable(name, PAPER)
    table.predict()
    assert table.rows == PublishedTable(name, PAPER).rows
    assert all(row["published"] and row["source"] for row in published(name))


@pytest.mark.parametrize("name", TABLES)
def test_every_line_says_what_exists_and_why_not(name: str) -> None:
    for row in PublishedTable(name, PAPER).rows:
        for column in ("published", "predicted", "measured"):
            assert (f"not {column}: " in row["exists"]) == (row[column] == "")


@pytest.mark.wide
def test_full_size_needs_its_gpus(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "reproduce" / "magicdec_speedups_a100.sh"
    done = subprocess.run(
        [script],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr.count("\n") == 1 and "needs 8 CUDA devices, this machine has 0" in done.stderr
    )


def test_a_number_that_a_run_lacks_is_said(tmp_path: Path) -> None:
    row, *_ = published(NAME)
    records = tmp_path / "records"
    for metrics, reason in ((None, "tokens of its run were wrong"), ({"speedup": None}, "has no")):
        records.write_text(json.dumps({"metrics": metrics}))
        with pytest.raises(Missing, match=reason):
            read_measured(row, records)


def test_a_measured_acceptance_is_the_rate_that_is_published(tmp_path: Path) -> None:
    """A record has accepted / drafted tokens, MagicDec the rate of its formula: 0.8 of each draft
    accepted if all before it were, is (0.8 + 0.64 + 0.512 + 0.4096) / 4 of four drafts."""
    row, *_ = published("magicdec_acceptance")
    records = tmp_path / "records"
    metrics = {"draft_acceptance_rate": 0.5904, "draft_acceptance_rate_interval": [0.4, 1.0]}
    records.write_text(json.dumps({"metrics": metrics}))
    assert read_measured(row, records) == ("0.800", "0.666 to 1.000")


def test_the_demo_fits_a_small_machine() -> None:
    for name in TABLES:
        table = PublishedTable(name, PAPER)
        table.make_demo()
        small = table.part(is_demo=True)
        settings = {tuple(row[column] for column in COLUMNS) for row in small}
        assert small and len(settings) == len(small)
        assert all(not row["published"] and not row["predicted"] for row in small)
        for row in small:
            flags = flags_of(row)
            assert int(flags["--nproc"]) <= 4
            assert int(flags["--prefix_len"]) <= 4096
            assert int(flags["--prefix_len"]) * int(flags.get("--B", "1")) <= 8 * 4096


def test_what_runs_measured_is_written_beside_what_was_published(
    tmp_path: Path, tables: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """Each command runs once, a second run replaces the lines of the first, and all records are
    kept."""
    started: list[list[object]] = []
    plain, drafting = drawn_command()
    record = with_fields(drafting, metrics__speedup_interval=[1.25, 1.75])

    def run(words: list[object]) -> Ended:
        started.append(words)
        Path(str(words[-1])).write_text(f"{plain.to_json()}\n{record.to_json()}\n")
        return Ended(0, "")

    monkeypatch.setattr(published_table, "run_command", run)
    out = tmp_path / "records.jsonl"
    for _ in range(2):
        assert command("reproduce", NAME, "--demo", "--tables", tables, "--out", out).code == 0
    with (tables / f"{NAME}.csv").open(newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    demo = [row for row in rows if row["model"] == "demo"]
    assert record.metrics is not None
    assert {row["measured"] for row in demo} == {f"{record.metrics.speedup:.3f}"}
    assert {row["interval"] for row in demo} == {"1.250 to 1.750"}
    assert len(started) == 2 * len(demo) and len(rows) == len(demo) + len(published(NAME))
    assert all(row["published"] for row in rows if row["model"] != "demo")
    assert len(load_passes(out)) == 2 * len(started)


def test_a_run_in_a_checkout_leaves_the_packaged_tables_alone(
    tmp_path: Path, tables: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """There `results/paper` is a link to them."""
    before = {path: path.read_bytes() for path in tables.iterdir()}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "paper").symlink_to(tables)

    def run(words: list[object]) -> Ended:
        Path(str(words[-1])).write_text(lines_of_a_run())
        return Ended(0, "")

    monkeypatch.setattr(published_table, "run_command", run)
    assert command("reproduce", NAME, "--demo").code == 0
    assert {path: path.read_bytes() for path in tables.iterdir()} == before
    (row, *_) = PublishedTable(NAME, reproduce.WRITTEN).part(is_demo=True)
    assert row["measured"]


def test_a_failed_run_is_named_and_the_others_go_on(
    tmp_path: Path, tables: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    started = []

    def run(words: list[object]) -> Ended:
        started.append(words)
        if len(started) == 1:
            return Ended(2, "a warning\nmagicdec run: no memory\n")
        Path(str(words[-1])).write_text(lines_of_a_run())
        return Ended(0, "a warning\n")

    monkeypatch.setattr(published_table, "run_command", run)
    out = tmp_path / "records.jsonl"
    assert command("reproduce", NAME, "--demo", "--tables", tables, "--out", out).code == 1
    demo = PublishedTable(NAME, tables).part(is_demo=True)
    assert "not measured: its run ended with 2: no memory" in demo[0]["exists"]
    assert all(row["measured"] for row in demo[1:])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["magicdec_nothing"], "table magicdec_nothing is not known; choose from"),
        (["--demo"], "name a table; choose from magicdec_acceptance"),
        ([NAME, "--predict", "--out", "x"], "--out does nothing here"),
        ([NAME, "--predict", "--tables", "/dev/null"], f"--tables /dev/null/{NAME}.csv: Not a dir"),
        ([NAME, "--demo", "--out", "/dev/full"], "--out /dev/full: No space left"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    words: list[str], message: str, tables: Path, command: Command
) -> None:
    more = [] if "--tables" in words else ["--tables", str(tables)]
    code, out, err = command("reproduce", *words, *more)
    assert code == 2 and message in err and err.count("\n") == 1 and out == ""


def test_a_table_with_other_columns_is_refused(tables: Path) -> None:
    (tables / f"{NAME}.csv").write_text("model,published\ndemo,1\n")
    with pytest.raises(ValueError, match=f"{NAME}.csv needs the columns model,draft,hardware"):
        PublishedTable(NAME, tables)


def test_the_tables_are_shown(tables: Path, command: Command) -> None:
    """Every published number in a line of its table."""
    code, shown, _ = command("reproduce", "--tables", tables)
    parts = re.split(rf"^({'|'.join(TABLES)}): ", shown, flags=re.MULTILINE)
    assert code == 0 and parts[1::2] == [*TABLES]
    for name, part in zip(parts[1::2], parts[2::2], strict=True):
        lines = [line.split() for line in part.splitlines()]
        for row in PublishedTable(name, tables).part(is_demo=False):
            assert any(row["published"] in line for line in lines), row


STARTER = """
from magicdec.distributed.ranks import run_command
run_command(["run", "--B", 1, "--num_batches", 1, "--gen_len", 16000, "--out", "/dev/null"])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_command_that_is_run_does_not_outlive_who_runs_it(
    number: signal.Signals, tmp_path: Path
) -> None:
    """It would take minutes."""
    with subprocess.Popen([sys.executable, "-c", STARTER], cwd=tmp_path, env=WITH_ROOT) as starter:
        path = Path(f"/proc/{starter.pid}/task/{starter.pid}/children")
        child = int(wait_for(path.read_text).split()[0])
        starter.send_signal(number)
        starter.wait()
        try:
            wait_for(lambda: not is_alive(child))
        finally:
            if is_alive(child):
                os.kill(child, signal.SIGKILL)
