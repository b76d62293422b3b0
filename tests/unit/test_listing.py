"""`magicdec table` of many records, and `magicdec export`: rows, their order and groups, each
format and intervals; and every metric of a record is what its requests and groups give."""

import csv
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas
import pytest
from conftest import ROOT, Command
from identities import check_metrics
from synthetic_records import drawn, drawn_command, parse_record
from written_records import failed, run_line, write

from magicdec.bench.report.listing import SETTINGS, settings
from magicdec.records.acceptance import GroupAcceptance
from magicdec.records.reading import load_passes
from magicdec.records.recomputing import RATIO_METRICS
from magicdec.records.record import append_together

BASELINES = ROOT / "results" / "baselines" / "acceptance.jsonl"
BEST = drawn(budget=129)


def record(B: int, speedup: float | None, policy: str = "streaming_llm") -> dict[str, Any]:
    made = run_line()
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


def test_each_setting_has_its_name() -> None:
    assert tuple(settings(BEST)) == SETTINGS


def test_markdown_and_latex_say_once_what_is_the_same_in_every_row(
    tmp_path: Path, command: Command
) -> None:
    path = tmp_path / "runs.jsonl"
    odd = [record(B, 1.25) for B in (1, 8)]
    for made in odd:
        made["config"]["model"]["model"] = "a_b|100%"
    write(path, odd)
    md = command("table", path, "--format", "md").out
    assert "| 1 |" in md and "1.25" in md and "model a_b" in md.splitlines()[-1]
    latex = command("table", path, "--format", "latex").out
    assert latex.startswith("% in every row: model a_b|100%")
    assert r"\begin{tabular}{" in latex and latex.rstrip().endswith(r"\end{tabular}")
    assert latex.count(r"\\") == 3
    write(path, [*odd, record(1, 2.0)])
    mixed = command("table", path, "--format", "latex").out
    assert r"a\_b|100\%" in mixed
    assert r"a_b\|100%" in command("table", path, "--format", "md").out


@pytest.mark.parametrize(
    ("section", "key", "value", "label"),
    [
        ("model", "dtype", "bfloat16", "dtype"),
        ("decoding", "pa", 0.9, "pa"),
        ("sampling", "temperature", 0.5, "temperature"),
        ("workload", "gen_len", 9, "gen_len"),
    ],
)
def test_runs_that_differ_have_rows_that_differ(
    tmp_path: Path, command: Command, section: str, key: str, value: object, label: str
) -> None:
    """One run alone, and several that are alike, say it above the table."""
    path = tmp_path / "runs.jsonl"
    other = record(1, 1.25)
    other["config"].setdefault(section, {})[key] = value
    write(path, [other])
    shown = " ".join(command("table", path).out.split())
    assert f"{label} {value}" in shown and "in every row: " in shown
    write(path, [record(1, 1.25), other])
    names, *rows = command("table", path).out.splitlines()[-3:]
    assert label in names.split() and rows[0] != rows[1] and str(value) in rows[1]


def test_low_bit_drafts_are_told_from_others(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "runs.jsonl"
    low_bit = record(1, 1.5)
    low_bit["config"]["decoding"]["draft_weights"] = "int4"
    write(path, [record(1, 1.25), low_bit])
    *_, names, _, row = command("table", path).out.splitlines()
    assert names.startswith("draft weights ") and row.startswith("int4 ")
    assert "| draft weights |" in command("table", path, "--format", "md").out


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_an_export_has_a_row_for_each_pass(tmp_path: Path, command: Command, suffix: str) -> None:
    out = tmp_path / f"runs.{suffix}"
    assert command("export", BASELINES, "--out", out).code == 0
    frame = getattr(pandas, f"read_{suffix}")(out)
    frame = frame[frame["kind"] == "pass"]
    passes = load_passes(BASELINES)
    assert frame["pass"].tolist() == [record.name for record in passes]
    ours = frame[frame["pass"] == "static+draft"]
    raw = [json.loads(record.to_json()) for record in passes if record.name == "static+draft"]
    assert ours["speedup"].tolist() == pytest.approx([r["metrics"]["speedup"] for r in raw])
    assert ours["kv.budget"].tolist() == [r["config"]["kv"]["budget"] for r in raw]
    low, high = (ours[f"decode_tokens_per_s_interval_{end}"] for end in ("low", "high"))
    assert ((low <= ours["decode_tokens_per_s"]) | low.isna()).all()
    assert ((high >= ours["decode_tokens_per_s"]) | high.isna()).all()


def test_an_export_has_a_row_for_each_pass_of_a_run(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "run.jsonl"
    passes = drawn_command()
    append_together(path, passes)
    assert command("export", path, "--out", tmp_path / "run.csv").code == 0
    first, second = rows_of((tmp_path / "run.csv").read_text())
    for row, record in zip((first, second), passes, strict=True):
        assert record.metrics is not None and row["pass"] == record.name
        assert float(row["decode_tokens_per_s"]) == record.metrics.decode_tokens_per_s
        assert row["reference"] == "static" and row["kind"] == "pass"
    assert first["speedup"] == "" and float(second["speedup"]) > 0


def test_an_export_keeps_a_failed_run_and_mixed_gammas(tmp_path: Path, command: Command) -> None:
    auto = run_line()
    auto["config"]["decoding"]["gamma"] = "auto"
    write(tmp_path / "runs.jsonl", [run_line(), auto, failed()])
    assert command("export", tmp_path / "runs.jsonl", "--out", tmp_path / "runs.parquet").code == 0
    frame = pandas.read_parquet(tmp_path / "runs.parquet")
    assert set(frame["decoding.gamma"]) == {"4", "auto"}
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
    code, _, err = command("export", BASELINES, "--out", tmp_path / out)
    assert code == 2 and message in err and err.count("\n") == 1


def test_a_text_table_has_a_line_of_80_columns_for_each_run(command: Command) -> None:
    lines = command("table", ROOT / "results" / "cpu" / "records.jsonl.gz").out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("draft "))
    rows = lines[start + 1 : start + 79]
    assert all(len(line) <= 80 for line in lines[: start + 79])
    known = ("none", "self", "ngram", "demo-draft")
    assert all(line.startswith(known) for line in rows), "no name is folded"
    assert any(line.startswith("self       streaming_llm 257 ") for line in rows)
    assert "status: 66 verified, 8 unverified" in lines, "it has no column"


def test_numbers_are_whole_where_runs_differ_in_many_settings(
    tmp_path: Path, command: Command
) -> None:
    """Then a line has more than 80 columns. The dtype of the weights is no column of its own where
    it is that of the activations."""
    runs = [record(1, 1.25), record(2, 12345.5)]
    path = tmp_path / "runs.jsonl"
    other = runs[1]["config"]
    other["model"] |= {"model": "another-model-with-a-name", "dtype": "bfloat16"}
    other["model"]["target_dtype"] = "bfloat16"
    other["workload"] |= {"batch_size": 128, "prefix_len": 131072, "gen_len": 4096, "seed": 123456}
    other["decoding"] |= {"gamma": 8, "pa": 0.875}
    other["sampling"] = {"temperature": 0.625}
    runs[1]["environment"]["threads"] = 128
    runs[1]["workload"]["prefix_len"] = 131072
    write(path, runs)
    lines = command("table", path).out.splitlines()
    assert len(lines) == 5 and len(lines[-1]) > 80
    assert {"another-model-with-a-name", "bfloat16", "131072", "123456"} <= {*lines[-1].split()}
    assert "target_dtype" not in lines[-3]


def test_a_table_has_the_interval(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "runs.jsonl"
    append_together(path, [BEST, drawn(budget=65)])
    text = " ".join(command("table", path).out.split())
    assert BEST.metrics is not None and BEST.metrics.draft_acceptance_rate_interval is not None
    low, high = BEST.metrics.draft_acceptance_rate_interval
    assert f"{BEST.metrics.draft_acceptance_rate:.2f}±{(high - low) / 2:.2f}" in text
    assert "accept: acceptance rate;" in text and "±: half of the 95 % interval" in text
    first = rows_of(command("table", path, "--format", "csv").out)[0]
    ends = [first[f"draft_acceptance_rate_interval_{end}"] for end in ("low", "high")]
    assert list(map(float, ends)) == [low, high] and first["net_speedup_interval_low"] == ""
    for form in ("latex", "md"):
        shown = command("table", path, "--format", form).out
        assert "acceptance rate, 95 " in shown and f"[{low:.3f}, {high:.3f}]" in shown
        assert shown.count("% interval") == 1, "an interval that no row has is no column"


def test_rows_and_columns_can_be_chosen(tmp_path: Path, command: Command) -> None:
    path = records(tmp_path)

    def column(*flags: object) -> list[str]:
        out = command("table", path, "--columns", "speedup", *flags).out
        return [row.strip() for row in out.splitlines()[1:]]

    assert column() == ["1.50", "", "2.50", "0.50", "1.75", ""]
    assert column("--sort", "speedup") == ["0.50", "1.50", "1.75", "2.50", "", ""]
    assert column("--sort", "speedup", "--descending") == ["2.50", "1.75", "1.50", "0.50", "", ""]
    assert column("--sort", "B", "speedup")[:2] == ["0.50", ""], "the first column counts most"
    named = rows_of(command("table", path, "--columns", "B", "mean_step_ms", "--format=csv").out)
    assert [*named[0]] == ["B", "mean_step_ms"] and named[0]["mean_step_ms"] == "1.0"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--columns", "speedp"], "--columns speedp is not known; did you mean speedup?"),
        (["--sort", "B", "--kind", "plan"], "--sort does nothing here: it is for runs"),
        (["--descending"], "--descending does nothing here: give --sort"),
    ],
)
def test_a_choice_that_does_nothing_is_refused(
    tmp_path: Path, flags: list[str], message: str, command: Command
) -> None:
    code, _, err = command("table", records(tmp_path), *flags)
    assert code == 2 and message in err and err.count("\n") == 1


def test_a_table_says_which_runs_had_a_busy_host(tmp_path: Path, command: Command) -> None:
    """In a line on top and in their rows, in every form; CSV has the share of each."""
    path = tmp_path / "runs.jsonl"
    made = [record(B, 1.25) for B in (1, 2, 4)]
    for raw, taken in zip(made, (0.48, 0.099, None), strict=True):
        raw["environment"]["cores_taken"] = taken
    write(path, made)
    message = "1 of 3 runs: another load took 48% of the cores meanwhile, so times and speedups"
    for flags in ([], ["--format", "md"], ["--columns", "B", "cores_taken"]):
        out = command("table", path, *flags).out
        assert " ".join(out.split()).startswith(message) and " busy" in out
        assert out.count("48%") == 2 and "9%" not in out and "10%" not in out
    taken = [row["cores_taken"] for row in rows_of(command("table", path, "--format=csv").out)]
    assert taken == ["0.48", "0.099", ""]
    *_, first, _, _ = command("table", path).out.splitlines()
    assert first.startswith("1 ") and first.endswith("48%"), "in the row of B 1"
    write(path, made[1:])
    out = command("table", path).out
    assert "busy" not in out and "another load" not in out, "of a quiet host nothing is said"


def test_the_runs_of_a_study_are_in_the_order_of_its_settings(
    tmp_path: Path, command: Command
) -> None:
    """Which it works through in a random order; runs of their own stay where they are."""
    study = ["magicdec sweep", "run", "--kv_policy", "snapkv", "full", "--B", "2", "16"]
    wanted = [("snapkv", 2), ("snapkv", 16), ("full", 2), ("full", 16)]
    made = [record(B, 1.5, policy) for policy, B in (wanted[n] for n in (3, 0, 2, 1))]
    for raw in made:
        raw["environment"]["argv"] = study
    path = tmp_path / "runs.jsonl"
    write(path, [record(8, 1.0), made[0], record(4, 1.0), *made[1:]])
    out = rows_of(command("table", path, "--format", "csv").out)
    places = [(row["kv_policy"], int(row["B"])) for row in out]
    assert places == [("streaming_llm", 8), *wanted, ("streaming_llm", 4)]


# What requests and groups do not say: there is only a condition, or nothing.
FREE = {*(f"{name}_itl_ms" for name in ("mean", "p50", "p90", "p99")), "warmup_calibration_ms"}
PASSES = {"drafting": drawn_command, "few prompts": lambda: drawn_command(num_prompts=2)}
PASSES["plain"] = lambda: drawn_command()[:1]


@pytest.mark.narrow(4)
@pytest.mark.parametrize("name", PASSES)
def test_every_metric_is_computed_again_from_the_record_alone(name: str) -> None:
    """Of a run. And a metric that was changed in the file is named."""
    *others, record = PASSES[name]()
    assert check_metrics(record, [*others, record]) == []
    raw = json.loads(record.to_json())
    for key, value in raw["metrics"].items():
        wrong = parse_record(raw | {"metrics": raw["metrics"] | {key: other_than(key, value)}})
        is_known = key not in FREE and (others or not key.startswith(RATIO_METRICS))
        found = {*check_metrics(wrong, [*others, wrong])}
        assert found == {key} if is_known else found <= {key}, key


def test_the_committed_baselines_have_the_metrics_of_their_requests() -> None:
    for record in load_passes(BASELINES):
        assert check_metrics(record) == []


def other_than(name: str, value: Any) -> Any:
    """Another value that this metric could have."""
    if name == "acceptance_by_category":
        more = {key: group | {"num_prompts": 9} for key, group in (value or {}).items()}
        return more or {"prose": asdict(GroupAcceptance(num_prompts=1))}
    if value is None and name.endswith("_interval"):
        return [[0.5, 0.6]] if "position" in name else [0.5, 0.6]
    if value is None and name in ("judged_per_position", "acceptance_histogram"):
        return [1]
    if value is None:
        return [0.5] if name.endswith(("_per_group", "_per_position")) else 1
    if isinstance(value, list):
        return [*value[:-1], other_than(name, value[-1])]
    return value + (1 if isinstance(value, int) else 1e-3 * abs(value) + 1e-3)
