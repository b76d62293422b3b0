"""Tables without a frame have the lines that rich prints."""

import random

import pytest
from rich.console import Console
from rich.table import Table as RichTable

from magicdec.output import tables
from magicdec.output.tables import Column, Table

WORDS = ("demo", "streaming_llm 257", "self-speculation", "größer", "東京の本", "a\nb c", "", "x  ")
NUMBERS = ("1", "2.50±0.10", "1,234,567.89", "", "0.7\n0.8")


def a_table(seed: int) -> Table:
    """A table with columns of both kinds in any order."""
    draw = random.Random(seed)
    columns = [
        Column(draw.choice(("a", "a heading", "tokens/s")), is_text=draw.random() < 0.6)
        for _ in range(draw.randint(1, 6))
    ]
    rows = [
        [
            " ".join(draw.choices(WORDS, k=draw.randint(1, 3)))
            if column.is_text
            else draw.choice(NUMBERS)
            for column in columns
        ]
        for _ in range(draw.randint(0, 5))
    ]
    return Table(columns, rows, is_framed=False)


def whole_width(table: Table) -> int:
    """That of the table with its labels and cells in one line each."""
    rows = [[column.label for column in table.headings], *table.body]
    return sum(tables.widest_cells(rows)) + len(table.columns) - 1


def printed_by_rich(table: Table, width: int) -> str:
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    rich = RichTable(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    is_narrow = table._least_width() > width
    labels = [column.label for column in table.headings]
    if whole_width(table) > width:
        labels = table.broken_labels()
    for label, column in zip(labels, table.headings, strict=True):
        rich.add_column(
            label,
            justify="left" if column.is_text else "right",
            overflow="fold",
            no_wrap=not (column.is_text or is_narrow),
        )
    for cells in table.body:
        rich.add_row(*cells)
    with console.capture() as captured:
        console.print(rich)
    return captured.get()


@pytest.mark.parametrize("width", [24, 40, 60, 80, 400])
def test_the_lines_are_those_of_rich(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def console() -> Console:
        return Console(width=width, highlight=False, markup=False, emoji=False)

    monkeypatch.setattr(tables, "make_console", console)
    for seed in range(120):
        table = a_table(seed)
        table.print()
        assert capsys.readouterr().out == printed_by_rich(table, width), (seed, width)


def test_a_table_is_printed_in_blocks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "LINES_AT_ONCE", 3)
    Table(["row"], [[str(number)] for number in range(8)], is_framed=False).print()
    assert capsys.readouterr().out.split() == ["row", *map(str, range(8))]


def test_labels_are_broken_at_words_before_anything_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def console() -> Console:
        return Console(width=36, highlight=False, markup=False, emoji=False)

    monkeypatch.setattr(tables, "make_console", console)
    columns = [Column("forward", is_text=True), "median, ms", "of the products", "throughput"]
    Table(columns, [["a draft", "0.123", "9.5 %", "1"]], is_framed=False).print()
    assert capsys.readouterr().out.splitlines() == [
        "        median,   of the           ",
        "forward      ms products throughput",
        "a draft   0.123    9.5 %          1",
    ]
