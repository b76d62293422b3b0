"""`magicdec table` of the records of commands that serve requests in several passes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Command
from synthetic_records import ENVIRONMENT, PLAIN, STEPS, drawn_command, served

from magicdec.cli import compare, config_of, plan, simulate
from magicdec.cli.parsing.record_files import TABLES
from magicdec.names import RECORDS, load_named
from magicdec.output.tables import print_tables
from magicdec.records.correctness import Correctness
from magicdec.records.describe import verdict_of
from magicdec.records.pass_record import PassRecord
from magicdec.records.reading import load_passes, read_records
from magicdec.records.record import Status, commands_of

UNJUDGED = Correctness("sequential", False, 90)


def measured(name: str, start: str = "first", **workload: object) -> PassRecord:
    """A pass of a mode that is compared with nothing."""
    record = served(PLAIN)
    config = record.config | {"workload": record.config["workload"] | workload}
    environment = replace(record.environment, time_utc=start)
    return replace(record, name=name, config=config, environment=environment)


def record(name: str, start: str = "first", **workload: object) -> PassRecord:
    """A pass whose tokens are wrong, and which has no metrics therefore."""
    return replace(
        measured(name, start, **workload),
        status=Status.MISMATCH,
        reference="sequential",
        num_differing=1,
        correctness=UNJUDGED,
        metrics=None,
    )


def line_of(passed: PassRecord | dict[str, Any]) -> str:
    return json.dumps(passed) if isinstance(passed, dict) else passed.to_json()


def write(path: Path, *records: PassRecord | dict[str, Any]) -> Path:
    path.write_text("".join(line_of(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (
            "unverified",
            "unverified, 2 of 15 requests differ from one in 90 tokens; rounding may be the reason",
        ),
        (
            "mismatch",
            "MISMATCH, 2 of 15 requests differ from one in 90 tokens; it has no metrics",
        ),
    ],
)
def test_the_verdict_says_what_may_excuse_a_difference(status: str, message: str) -> None:
    metrics = served(PLAIN).metrics if status == "unverified" else None
    passed = replace(
        record("ring"), status=status, reference="one", num_differing=2, metrics=metrics
    )
    assert verdict_of(passed) == message


def test_the_table_is_that_of_the_command(
    tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "passes.jsonl", record("one"), record("two"))
    (records,) = commands_of(read_records(path, PassRecord, is_strict=True))
    print_tables(load_named(TABLES, "pass")(records))
    shown = capsys.readouterr().out
    assert "one: MISMATCH, 1 of 15 requests differ from sequential" in shown
    assert command("table", path).out == shown


def test_each_kind_has_tables() -> None:
    assert set(TABLES) == set(RECORDS)
    assert all(callable(load_named(TABLES, kind)) for kind in TABLES)


RATES = "--bandwidth 100 --flops 10 --link 10 --link_latency_us 5 --B 1 4 --prefix_len 100"


@pytest.mark.parametrize(
    ("kind", "flags", "count"),
    [
        ("plan", f"plan --acceptance 0.8 --tp 2 {RATES}", 1),
        ("simulation", "simulate --gen_len 8 --modes pipeinfer ring", 2),
        ("simulation", "simulate --gen_len 8 --stages 2 4 --modes pipeinfer ring", 4),
    ],
)
def test_a_prediction_is_printed_repeated_and_compared(
    kind: str, flags: str, count: int, tmp_path: Path, command: Command
) -> None:
    name, *words = flags.split()
    path = tmp_path / "runs.jsonl"
    kind_command = {"plan": plan, "simulate": simulate}[name]
    code, shown, _ = command(kind_command, *words, "--out", path)
    assert code == 0 and len(path.read_text().splitlines()) == count
    assert command("table", path).out == shown
    assert r"\begin{tabular}" in command("table", path, "--kind", kind, "--format", "latex").out
    file = tmp_path / "again.toml"
    again = tmp_path / "again.jsonl"
    assert command(config_of, path, "--kind", kind, "--out", file).code == 0
    assert command(kind_command, "--config", file, "--out", again).out == shown
    assert command(compare, again, path).code == 0
    text = again.read_text()
    again.write_text(re.sub(r'"(speedup|tokens_per_s)": ', r'"\1": 9', text, count=1))
    code, printed, _ = command(compare, again, path)
    assert code == 1 and "predicted 9" in printed and ", was " in printed
    again.write_text(text.replace('"flags": {', '"flags_": {'))
    code, _, err = command(config_of, again, "--kind", kind)
    assert code == 2 and "predict it again" in err
    again.write_text(re.sub(r'"(dtype|link_s)": ', r'"\1": "x", "was": ', text))
    code, printed, _ = command(compare, again, path)
    assert code == 3 and "the baseline has no prediction of these inputs" in printed


def test_a_file_of_another_kind_is_refused_with_its_command(
    tmp_path: Path, command: Command
) -> None:
    words = ["magicdec serve", "--modes", "ring", "--model", "a b"]
    made = replace(record("ring"), environment=replace(ENVIRONMENT, argv=words))
    path = write(tmp_path / "passes.jsonl", made)
    code, _, err = command(config_of, path)
    again = "magicdec serve --modes ring --model 'a b'"
    assert code == 2 and err.endswith(f"the command itself makes the record again: {again}\n")


def test_each_command_has_a_table(tmp_path: Path, command: Command) -> None:
    passes = [measured("pipeline+draft"), measured("pipeinfer"), record("pipeinfer", "third")]
    passes[2:2] = [
        measured(name, "second", layer_split="2,4") for name in ("pipeline+draft", "pipeinfer")
    ]
    path = write(tmp_path / "passes.jsonl", *passes)
    commands = list(commands_of(read_records(path, PassRecord, is_strict=True)))
    assert [[r.name for r in records] for records in commands] == [
        ["pipeline+draft", "pipeinfer"]
    ] * 2 + [["pipeinfer"]]
    assert len(re.findall(r"[^,] tokens/s of a request", command("table", path).out)) == 2


def test_runs_are_listed_without_the_passes_that_they_are_compared_with(
    tmp_path: Path, command: Command
) -> None:
    """A line each; a served command has its own tables below."""
    later = [
        replace(passed, environment=replace(passed.environment, time_utc="later"))
        for passed in drawn_command(seed=1)
    ]
    runs = [drawn_command()[1], later[1]]
    plain = served(PLAIN)
    modes = [plain, served(STEPS, 0, plain)]
    path = write(tmp_path / "runs.jsonl", *drawn_command(), *later, *modes)
    listing, served_table = command("table", path).out.split("\n\n")
    rates = [f"{run.metrics.draft_acceptance_rate:.2f}±" for run in runs if run.metrics]
    assert [rate in listing for rate in rates] == [True, True]
    assert "static" not in listing and "inflight+draft" in served_table


def test_commands_that_read_passes_name_the_kind(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "runs.jsonl"
    command(simulate, "--gen_len", 8, "--modes", "pipeinfer", "--out", path)
    with pytest.raises(ValueError, match="it has other records only, 1 of kind simulation; see"):
        load_passes(path)


def test_a_file_may_have_records_of_several_kinds(
    tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """All commands append to one file. The table shows the runs, and then the commands of each
    kind; commands that read runs leave the others out and say so."""
    path = write(tmp_path / "runs.jsonl", record("static"), *drawn_command())
    command(simulate, "--gen_len", 8, "--modes", "pipeinfer", "--out", path)
    write(path, *map(json.loads, path.read_text().splitlines()), drawn_command()[1])
    assert len(load_passes(path)) == 4
    assert "left out, 1 of kind simulation" in capsys.readouterr().err
    shown = command("table", path).out
    places = [shown.index(text) for text in ("streaming_llm", "static", "pipeinfer")]
    assert places == sorted(places)
    _, out, err = command("table", path, "--format", "csv")
    assert len(out.splitlines()) == 3
    assert "left out, 1 of serve and 1 of simulation; name files without runs" in err
    alone = write(tmp_path / "alone.jsonl", measured("static"))
    kind_command = command("table", alone, "--format", "csv", "--kind", "pass")
    assert (
        kind_command.out.splitlines()[0].startswith("mode,")
        and "\nmetric,static\n" in kind_command.out
    )


def test_metrics_of_passes_are_compared_by_name(tmp_path: Path, command: Command) -> None:
    old = measured("pipeinfer")
    new = measured("pipeinfer", "later")
    assert old.metrics is not None and new.metrics is not None
    slower = replace(new.metrics, duration_s=1.25 * old.metrics.duration_s)
    environment = replace(new.environment, threads=7)
    new = replace(new, metrics=slower, environment=environment)
    first = write(tmp_path / "old.jsonl", measured("pipeline+draft"), old)
    second = write(tmp_path / "new.jsonl", new, measured("pipeline+draft", lanes=2))
    summary = tmp_path / "summary.md"
    code, shown, _ = command(compare, second, first, "--summary", summary)
    assert code == 0
    assert "pipeinfer: demo" in shown and "nothing is judged" in shown
    assert "pipeline+draft: demo" not in shown, "it has other settings"
    rows = {
        cells[0]: cells[1:] for cells in map(cells_of, summary.read_text().splitlines()) if cells
    }
    assert rows["duration_s"][2] == "+25.0 %" and "output_throughput" not in rows
    assert f"threads: old {old.environment.threads}, new 7" in shown and "cpu: " not in shown
    code, _, err = command(compare, second, first, "--margin", 0.1)
    assert code == 2 and "--margin does nothing here: it is for drafts of runs" in err
    other = write(tmp_path / "other.jsonl", measured("pipeinfer", gamma=9))
    assert command(compare, second, other).code == 3


def test_forwards_are_compared_with_those_of_the_same_weights(
    tmp_path: Path, command: Command
) -> None:
    """Of a draft as of a target."""
    base = json.loads(drawn_command()[1].to_json())
    times = {
        "ms_p10": 1.0,
        "ms_p90": 1.0,
        "bytes": 9,
        "roofline_fraction": 0.5,
        "tokens": 1,
        "products_fraction": 0.2,
    }
    place = {"phase": "draft", "B": 1, "context": 9, "T": 1, "budget": 5, "kv_policy": "snapkv"}
    rows = [
        place | times | {"draft_weights": weights, "ms_median": ms}
        for weights, ms in ((None, 2.0), ("int8", 1.0))
    ]
    old = {key: base[key] for key in ("schema_version", "config", "environment")}
    old |= {"kind": "latency", "status": "ok", "rows": rows}
    new = old | {"rows": [rows[0] | {"ms_median": 3.0}, rows[1]]}
    first = write(tmp_path / "old.jsonl", old)
    second = write(tmp_path / "new.jsonl", new)
    assert "+50.0 %" in command(compare, second, first).out
    model = base["config"]["model"] | {"target_dtype": "int8"}
    third = write(tmp_path / "third.jsonl", new | {"config": base["config"] | {"model": model}})
    assert command(compare, third, first).code == 3


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")] if "|" in line else []
