"""`magicdec table` of the records of commands that serve requests in several passes."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_compare import make
from test_pipeline_command import finished, observed

from magicdec.cli import compare, table
from magicdec.cli.commands import console
from magicdec.cli.parsing.record_files import TABLES, read_commands
from magicdec.names import RECORDS, load_named
from magicdec.pipelined_run.metrics import speculation_metrics
from magicdec.pipelined_speculation.options import Counts
from magicdec.records.reading import load_records
from magicdec.records.record import SCHEMA_VERSION
from magicdec.serving.bars import labels_of
from magicdec.serving.metrics import Moves, StepCounts, serving_metrics
from magicdec.serving.showing import verdict
from magicdec.tables import print_tables

OPTIONS: dict[str, Any] = {
    "num_requests": 2, "arrival": "burst", "gen_len": 4, "batch_size": 1, "goodput": {},
    "draft": "ngram", "layer_split": "3,3", "lanes": 1,
}  # fmt: skip


def record(name: str, start: str = "first", **workload: object) -> dict[str, Any]:
    """A pass whose tokens are wrong, and which has no metrics therefore."""
    base = make()
    config = base["config"] | {"workload": OPTIONS | {"mode": name} | workload}
    return {
        "kind": "serving", "schema_version": SCHEMA_VERSION, "threads": [2], "status": "diverged",
        "name": name, "config": config,
        "environment": base["environment"] | {"time_utc": start}, "workload": base["workload"],
        "reference": "sequential", "num_differing": 1, "metrics": None, "ring": None,
        "speculation": None, "requests": [],
    }  # fmt: skip


def measured(name: str, start: str = "first", **workload: object) -> dict[str, Any]:
    counts = StepCounts(num_steps=3, moves={0: Moves([0.0])})
    metrics = serving_metrics([finished([1.0, 2.0, 3.0])], counts)
    speculation = speculation_metrics(observed(), Counts(runs=3), has_drafts=True)
    right = {"status": "ok", "num_differing": 0}
    parts = {"metrics": asdict(metrics), "speculation": asdict(speculation)}
    return record(name, start, **workload) | right | parts


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["magicdec table", *map(str, words)])
    table.main()


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ("differs", "ring: DIFFERS, 2 of 3 requests differ from one; rounding may be the reason"),
        ("diverged", "ring: DIVERGED, 2 of 3 requests differ from one"),
    ],
)
def test_the_verdict_says_what_may_excuse_a_difference(status: str, said: str) -> None:
    passed = SimpleNamespace(
        name="ring", status=status, reference="one", num_differing=2, requests=[0, 0, 0]
    )
    assert verdict(passed) == said


def test_the_table_is_that_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "passes.jsonl", record("one"), record("two"))
    (records,) = read_commands("serving", [path], is_strict=True)
    print_tables(load_named(TABLES, "serving")(records))
    shown = capsys.readouterr().out
    assert "DIVERGED, 1 of 0 requests differ from sequential" in shown
    run(monkeypatch, path)
    assert capsys.readouterr().out == shown


def test_each_kind_but_runs_has_tables() -> None:
    assert set(TABLES) == set(RECORDS) - {"run"}
    assert all(callable(load_named(TABLES, kind)) for kind in TABLES)


RATES = "--bandwidth 100 --flops 10 --link 10 --link_latency_us 5 --B 1 4 --prefix_len 100"


@pytest.mark.parametrize(
    ("kind", "command", "count"),
    [
        ("plan", f"plan --acceptance 0.8 --tp 2 {RATES}", 1),
        ("stage_plan", f"plan --stages 2 {RATES}", 1),
        ("simulation", "simulate --gen_len 8 --modes async ring", 2),
        ("simulation", "simulate --gen_len 8 --stages 2 4 --modes async ring", 4),
    ],
)
def test_the_table_of_what_was_predicted_is_that_of_the_command(
    kind: str, command: str, count: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = tmp_path / "runs.jsonl"
    monkeypatch.setattr(sys, "argv", ["magicdec", *command.split(), "--out", str(path)])
    with pytest.raises(SystemExit) as ended:
        console()
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and len(path.read_text().splitlines()) == count
    run(monkeypatch, path)
    assert capsys.readouterr().out == shown
    run(monkeypatch, path, "--kind", kind, "--format", "latex")
    assert r"\begin{tabular}" in capsys.readouterr().out


def test_each_command_has_a_table_and_a_series(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    passes = [measured("sync"), measured("async"), record("async", "third")]
    passes[2:2] = [measured(name, "second", layer_split="2,4") for name in ("sync", "async")]
    path = write(tmp_path / "passes.jsonl", *passes)
    commands = list(read_commands("serving", [path], is_strict=True))
    assert [[r.name for r in records] for records in commands] == [["sync", "async"]] * 2 + [
        ["async"]
    ]
    assert labels_of(commands[:2]) == ["demo, 3,3", "demo, 2,4"]
    run(monkeypatch, path, "--plot", tmp_path / "bars.svg")
    assert len(re.findall(r"[^,] tokens/s of a request", capsys.readouterr().out)) == 2
    picture = (tmp_path / "bars.svg").read_text()
    assert "<!-- demo, 2,4 -->" in picture and picture.count("<!-- async -->") == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sort", "speedup"], "--sort does nothing here: it is for records of runs"),
        (["--check"], "passes.jsonl: it has other records only, 1 of kind serving; see"),
        (["--plot", "bars.txt"], "--plot bars.txt: the name must end in .png or .svg or .pdf"),
        (["--plot", "none.svg"], "--plot none.svg: no pass has metrics to draw"),
    ],
)
def test_refuses_in_one_line(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("passes.jsonl"), record("async"))
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "passes.jsonl", *words)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_commands_that_read_runs_name_the_kind(tmp_path: Path) -> None:
    path = write(tmp_path / "passes.jsonl", record("ring"))
    with pytest.raises(ValueError, match="it has other records only, 1 of kind serving; see"):
        load_records(path)


def test_a_file_may_have_records_of_several_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All commands append to one file. The table shows the runs, and then the commands of each
    kind; commands that read runs leave the others out and say so."""
    path = write(tmp_path / "runs.jsonl", record("static"), make())
    simulate = f"magicdec simulate --gen_len 8 --modes async --out {path}"
    monkeypatch.setattr(sys, "argv", simulate.split())
    with pytest.raises(SystemExit):
        console()
    write(path, *map(json.loads, path.read_text().splitlines()), make())
    capsys.readouterr()
    assert len(load_records(path)) == 2
    others = "left out, 1 of kind serving and 1 of kind simulation"
    assert others in capsys.readouterr().err
    run(monkeypatch, path)
    shown = capsys.readouterr().out
    places = [shown.index(text) for text in ("streaming_llm", "static", "async")]
    assert places == sorted(places)
    run(monkeypatch, path, "--format", "csv")
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 3
    assert f"{others}; see --kind" in printed.err
    run(monkeypatch, path, "--format", "csv", "--kind", "serving")
    assert capsys.readouterr().out.splitlines()[0] == "metric,static"


def compared(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["magicdec compare", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        compare.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_metrics_of_passes_are_compared_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = measured("async"), measured("async", "later")
    new["metrics"] |= {"makespan_s": 1.25 * old["metrics"]["makespan_s"]}
    first = write(tmp_path / "old.jsonl", measured("sync"), old)
    second = write(tmp_path / "new.jsonl", new, measured("sync", lanes=2))
    summary = tmp_path / "summary.md"
    assert compared(monkeypatch, second, first, "--summary", summary) == 0
    shown = capsys.readouterr().out
    assert "1 of 2 passes are in both files" in shown and "async: demo" in shown
    rows = {
        cells[0]: cells[1:] for cells in map(cells_of, summary.read_text().splitlines()) if cells
    }
    assert rows["makespan, s"][2] == "+25.0 %" and rows["output tokens/s"][2] == "+0.0 %"
    assert compared(monkeypatch, second, first, "--margin", 0.1) == 2
    assert "--margin does nothing here: it is for records of runs" in capsys.readouterr().err
    other = write(tmp_path / "other.jsonl", measured("async", gamma=9))
    assert compared(monkeypatch, second, other) == 3


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")] if "|" in line else []


def test_a_damaged_line_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, cut = record("async"), record("sync")
    del cut["requests"]
    path = write(tmp_path / "passes.jsonl", cut, whole)
    (records,) = read_commands("serving", [path], is_strict=False)
    assert [each.name for each in records] == ["async"]
    assert ":1: not a record; it has no requests; this line is skipped" in capsys.readouterr().err
    with pytest.raises(ValueError, match="it has no requests"):
        list(read_commands("serving", [path], is_strict=True))
