"""What is printed of records: the table of one run says what its sample can carry, the table of
many has a line a run; and both tools read any file or refuse it in one line."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import HANG, ROOT, Command
from synthetic_records import ENVIRONMENT, IDENTICAL, WORKLOAD, parse_record
from synthetic_samples import pass_samples

from magicdec.config.machine import Machine
from magicdec.config.resolve import resolve
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import DecodingSection, KVSection
from magicdec.records import table
from magicdec.records.correctness import (
    Correctness,
    Divergence,
    ForwardErrors,
    JudgedAgain,
    Misjudged,
)
from magicdec.records.fields import Recorded
from magicdec.records.intervals import FEWEST_BATCHES, ratio_interval
from magicdec.records.metrics import decode_metrics
from magicdec.records.reading import load_records
from magicdec.records.record import STATUSES, RunRecord, append_record
from magicdec.records.table import SHOWN, pays_of, table_of, table_rows

Record = dict[str, Any]
RATE = 0.8


def make(rate: float | None = RATE, budget: int = 257, **top: Any) -> Record:
    decoding = DecodingSection("speculative", "self")
    config = resolve(RunConfig(kv=KVSection(budget=budget), decoding=decoding), Machine(2))
    metrics = decode_metrics(pass_samples(step_ms=[[100.0]], sequence_tokens=[[]]), 1e9, False)
    record = RunRecord(
        status="ok",
        config=config.to_dict(),
        environment=ENVIRONMENT,
        workload=replace(WORKLOAD, num_prompts=1),
        correctness=IDENTICAL,
        metrics=replace(
            metrics, decode_tokens_per_s=1234567.8, speedup=1.5, draft_acceptance_rate=rate
        ),
        baseline_metrics=metrics,
    )
    return json.loads(record.to_json()) | top


def failed() -> Record:
    none = dict.fromkeys(("correctness", "metrics", "baseline_metrics", "workload"))
    return make(status="failed", error="RuntimeError: [enforce fail] in [/x] :fire:", **none)


def with_ties() -> Record:
    correctness = diverged(0.07)["correctness"] | {
        "num_excused": 2,
        "num_diverged": 0,
        "margin_bound": 0.15,
        "expected_differing": 2.6,
        "most_differing": 7,
        "num_short": 3,
        "num_short_reference": 4,
    }
    return make(status="ok_with_ties", correctness=correctness)


def diverged(margin: float | None = 2.5) -> Record:
    first = Divergence(3, 5, 1, None, margin)
    correctness = asdict(Correctness("autoregressive", False, 99, first, 0, 1, 1e-4))
    none = dict.fromkeys(("metrics", "baseline_metrics"))
    return make(status="diverged", correctness=correctness, **none)


def write(path: Path, records: Sequence[Record]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_closed_pipe_is_no_traceback(tmp_path: Path) -> None:
    """As in `magicdec compare NEW OLD | head -1`; here the reader ends before the first line."""
    path = write(tmp_path / "runs", [make()] * 20)
    start = "from magicdec.cli.commands import console; console()"
    for words in (["compare", str(path), str(path)], ["--help"]):
        process = subprocess.Popen(
            [sys.executable, "-c", start, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        with process.stderr:
            assert process.stderr.read() == b""
        assert process.wait(HANG) == 141


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, ": No such file or directory; give a file of records"),
        (b"", " holds no records"),
        (b"not JSON\n", ":1: not a JSON record"),
        (b'{"kind": "run", "schema_version": 3}', ":1: not a record; it has no "),
    ],
)
@pytest.mark.parametrize("tool", ["compare", "table"])
def test_unreadable_files_are_refused_in_one_line(
    tmp_path: Path, command: Command, tool: str, content: bytes | None, message: str
) -> None:
    if tool == "table" and content == b"":
        return  # an empty table
    if content is not None:
        (tmp_path / "new").write_bytes(content)
    old = [write(tmp_path / "old", [make()])] * (tool == "compare")
    code, out, err = command(tool, tmp_path / "new", *old)
    assert (code, out) == (2, "")
    assert f"{tmp_path / 'new'}{message}" in err and err.count("\n") == 1
    assert err.startswith(f"magicdec {tool}: ")


def test_the_table_has_a_line_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """Also for runs without numbers; and no number is cut, nor a name read as markup."""
    odd = make()
    odd["config"]["model"]["model"] = "/m/[bold]:fire:"
    odd["metrics"] = dict.fromkeys(odd["metrics"]) | {"bytes_read": 0}
    first = write(tmp_path / "a", [make(), odd])
    second = write(tmp_path / "b", [failed(), diverged(), with_ties()])
    monkeypatch.setenv("COLUMNS", "80")
    _, out, err = command("table", first, second)
    lines = [line.rstrip() for line in out.splitlines()]
    rows = [line for line in lines if line.endswith(tuple(f" {status}" for status in STATUSES))]
    assert [row.split()[-1] for row in rows] == ["ok", "ok", "failed", "diverged", "ok_with_ties"]
    assert all(n in rows[0] for n in ("demo", "1234567.8", "1.50", "0.800"))
    assert "/m/[bold]:fire:" in rows[1]
    assert "…" not in out and "None" not in out and err == ""
    assert max(map(len, lines)) <= 80


def printed(record: Record, capsys: pytest.CaptureFixture[str], is_verbose: bool = True) -> str:
    table.print_record(parse_record(record), is_verbose)
    return " ".join(capsys.readouterr().out.split())


def test_one_run_is_printed_with_its_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(make(), capsys)
    assert "identical: 99 tokens compared with autoregressive, no difference" in out
    assert "self-speculation," in out and "streaming_llm 257, gamma 4" in out
    assert "decode, tokens/s" in out and "1,234,567.8" in out and "1.50x" in out and "0.800" in out
    assert "verify" not in out, "a row without numbers is left out"
    assert "answer score" not in out
    scored = make()
    scored["metrics"]["answer_score"] = 0.125
    assert "answer score" in (out := printed(scored, capsys)) and "0.125" in out
    ties = diverged(1e-5)["correctness"] | {"num_excused": 2, "num_diverged": 0}
    out = printed(make(status="ok_with_ties", correctness=ties), capsys)
    assert "ok with 2 tie(s), not identical" in out and "sequence 3, token 5 (margin 1e-05)" in out
    out = printed(with_ties(), capsys)
    assert out.startswith("ok with 2 tie(s), not identical: 99 tokens") and "1.50x" in out
    assert "2 sequence(s) differ, rounding explains up to 7, and margins up to 0.15" in out
    assert "3 token(s) are not the wider model's choice, of the baseline's 4" in out
    alone = make(correctness=asdict(Correctness(None, num_tokens=99)), baseline_metrics=None)
    assert "99 tokens; not compared" in printed(alone, capsys)


def test_by_default_the_verdict_is_one_fact(capsys: pytest.CaptureFixture[str]) -> None:
    """What else was checked is for `--verbose`, and for a verdict that is not right."""
    parts = {"judged_again": JudgedAgain(30, 31, 99, 0), "forwards": ForwardErrors(9, 0)}
    run = make(correctness=asdict(replace(IDENTICAL, **parts)))
    out = printed(run, capsys, is_verbose=False)
    assert out.startswith("identical: 99 tokens compared with autoregressive, no difference demo (")
    out = printed(with_ties(), capsys, is_verbose=False)
    tie = (
        "ok with 2 tie(s), not identical: 99 tokens compared with autoregressive; rounding explains"
    )
    assert out.startswith(f"{tie} what differs demo (")
    out = printed(diverged(), capsys, is_verbose=False)
    assert "margin 2.5" in out and "no performance is reported" in out


def test_by_default_a_table_has_at_most_14_rows(record: RunRecord) -> None:
    """Of a run that has a value for every row."""
    assert record.metrics is not None and record.workload is not None
    several = {
        each.name: [1.5] * 4
        for each in fields(record.metrics)
        if each.name.endswith(("_per_batch", "_per_position"))
    }
    full = dict.fromkeys(SHOWN, 1.5) | several | {"acceptance_per_position_interval": None}
    metrics = replace(record.metrics, **full)
    workload = replace(record.workload, num_prompts=100)
    run = replace(record, metrics=metrics, baseline_metrics=metrics, workload=workload)
    every, brief = (table_of(run, is_verbose).rows for is_verbose in (True, False))
    assert len(brief) <= 14 < len(every)
    assert [row for row in every if row in brief] == [*brief], "the same rows in the same order"
    assert {"speedup, median of 4 batches", "  of them that pay (break-even)"} <= {
        row[0] for row in brief
    }


@pytest.mark.parametrize(
    ("net", "ends", "emitted", "said"),
    [
        (
            1.5,
            [1.2, 1.9],
            3.0,
            "Speculation pays here: net speedup 1.50x [1.20, 1.90]; a "
            "verification emits 3.00 tokens and pays from 2.00 on.",
        ),
        (
            0.8,
            [0.7, 0.9],
            1.5,
            "Speculation does not pay here: net speedup 0.80x [0.70, 0.90]; a "
            "verification emits 1.50 tokens and pays from 2.00 on.",
        ),
        (
            1.1,
            [0.9, 1.4],
            3.0,
            "Speculation may or may not pay here: net speedup 1.10x [0.90, 1.40]",
        ),
        (0.9, [0.8, 1.0], 3.0, "Speculation may or may not pay here"),
        (
            0.9,
            None,
            3.0,
            "Speculation does not pay here: net speedup 0.90x in 2 batches; a "
            "verification emits 3.00 tokens and pays from 2.00 on, which is less than what comes "
            "before the first step costs.",
        ),
        (
            1.0,
            None,
            None,
            "Speculation does not pay here: net speedup 1.00x in 2 batches; nothing was drafted.",
        ),
        (None, None, 3.0, None),
    ],
)
def test_a_sentence_says_whether_speculation_pays(
    net: float | None,
    ends: list[float] | None,
    emitted: float | None,
    said: str | None,
    record: RunRecord,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table, "break_even", lambda record: 2.0)
    assert record.metrics is not None
    metrics = replace(
        record.metrics,
        net_speedup=net,
        net_speedup_interval=ends,
        net_speedup_per_batch=[1.0, 2.0],
        mean_emitted_tokens=emitted,
    )
    run = replace(record, metrics=metrics)
    assert [line.startswith(said or "") for line in pays_of(run)] == (
        [] if said is None else [True]
    )
    decoding = record.config["decoding"] | {"emulate_acceptance": [0.5]}
    emulated = replace(record, metrics=metrics, config=record.config | {"decoding": decoding})
    for line in pays_of(emulated):
        assert line.startswith("Speculation with EMULATED acceptance ")


def test_a_verdict_says_what_its_parts_have_found(capsys: pytest.CaptureFixture[str]) -> None:
    """Equal tokens with wrong steps or forwards are no `identical`."""
    judged = JudgedAgain(30, 31, 99, 0)
    measured = ForwardErrors(9, 8, 8, 0.023, 0.024, 1.04, 1.3, 1.8, 4.0, 1, 0.5, 3, 0.0222)

    def line(parts: Correctness) -> str:
        run = make()
        none = dict.fromkeys(("metrics", "baseline_metrics"))
        status = {"status": parts.status, "correctness": asdict(parts)}
        return " ".join(printed(run | status | (none if not parts.passed else {}), capsys).split())

    right = replace(IDENTICAL, judged_again=judged, forwards=ForwardErrors(9, 0))
    out = line(right)
    assert out.startswith("identical: 99 tokens compared with autoregressive, no difference; 30 of")
    assert "30 of 31 steps judged again, all right; logits of both passes equal at 9 pos" in out
    out = line(replace(right, forwards=measured))
    assert "errors of the logits 0.024, the baseline's 0.023; more than 0.022 added" in out
    few = replace(measured, most_error_ratio=None, hidden_error=None)
    assert "at too few positions to say what could hide" in line(replace(right, forwards=few))
    out = line(replace(right, forwards=replace(measured, error_ratio=1.7, num_changed=4)))
    assert out.startswith("DIVERGED: 99 tokens compared with autoregressive, no difference; 30")
    assert "(error_ratio 1.7 of at most 1.3, num_changed 4 of at most 3); no performance" in out
    wrong = replace(judged, num_wrong=2, first_wrong=Misjudged(1, 3, 5, 9))
    out = line(replace(right, judged_again=wrong))
    assert "2 WRONG, first at sequence 1, token 3; logits of both passes equal" in out


def test_runs_without_performance_are_printed_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(failed(), capsys) == "failed: RuntimeError: [enforce fail] in [/x] :fire:"
    out = printed(diverged(), capsys)
    assert out.startswith("DIVERGED: 99 tokens") and "margin 2.5" in out and "tokens/s" not in out
    assert "DIVERGED" in printed(diverged(None), capsys)
    nothing = make()
    nothing["metrics"] = dict.fromkeys(nothing["metrics"]) | {"bytes_read": 0}
    nothing["baseline_metrics"] = dict(nothing["metrics"])
    assert "identical" in printed(nothing, capsys)


@pytest.fixture(scope="module")
def record() -> RunRecord:
    """Of 8 sequences."""
    path = Path(ROOT, "results", "baselines", "acceptance.jsonl")
    return next(r for r in load_records(path) if r.baseline_metrics is not None)


@pytest.mark.parametrize("gamma", [1, 2])
def test_each_position_stands_beside_its_interval(record: RunRecord, gamma: int) -> None:
    assert record.metrics is not None
    positions = {
        "acceptance_per_position": [0.5, 0.25][:gamma],
        "judged_per_position": [8, 4][:gamma],
        "acceptance_per_position_interval": [[0.4, 0.6], []][:gamma],
    }
    metrics = replace(record.metrics, **positions)
    rows = dict(table_rows(replace(record, metrics=metrics)))
    expected = ["0.50 [0.40, 0.60], 8 judged", "0.25, 4 judged"]
    assert rows["acceptance per position"][1].splitlines() == expected[:gamma]
    described = Recorded("", digits=1)
    assert described.show_between([1, 2], [[0, 2], []]) == "1.0 [0.0, 2.0] 2.0"


def test_the_speedup_of_a_run_is_that_of_every_other_table(
    record: RunRecord, tmp_path: Path, command: Command
) -> None:
    """With its name and its interval, which the default number of batches is enough for."""
    assert RunConfig().workload.most_batches >= FEWEST_BATCHES
    assert record.metrics is not None
    ratios = [1.2, 1.5, 1.4]
    speedup = {
        "speedup": 1.4,
        "speedup_per_batch": ratios,
        "speedup_interval": ratio_interval(ratios),
    }
    ours = replace(record, metrics=replace(record.metrics, **speedup))
    rows = dict(table_rows(ours))
    shown = [row for label, row in rows.items() if label.startswith("speedup")]
    assert shown == [["", "1.40x [1.02, 1.81]"]]
    labels = list(rows)
    assert labels.index("speedup, median of 3 batches") == labels.index("decode, tokens/s") + 1
    append_record(tmp_path / "runs.jsonl", ours)
    headings, cells = (
        line.split() for line in command("table", tmp_path / "runs.jsonl").out.splitlines()[-2:]
    )
    assert cells[headings.index("speedup")] == "1.40±0.39"


def test_medians_say_over_how_many_batches(record: RunRecord) -> None:
    metrics = record.metrics
    assert metrics is not None and metrics.speedup_per_batch is not None
    for count, words in ((1, "1 batch"), (2, "2 batches"), (5, "5 batches")):
        each = dict.fromkeys(("speedup_per_batch", "net_speedup_per_batch"), [1.5] * count)
        labels = dict(table_rows(replace(record, metrics=replace(metrics, **each))))
        assert {f"speedup, median of {words}", f"net speedup, median of {words}"} <= set(labels)


@pytest.mark.parametrize(
    ("num_prompts", "shown"), [(9, {"p50"}), (10, {"p50", "p90"}), (100, {"p50", "p90", "p99"})]
)
def test_a_percentile_needs_enough_sequences(
    num_prompts: int, shown: set[str], record: RunRecord
) -> None:
    assert record.workload is not None
    workload = replace(record.workload, num_prompts=num_prompts)
    rows = dict(table_rows(replace(record, workload=workload)))
    assert {m[1] for label in rows if (m := re.match(r"TPOT (p\d+)", label))} == shown
