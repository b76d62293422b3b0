"""`magicdec table` of many records, and `magicdec export`: rows, their order and groups, each
format and intervals; and `magicdec table --check`: every metric of a record is what its samples
give."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pandas
import pytest
from conftest import ROOT, Command
from synthetic_records import drawn
from test_compare import failed, make, write
from test_record import RECORDS

from magicdec.cli import export, table
from magicdec.records.record import append_record
from magicdec.report.settings import SETTINGS, settings

BASELINES = ROOT / "results" / "baselines" / "acceptance.jsonl"
BEST = drawn(budget=129)


def record(B: int, speedup: float | None, policy: str = "streaming_llm") -> dict[str, Any]:
    made = make()
    made["config"]["workload"]["batch_size"] = B
    made["config"]["kv"]["policy"] = policy
    made["metrics"]["speedup"] = speedup
    return made


def records(tmp_path: Path) -> Path:
    path = tmp_path / "runs.jsonl"
    speedups = [(8, 1.5), (1, None), (8, 2.5), (1, 0.5), (8, 1.75)]
    write(path, [*(record(B, speedup) for B, speedup in speedups), failed()])
    return path


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_a_group_has_the_median_of_those_that_have_the_metric(
    tmp_path: Path, command: Command
) -> None:
    rows = rows_of(command(table, records(tmp_path), "--group_by", "B", "--format", "csv").out)
    found = {row["B"]: (row["runs"], row["speedup"]) for row in rows}
    assert found["8"] == ("3", "1.75") and found["1"][1] == "0.5"
    assert sum(int(row["runs"]) for row in rows) == 6


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--sort", "speedup"], ["2.5", "1.75", "1.5", "0.5", "", ""]),
        (["--sort", "speedup", "--reverse"], ["0.5", "1.5", "1.75", "2.5", "", ""]),
        ([], ["1.5", "", "2.5", "0.5", "1.75", ""]),
    ],
)
def test_rows_without_the_value_come_last(
    tmp_path: Path, command: Command, words: list[str], expected: list[str]
) -> None:
    rows = rows_of(command(table, records(tmp_path), "--format", "csv", *words).out)
    assert [row["speedup"] for row in rows] == expected


def test_each_setting_has_its_name() -> None:
    assert tuple(settings(BEST)) == SETTINGS


def test_settings_are_sorted_as_numbers(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "runs.jsonl"
    write(path, [record(B, 1.0) for B in (16, 2, 128)])
    rows = rows_of(command(table, path, "--sort", "B", "--format", "csv").out)
    assert [row["B"] for row in rows] == ["2", "16", "128"]


def test_markdown_and_latex_say_once_what_is_the_same_in_every_row(
    tmp_path: Path, command: Command
) -> None:
    path = tmp_path / "runs.jsonl"
    odd = [record(B, 1.25) for B in (1, 8)]
    for made in odd:
        made["config"]["model"]["model"] = "a_b|100%"
    write(path, odd)
    md = command(table, path, "--format", "md").out
    assert "| 1 |" in md and "1.25" in md and "model a_b" in md.splitlines()[-1]
    latex = command(table, path, "--format", "latex").out
    assert latex.startswith("% in every row: model a_b|100%")
    assert r"\begin{tabular}{" in latex and latex.rstrip().endswith(r"\end{tabular}")
    assert latex.count(r"\\") == 3
    one = command(table, path, "--group_by", "model", "B", "--format", "latex").out
    assert "a_b" not in one.splitlines()[3], "it is the same in both groups"
    write(path, [*odd, record(1, 2.0)])
    mixed = command(table, path, "--format", "latex").out
    assert r"a\_b|100\%" in mixed
    assert r"a_b\|100%" in command(table, path, "--format", "md").out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--group_by", "batch"], "--group_by batch is not known; choose from model"),
        (["--sort", "fast"], "--sort fast is not known; choose from model"),
        (["--sort", "gamma", "--group_by", "B"], "--sort gamma is not in the table"),
    ],
)
def test_unknown_keys_are_refused(words: list[str], message: str, command: Command) -> None:
    code, _, err = command(table, BASELINES, *words)
    assert code == 2 and message in err and err.count("\n") == 1


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_an_export_has_a_row_for_each_pass(tmp_path: Path, command: Command, suffix: str) -> None:
    out = tmp_path / f"runs.{suffix}"
    assert command(export, BASELINES, "--out", out).code == 0
    frame = getattr(pandas, f"read_{suffix}")(out)
    raw = [json.loads(line) for line in BASELINES.read_text().splitlines()]
    baselines = [r["baseline_metrics"] for r in raw if r["baseline_metrics"] is not None]
    assert len(frame) == len(raw) + len(baselines)
    ours = frame[frame["pass"] == "speculative"]
    assert ours["speedup"].tolist() == pytest.approx([r["metrics"]["speedup"] for r in raw])
    assert ours["kv.budget"].tolist() == [r["config"]["kv"]["budget"] for r in raw]
    low, high = (ours[f"decode_tokens_per_s_interval_{end}"] for end in ("low", "high"))
    assert ((low <= ours["decode_tokens_per_s"]) | low.isna()).all()
    assert ((high >= ours["decode_tokens_per_s"]) | high.isna()).all()
    theirs = frame[frame["pass"] == "autoregressive"]
    expected = [m["decode_tokens_per_s"] for m in baselines]
    assert theirs["decode_tokens_per_s"].tolist() == pytest.approx(expected)


def test_an_export_keeps_a_failed_run_and_mixed_gammas(tmp_path: Path, command: Command) -> None:
    auto = make()
    auto["config"]["decoding"]["num_draft_tokens"] = "auto"
    write(tmp_path / "runs.jsonl", [make(), auto, failed()])
    assert command(export, tmp_path / "runs.jsonl", "--out", tmp_path / "runs.parquet").code == 0
    frame = pandas.read_parquet(tmp_path / "runs.parquet")
    assert set(frame["decoding.num_draft_tokens"]) == {"4", "auto"}
    last = frame.iloc[-1]
    assert last["status"] == "failed" and last["error"] and pandas.isna(last["speedup"])


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("runs.xlsx", "must end in .csv or .parquet"),
        ("file/runs.csv", "file is not a directory"),
        ("file/runs.parquet", "file is not a directory"),
        ("folder.csv", "Is a directory"),
    ],
)
def test_an_export_that_cannot_be_written_is_one_line(
    tmp_path: Path, out: str, message: str, command: Command
) -> None:
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "file").touch()
    code, _, err = command(export, BASELINES, "--out", tmp_path / out)
    assert code == 2 and message in err and err.count("\n") == 1


def test_a_text_table_has_a_line_of_80_columns_for_each_run(command: Command) -> None:
    lines = command(table, ROOT / "results" / "cpu" / "records.jsonl.gz").out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("draft "))
    rows = lines[start + 1 : start + 79]
    assert all(len(line) <= 80 for line in lines[: start + 79])
    known = ("none", "self", "ngram", "demo-draft")
    assert all(line.startswith(known) for line in rows), "no name is folded"
    assert any(line.startswith("self       streaming_llm 257 ") for line in rows)


def test_a_table_has_the_interval(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "runs.jsonl"
    append_record(path, BEST)
    assert "±" not in command(table, path, "--format", "csv").out
    append_record(path, drawn(budget=65))
    out = " ".join(command(table, path).out.split())
    assert BEST.metrics is not None and BEST.metrics.acceptance_rate_interval is not None
    low, high = BEST.metrics.acceptance_rate_interval
    assert f"{BEST.metrics.acceptance_rate:.2f}±{(high - low) / 2:.2f}" in out


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
    code, out, _ = command(table, "--check", BASELINES)
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
