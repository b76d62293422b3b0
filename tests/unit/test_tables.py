"""Tables: one table as text, Markdown, LaTeX and CSV, and tables of recorded dataclasses."""

import io
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from magicdec.output import tables
from magicdec.output.console import escape_what_has_no_code
from magicdec.output.figures import FORMATS, saved_figure
from magicdec.output.tables import RULE, Column, Line, Shown, Table, print_tables
from magicdec.records.fields import RecordPart, recorded
from magicdec.records.metric_tables import metric_columns, metric_rows

TABLE = Table(
    (Column("", is_text=True, key="name"), "tokens/s", "share"),
    [("a_b|c", Shown("1.50", 1.5), "5 %"), RULE, ("d", Shown("12.25", 12.25), None)],
    title="speed",
    above=[Line("all are right", "bold"), "of two"],
    below=["a note"],
)


@pytest.mark.parametrize("width", [80, 160])
def test_a_table_that_is_too_wide_is_broken_and_not_cut(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [f"{10_000 + number}" for number in range(9)]
    table = Table([f"heading {number}" for number in range(9)], [cells])
    monkeypatch.setattr(tables, "make_console", lambda: Console(width=width))
    table.print()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width and lines[-1].isascii() == (width == 80)
    found = " ".join(lines).replace("│", " ").replace("┃", " ").split()
    assert [word for word in found if word in cells] == cells
    assert found.count("heading") == 9


def test_text_is_broken_before_a_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "make_console", lambda: Console(width=30))
    rows = [("a_name_of_one_long_word", "1,234,567.89"), ("b", "2")]
    Table((Column("name", is_text=True), "bytes a row"), rows).print()
    out = capsys.readouterr().out
    assert "1,234,567.89" in out and "bytes a row" in out
    assert max(map(len, out.splitlines())) <= 30
    assert "".join(out.split()).count("a_name_of") == 1 and "a_name_of_one_long_word" not in out


def test_text_has_the_lines_the_title_and_the_cells(capsys: pytest.CaptureFixture[str]) -> None:
    TABLE.print()
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["all are right", "of two", "speed"] and lines[-1] == "a note"
    words = " ".join(lines).replace("│", " ").split()
    assert {"a_b|c", "1.50", "5", "d", "12.25"} <= set(words) and "None" not in words
    assert sum(line.startswith("├") for line in lines) == 1, "the rule between the rows"


def test_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    expected = """all are right

of two

speed

|  | tokens/s | share |
| :-- | --: | --: |
| a_b\\|c | 1.50 | 5 % |
| d | 12.25 |  |

A note.
"""
    assert TABLE.markdown() == expected
    print_tables([TABLE, Table(), TABLE], "md")
    assert capsys.readouterr().out == f"{expected}\n{expected}"


def test_latex() -> None:
    lines = TABLE.latex().splitlines()
    assert lines[:4] == ["% all are right", "% of two", "% speed", "% a note"]
    assert lines[4:8] == [
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r" & tokens/s & share \\",
        r"\midrule",
    ]
    assert lines[8:] == [
        r"a\_b|c & 1.50 & 5 \% \\",
        r"\midrule",
        r"d & 12.25 &  \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_csv_has_keys_and_values() -> None:
    assert TABLE.csv() == "name,tokens/s,share\na_b|c,1.5,5 %\nd,12.25,\n"


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("=1+1", "'=1+1"),
        ("+cmd", "'+cmd"),
        ("-cmd", "'-cmd"),
        ("@SUM", "'@SUM"),
        ("-1.5", "-1.5"),
        ("+3e5", "+3e5"),
        (-1.5, "-1.5"),
        (None, ""),
        (True, "True"),
        ("a=1", "a=1"),
        ("\t=1", "\\x09=1"),
        (Shown("x", "=2"), "'=2"),
    ],
)
def test_no_cell_of_csv_is_a_formula(value: object, written: str) -> None:
    assert Table(["a", "b"], [[value, 1]]).csv() == f"a,b\n{written},1\n"


def test_what_a_terminal_acts_on_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "a\x1b[31mb\x07\x9b\u202e"
    shown = r"a\x1b[31mb\x07\x9b\u202e"
    table = Table([Column("n", is_text=True)], [[evil]], title=evil, above=[evil], below=[evil])
    table.print()
    printed = capsys.readouterr().out
    assert printed.count(shown) == 4
    texts = [printed, table.markdown(), table.latex(), table.csv()]
    assert not [text for text in texts if set(text) & set("\x1b\x07\x9b\u202e")]


def test_a_character_without_a_code_is_shown_as_an_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(file, encoding="ascii"))
    escape_what_has_no_code()
    Table(["Möd", "\udce9"]).print()
    sys.stdout.flush()
    assert b"M\\xf6d" in file.getvalue() and b"\\udce9" in file.getvalue()


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_figure_shows_dollar_signs_as_they_are(suffix: str, tmp_path: Path) -> None:
    with saved_figure("--plot", tmp_path / f"a{suffix}", (2, 2)) as (_, axes):
        axes[0].set_title("model $x_{$ costs $")
    assert (tmp_path / f"a{suffix}").stat().st_size > 0


def test_a_table_without_columns_is_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Table(above=["one"], below=["two"])
    lines.print()
    assert capsys.readouterr().out == "one\ntwo\n"
    assert (lines.markdown(), lines.latex(), lines.csv()) == (
        "one\n\n\nTwo.\n",
        "% one\n% two\n",
        "",
    )


@dataclass(frozen=True)
class MeasuredPart(RecordPart):
    steps: int = recorded("steps", label="steps")
    seconds: float = recorded("time", "s", label="time, ms", digits=1, scale=1e3)
    name: str = recorded("without a label")
    rate: float | None = recorded("drafts", label="rate", null="without drafts")


def test_labelled_fields_are_rows_or_columns() -> None:
    metrics = [MeasuredPart(1234, 0.5, "a", None), MeasuredPart(5, 0.25, "b", None)]
    rows = metric_rows(MeasuredPart, [*metrics, None])
    table = Table(["", "one", "two", "none"], rows)
    assert table.body == [["steps", "1,234", "5", ""], ["time, ms", "500.0", "250.0", ""]]
    assert table.csv().splitlines()[1:] == ["steps,1234,5,", "seconds,0.5,0.25,"]
    columns, cells = metric_columns(MeasuredPart, metrics)
    assert [(column.label, column.key) for column in columns] == [
        ("steps", "steps"),
        ("time, ms", "seconds"),
    ]
    assert Table(columns, cells).body == [["1,234", "500.0"], ["5", "250.0"]]
