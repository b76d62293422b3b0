"""`magicdec reproduce`: each table has a script, it says what it needs, and the committed
predictions are those of the plan."""

import csv
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Command
from synthetic_records import parse_record
from test_compare import make

from magicdec.cli.front import reproduce
from magicdec.distributed.layout import make_layout
from magicdec.distributed.ranks import Ended
from magicdec.records.reading import load_records
from magicdec.reproduce import published_table
from magicdec.reproduce.published_table import PublishedTable
from magicdec.reproduce.systems import TABLES, Missing, Row

PAPER = ROOT / reproduce.PUBLISHED
NAME = "magicdec_speedups_h100"


def published(name: str) -> list[Row]:
    return PublishedTable(name, PAPER).part(is_demo=False)


def flags_of(table: str, row: Row) -> dict[str, str]:
    """The first value of each flag of the command of a line; empty for a flag without one."""
    _, system = TABLES[table]
    pairs = itertools.pairwise([*system.command(row).split(), "--"])
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
    """Otherwise run the script with --predict."""
    table = PublishedTable(name, PAPER)
    table.predict()
    assert table.rows == PublishedTable(name, PAPER).rows
    assert all(row["published"] and row["source"] for row in published(name))


@pytest.mark.parametrize("name", TABLES)
def test_every_line_says_what_exists_and_why_not(name: str) -> None:
    for row in PublishedTable(name, PAPER).rows:
        for column in ("published", "predicted", "measured"):
            assert (f"not {column}: " in row["exists"]) == (row[column] == "")


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


def read(table: str, row: Row, folder: Path, *records: dict[str, Any]) -> str:
    """The number of a line in these records, or why it has none."""
    (folder / "records").write_text("\n".join(map(json.dumps, records)))
    try:
        return TABLES[table][1].read(row, folder / "records")[0]
    except Missing as reason:
        return str(reason)


def test_arrivals_alone_predict_what_flover_published(tmp_path: Path) -> None:
    rows = [*published("flover_constant"), *published("flover_poisson")]
    pairs = [(float(r["published"]), float(r["predicted"])) for r in rows if r["predicted"]]
    assert len(pairs) == 4 * 5 + 2 * 14
    assert max(abs(a / b - 1) for a, b in pairs[:20]) < 0.05
    assert max(abs(a / b - 1) for a, b in pairs[20:]) < 0.26
    name, row = "flover_constant", next(r for r in rows if r["quantity"] == "makespan_s")
    assert flags_of(name, row)["--arrival"] == "constant:500"
    assert read(name, row, tmp_path, {"metrics": {"makespan_s": 5.678}}) == "5.68"
    wrong: dict[str, Any] = {"metrics": None}
    assert read(name, row, tmp_path, wrong) == "the tokens of its run were wrong"
    row["quantity"] = "speedup_over_instances"
    assert "no baseline of concurrent instances" in read(name, row, tmp_path, wrong)


def test_layers_alone_predict_more_than_mdi_llm_published(tmp_path: Path) -> None:
    """The slowest of 12 layers on two boards has 7, on three 5. Without a KV cache, three samples
    of 267 tokens cost two thirds of two samples of 400."""
    name = "mdi_llm_generation_time"
    rows = [row for row in published(name) if row["predicted"]]
    speedups = [(r["published"], r["predicted"]) for r in rows if r["quantity"] == "speedup"]
    assert speedups == [("1.45", "1.71"), ("1.69", "2.40"), ("3.38", "4.15")]
    assert float(speedups[2][1]) == pytest.approx(2 * 400**2 / (3 * (800 / 3) ** 2) * 36 / 13, 0.01)
    records = [
        {"name": n, "metrics": {"makespan_s": s}} for n, s in (("sequential", 3), ("ring", 2))
    ]
    assert [read(name, row, tmp_path, *records) for row in rows[:2]] == ["2.00", "1.50"]
    assert TABLES[name][1].needs(rows[0]) == "2 Jetson TX2 boards"


def test_pairs_of_pipeinfer_take_the_settings_of_its_script(tmp_path: Path) -> None:
    name, rows = "pipeinfer_speedups", published("pipeinfer_speedups")
    assert len({(row["model"], row["draft"]) for row in rows}) == 6
    for row in rows:
        flags = flags_of(name, row)
        assert "/" in flags["--model"] and flags["--draft"].startswith("model:")
        stages = flags["--layer_split"].partition("/")[0].split(",")
        assert int(flags["--nproc"]) == len(stages) + 1 == 8
        assert (flags["--gamma"], flags["--np"], flags["--gen_len"]) == ("3", "3", "128")
        make_layout(flags["--layer_split"], 8, 80)
    assert [flags_of(name, row)["--pa"] for row in rows[:3]] == ["0.1", "0.5", "0.1"]
    small = TABLES[name][1].at_demo_size(rows[1])
    assert flags_of(name, small)["--draft"] == "ngram"
    speeds = {"iterative": 5.0, "sync": 10.0, "async": 15.0}
    records = [{"name": n, "metrics": {"request_tokens_per_s": x}} for n, x in speeds.items()]
    assert read(name, small, tmp_path, *records) == "1.50"


def test_the_demo_fits_a_small_machine() -> None:
    for name in TABLES:
        table = PublishedTable(name, PAPER)
        table.make_demo()
        small = table.part(is_demo=True)
        settings = {tuple(row[column] for column in table.system.columns) for row in small}
        assert small and len(settings) == len(small)
        assert all(not row["published"] and not row["predicted"] for row in small)
        for row in small:
            flags = flags_of(name, row)
            assert int(flags["--nproc"]) <= 4
            assert int(flags["--prefix_len"]) <= 4096
            assert int(flags["--prefix_len"]) * int(flags.get("--B", "1")) <= 8 * 4096


def test_what_runs_measured_is_written_beside_what_was_published(
    tmp_path: Path, tables: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """Each command runs once, a second run replaces the lines of the first, and all records are
    kept."""
    started: list[list[object]] = []
    content = make()
    content["metrics"]["speedup_interval"] = [1.25, 1.75]
    record = parse_record(content)

    def run(words: list[object]) -> Ended:
        started.append(words)
        Path(str(words[-1])).write_text(record.to_json() + "\n")
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
    assert len(load_records(out)) == len(started)


def test_a_failed_run_is_named_and_the_others_go_on(
    tmp_path: Path, tables: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    record, started = parse_record(make()), []

    def run(words: list[object]) -> Ended:
        started.append(words)
        if len(started) == 1:
            return Ended(2, "a warning\nmagicdec run: no memory\n")
        Path(str(words[-1])).write_text(record.to_json() + "\n")
        return Ended(0, "a warning\n")

    monkeypatch.setattr(published_table, "run_command", run)
    out = tmp_path / "records.jsonl"
    assert command("reproduce", NAME, "--demo", "--tables", tables, "--out", out).code == 1
    demo = PublishedTable(NAME, tables).part(is_demo=True)
    assert "not measured: its run ended with 2: no memory" in demo[0]["exists"]
    assert all(row["measured"] for row in demo[1:])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["magicdec_nothing"], "table magicdec_nothing is not known; choose from"),
        (["--demo"], "name a table; choose from magicdec_acceptance"),
        ([NAME, "--predict", "--out", "x"], "--out does nothing here"),
        ([NAME, "--predict", "--tables", "/dev/null"], f"--tables /dev/null/{NAME}.csv: Not a dir"),
        (["mdi_llm_generation_time"], "needs 3 hosts, and this command starts runs on one"),
        ([NAME, "--demo", "--out", "/dev/full"], "--out /dev/full: No space left"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    words: list[str], said: str, tables: Path, command: Command
) -> None:
    more = [] if "--tables" in words else ["--tables", str(tables)]
    code, out, err = command("reproduce", *words, *more)
    assert code == 2 and said in err and err.count("\n") == 1 and out == ""


def test_a_table_with_other_columns_is_refused(tables: Path) -> None:
    (tables / f"{NAME}.csv").write_text("model,published\ndemo,1\n")
    with pytest.raises(ValueError, match=f"{NAME}.csv needs the columns model,draft,hardware"):
        PublishedTable(NAME, tables)


def test_the_tables_are_listed(tables: Path, command: Command) -> None:
    code, shown, _ = command("reproduce", "--tables", tables)
    assert code == 0 and all(f"{name}: " in shown for name in TABLES)
    assert max(map(len, shown.splitlines())) <= 80
