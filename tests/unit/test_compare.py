"""What is printed of passes: the table of one command says what its sample can carry, the table of
many has a line a run; and both tools read any file or refuse it in one line."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import HANG, Command
from synthetic_records import IDENTICAL, drawn_command, parse_record, with_fields
from written_records import failed, line_of, mismatch, run_line, run_lines, with_ties, write

from magicdec.bench.showing import BRIEF, rows_of, tables
from magicdec.config.run_config import RunConfig
from magicdec.output.tables import print_tables
from magicdec.records.correctness import Correctness, ForwardErrors, JudgedAgain, Misjudged
from magicdec.records.describe import pays_of, verdict_of
from magicdec.records.fields import Recorded
from magicdec.records.intervals import FEWEST_BATCHES, ratio_interval
from magicdec.records.metrics import PassMetrics
from magicdec.records.pass_record import PassRecord
from magicdec.records.record import Status, append_records


def test_a_closed_pipe_is_no_traceback(tmp_path: Path) -> None:
    """As in `magicdec compare NEW OLD | head -1`; here the reader ends before the first line."""
    path = write(tmp_path / "runs", [run_line()] * 20)
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
        (b'{"kind": "pass", "schema_version": 4}', ":1: not a record; it has no "),
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
    old = [write(tmp_path / "old", [run_line()])] * (tool == "compare")
    code, out, err = command(tool, tmp_path / "new", *old)
    assert (code, out) == (2, "")
    assert f"{tmp_path / 'new'}{message}" in err and err.count("\n") == 1
    assert err.startswith(f"magicdec {tool}: ")


def test_the_table_has_a_line_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """Also for runs without numbers; and no number is cut, nor a name read as markup."""
    numbers = {"decode_tokens_per_s": 1234567.8, "speedup": 1.5, "draft_acceptance_rate": 0.8}
    right = run_line()
    right["metrics"] |= numbers | {"draft_acceptance_rate_interval": None}
    odd = run_line()
    odd["config"]["model"]["model"] = "[b]:ok:"
    first = write(tmp_path / "a", [right, odd])
    second = write(tmp_path / "b", [failed(), mismatch(), with_ties(run_line())])
    monkeypatch.setenv("COLUMNS", "80")
    _, out, err = command("table", first, second)
    lines = [line.rstrip() for line in out.splitlines()]
    rows = [line for line in lines if line.endswith(tuple(f" {status}" for status in Status))]
    expected = ["verified", "verified", "failed", "mismatch", "verified_with_ties"]
    assert [row.split()[-1] for row in rows] == expected
    assert all(n in rows[0] for n in ("demo", "1234567.8", "1.50", "0.800"))
    assert "[b]:ok:" in rows[1]
    assert "…" not in out and "None" not in out and err == ""
    assert max(map(len, lines)) <= 80


def printed(
    records: Sequence[PassRecord], capsys: pytest.CaptureFixture[str], is_verbose: bool = True
) -> str:
    print_tables(tables(records, is_verbose))
    return " ".join(capsys.readouterr().out.split())


def with_metrics(record: PassRecord, **metrics: Any) -> PassRecord:
    assert record.metrics is not None
    return replace(record, metrics=replace(record.metrics, **metrics))


def test_one_run_is_printed_with_its_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    plain, drafting = drawn_command()
    shown = with_metrics(
        drafting, decode_tokens_per_s=1234567.8, speedup=1.5, draft_acceptance_rate=0.8
    )
    out = printed([plain, shown], capsys)
    assert "static+draft: verified, all 8 requests have the 99 tokens of static" in out
    assert "self-speculation," in out and "streaming_llm 257, gamma 4" in out
    assert "decode, tokens/s" in out and "1,234,567.8" in out and "1.50x" in out and "0.800" in out
    assert "verify" not in out, "a row without numbers is left out"
    assert "answer score" not in out
    scored = with_metrics(drafting, answer_score=0.125)
    assert "answer score" in (out := printed([plain, scored], capsys)) and "0.125" in out
    out = printed([plain, parse_record(with_ties(line_of(shown)))], capsys)
    assert "static+draft: verified with ties, 2 of 8 requests differ from static in 99" in out
    assert "first at sequence 3, token 5 (margin 0.07)" in out and "1.50x" in out
    assert "rounding explains up to 7, and margins up to 0.15" in out
    assert "3 token(s) are not the wider model's choice, of the reference's 4" in out
    alone = replace(
        drafting,
        status=Status.UNVERIFIED,
        num_differing=None,
        reference=None,
        correctness=Correctness(None, num_tokens=99),
    )
    assert "unverified, its 99 tokens are compared with nothing" in printed([alone], capsys)


def test_by_default_the_verdict_is_one_fact(capsys: pytest.CaptureFixture[str]) -> None:
    """What else was checked is for `--verbose`, and for a verdict that is not right."""
    plain, drafting = drawn_command()
    parts = {"judged_again": JudgedAgain(30, 31, 99, 0), "forwards": ForwardErrors(9, 0)}
    checked = replace(drafting, correctness=replace(IDENTICAL, **parts))
    out = printed([plain, checked], capsys, is_verbose=False)
    assert out.startswith("verified: the other pass has the 99 tokens of static drafts: ")
    assert "judged again" not in out
    ties = parse_record(with_ties(run_line()))
    out = printed([plain, ties], capsys, is_verbose=False)
    tie = "verified with ties, 2 of 8 requests differ from static in 99 tokens; rounding explains"
    assert out.startswith(f"static+draft: {tie} it drafts: ")
    out = printed([plain, parse_record(mismatch())], capsys, is_verbose=False)
    assert "MISMATCH" in out and "margin 2.5" in out and "it has no metrics" in out


def test_by_default_a_table_has_at_most_14_rows() -> None:
    """Of a run that has a value for every row."""
    plain, drafting = drawn_command()
    several = {
        field.name: [1.5] * 4
        for field in fields(PassMetrics)
        if field.name.endswith(("_per_group", "_per_position"))
    }
    numbers = (
        dict.fromkeys(set(BRIEF) - {"tokens_per_verification"}, 1.5)
        | several
        | {"acceptance_per_position_interval": None}
    )
    full = [with_metrics(record, **numbers) for record in (plain, drafting)]
    every = rows_of(full)
    brief = tables(full, is_verbose=False)[0].rows
    assert len(brief) <= 14 < len(every)
    labels = [row[0].text for row in brief]
    assert [row[0].text for row in every if row[0].text in labels] == [
        label for label in labels if label in [row[0].text for row in every]
    ]
    assert {"speedup, median of 4", "  of them that pay (break-even)"} <= set(labels)


@pytest.mark.parametrize(
    ("net", "ends", "emitted", "message"),
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
            "verification emits 3.00 tokens and pays from 2.00 on, but what comes before the first "
            "step costs more than the steps gain.",
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
    net: float | None, ends: list[float] | None, emitted: float | None, message: str | None
) -> None:
    _, drafting = drawn_command()
    record = with_metrics(
        drafting,
        net_speedup=net,
        net_speedup_interval=ends,
        net_speedup_per_group=[1.0, 2.0],
        tokens_per_verification=emitted,
    )
    assert [line.startswith(message or "") for line in pays_of(record, 2.0)] == (
        [] if message is None else [True]
    )
    emulated = with_fields(record, config__decoding__emulate_acceptance=[0.5])
    for line in pays_of(emulated, 2.0):
        assert line.startswith("Speculation with EMULATED acceptance ")


def test_a_verdict_says_what_its_parts_have_found() -> None:
    """Equal tokens with wrong steps or forwards are not verified."""
    judged = JudgedAgain(30, 31, 99, 0)
    measured = ForwardErrors(9, 8, 8, 0.023, 0.024, 1.04, 1.3, 1.8, 4.0, 1, 0.5, 3, 0.0222)
    _, drafting = drawn_command()

    def line(parts: Correctness) -> str:
        if not parts.has_wrong_steps and not parts.has_alarms:
            return verdict_of(replace(drafting, correctness=parts))
        status = {"status": Status.MISMATCH, "metrics": None, "acceptance_by_context": None}
        return verdict_of(replace(drafting, correctness=parts, **status))

    right = replace(IDENTICAL, judged_again=judged, forwards=ForwardErrors(9, 0))
    out = line(right)
    assert out.startswith("verified, all 8 requests have the 99 tokens of static; 30 of 31 steps")
    assert "30 of 31 steps judged again, all right; logits of both passes equal at 9 pos" in out
    out = line(replace(right, forwards=measured))
    assert "errors of the logits 0.024, those of static 0.023; more than 0.022 added" in out
    few = replace(measured, most_error_ratio=None, hidden_error=None)
    assert "at too few positions to say what could hide" in line(replace(right, forwards=few))
    out = line(replace(right, forwards=replace(measured, error_ratio=1.7, num_changed=4)))
    assert out.startswith("MISMATCH, all 8 requests have the 99 tokens of static; 30 of 31 steps")
    assert "(error_ratio 1.7 of at most 1.3, num_changed 4 of at most 3); it has no metrics" in out
    wrong = replace(judged, num_wrong=2, first_wrong=Misjudged(1, 3, 5, 9))
    out = line(replace(right, judged_again=wrong))
    assert "2 WRONG, first at sequence 1, token 3; logits of both passes equal" in out


def test_runs_without_performance_are_printed_too(capsys: pytest.CaptureFixture[str]) -> None:
    plain, _ = map(parse_record, run_lines())
    error = "static+draft: FAILED: RuntimeError: [enforce fail] in [/x] :fire:"
    assert error in printed([parse_record(failed())], capsys)
    out = printed([parse_record(mismatch())], capsys)
    assert "MISMATCH, 1 of 8 requests differ" in out and "margin 2.5" in out
    assert "tokens/s" not in out
    assert "it ends elsewhere" in printed([plain, parse_record(mismatch(margin=None))], capsys)


@pytest.mark.parametrize("gamma", [1, 2])
def test_each_position_stands_beside_its_interval(gamma: int) -> None:
    record = with_metrics(
        drawn_command()[-1],
        acceptance_per_position=[0.5, 0.25][:gamma],
        judged_per_position=[8, 4][:gamma],
        acceptance_per_position_interval=[[0.4, 0.6], []][:gamma],
    )
    cells = {row[0].text: row[1] for row in rows_of([record])}
    expected = ["0.50 [0.40, 0.60], 8 judged", "0.25, 4 judged"]
    assert cells["acceptance per position"].text.splitlines() == expected[:gamma]
    described = Recorded("", digits=1)
    assert described.show_between([1, 2], [[0, 2], []]) == "1.0 [0.0, 2.0] 2.0"


def test_the_speedup_of_a_run_is_that_of_every_other_table(
    tmp_path: Path, command: Command
) -> None:
    """With its name and its interval, which the default number of batches is enough for."""
    assert RunConfig().workload.most_batches >= FEWEST_BATCHES
    ratios = [1.2, 1.5, 1.4]
    plain, drafting = drawn_command()
    ours = with_metrics(
        drafting, speedup=1.4, speedup_per_group=ratios, speedup_interval=ratio_interval(ratios)
    )
    rows = rows_of([plain, ours])
    labels = [row[0].text for row in rows]
    (shown,) = [row for row in rows if row[0].text.startswith("speedup")]
    assert shown[1] is None and shown[2].text == "1.40x [1.02, 1.81]"
    assert labels.index("speedup, median of 3") == labels.index("decode, tokens/s") + 1
    path = tmp_path / "runs.jsonl"
    append_records("--out", path, [plain, ours] * 2)
    *_, headings, _, cells = (line.split() for line in command("table", path).out.splitlines()[-3:])
    assert cells[headings.index("speedup")] == "1.40±0.39"


@pytest.mark.parametrize("count", [1, 2, 5])
def test_medians_say_over_how_many_groups(count: int) -> None:
    plain, drafting = drawn_command()
    ratios = dict.fromkeys(("speedup_per_group", "net_speedup_per_group"), [1.5] * count)
    labels = {row[0].text for row in rows_of([plain, with_metrics(drafting, **ratios)])}
    words = "" if count == 1 else f", median of {count}"
    assert {f"speedup{words}", f"net speedup{words}"} <= labels


@pytest.mark.parametrize(
    ("num_prompts", "shown"), [(9, {"p50"}), (10, {"p50", "p90"}), (100, {"p50", "p90", "p99"})]
)
def test_a_percentile_needs_enough_requests(num_prompts: int, shown: set[str]) -> None:
    labels = [row[0].text for row in rows_of(drawn_command(num_prompts=num_prompts))]
    assert {m[1] for label in labels if (m := re.match(r"TPOT (p\d+)", label))} == shown
