"""Tables, printed for people or written as Markdown, LaTeX or CSV. Imports rich only to print."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice, zip_longest
from typing import Any, NamedTuple, TextIO

from magicdec.output.console import FILE_WIDTH, make_console, printable

GAP = 1  # blanks between the columns of a table without a frame
LINES_AT_ONCE = 1000  # that are printed
TEXT_WIDTH = 8  # characters that a column of text keeps, in which long words are broken


class Shown(NamedTuple):
    """A cell with another text than its value, which CSV has."""

    text: str
    value: object


class Heading(NamedTuple):
    """The first cell of a row that heads the rows below it; the others are None. CSV lacks the
    row."""

    text: str


class Line(NamedTuple):
    text: str
    style: str = ""


@dataclass(frozen=True)
class Column:
    """A column, headed in CSV by `key`. Text is broken on a narrow terminal; numbers stay whole."""

    label: str
    is_text: bool = False
    key: str = ""


RULE = ()
"""A row that is a line between the rows around it."""


@dataclass(frozen=True)
class Table:
    """A table with lines `above` and `below`, or these alone. A string in `columns` is a column of
    numbers with that label. A cell is None (empty), a `Shown`, or shown by `str`."""

    columns: Sequence[Column | str] = ()
    rows: Sequence[Sequence[object]] = ()
    title: str = ""
    above: Sequence[Line | str] = ()
    below: Sequence[str] = ()
    is_framed: bool = True

    @property
    def headings(self) -> list[Column]:
        return [Column(column) if isinstance(column, str) else column for column in self.columns]

    @property
    def lead(self) -> list[Line]:
        lines = [*self.above, *([Line(self.title, "italic")] if self.title else [])]
        styled = [Line(line) if isinstance(line, str) else line for line in lines]
        return [Line(printable(text), style) for text, style in styled]

    @property
    def tail(self) -> list[str]:
        return list(map(printable, self.below))

    @property
    def body(self) -> list[list[str]]:
        return [[text_of(cell) for cell in row] for row in self.rows]

    def print(self, width: int | None = None) -> None:
        """Print the table in the width of the terminal; one that is too wide loses its frame, not
        its content. In a file or a pipe it has at most `width` columns, or more if numbers would be
        broken; without `width`, lines of text stay whole."""
        console = make_console()
        if width is not None and not console.is_terminal:
            console.width = width if self._least_width() <= width else 10 * FILE_WIDTH
        is_whole = width is None and not console.is_terminal
        for text, style in self.lead:
            console.print(text, style=style or None, soft_wrap=is_whole)
        if self.columns:
            self._print_columns(console)
        for text in self.tail:
            console.print(text, soft_wrap=is_whole)

    def _print_columns(self, console: Any) -> None:
        body = self.body
        is_text = [column.is_text for column in self.headings]
        labels = [column.label for column in self.headings]
        widths = widest_cells([labels, *filter(None, body)])
        if self.is_framed and sum(widths) + 3 * len(widths) + 1 <= console.width:
            console.print(self._framed(body))
            return
        if sum(widths) + GAP * (len(widths) - 1) > console.width:
            labels = self.broken_labels()
        rows = [labels, *filter(None, body)]
        widths = widest_cells(rows)
        is_narrow = self._least_width() > console.width
        widths = narrowed(widths, [is_wide or is_narrow for is_wide in is_text], console.width)
        for line in row_lines(labels, is_text, widths, is_heading=True):
            console.print(line, style="table.header", soft_wrap=True)
        body_lines = chain.from_iterable(row_lines(row, is_text, widths) for row in rows[1:])
        while block := list(islice(body_lines, LINES_AT_ONCE)):
            console.out("\n".join(block), highlight=False)

    def _framed(self, body: Sequence[Sequence[str]]) -> Any:
        from rich.table import Table as RichTable

        table = RichTable()
        for column in self.headings:
            justify: Any = "left" if column.is_text else "right"
            table.add_column(
                column.label, justify=justify, overflow="fold", no_wrap=not column.is_text
            )
        for cells in body:
            if cells:
                table.add_row(*cells)
            else:
                table.add_section()
        return table

    def broken_labels(self) -> list[str]:
        """The labels, in lines that are no longer than the numbers of their columns, as far as
        their words let them. Those of text stay whole."""
        widest = widest_cells([*filter(None, self.body)]) or [0] * len(self.columns)
        return [
            column.label if column.is_text else broken_at_words(column.label, width)
            for column, width in zip(self.headings, widest, strict=True)
        ]

    def _least_width(self) -> int:
        """Characters of the table without a frame, its numbers in one line each."""
        lines = [self.broken_labels(), *filter(None, self.body)]
        return sum(
            GAP + min(TEXT_WIDTH if column.is_text else FILE_WIDTH, width)
            for column, width in zip(self.headings, widest_cells(lines), strict=True)
        )

    def markdown(self) -> str:
        before = [f"{line.text}\n\n" for line in self.lead]
        after = [f"\n{_sentence(text)}\n" for text in self.tail]
        if not self.columns:
            return "".join(before + after)
        aligned = [":--" if column.is_text else "--:" for column in self.headings]
        lines = [[column.label for column in self.headings], aligned, *filter(None, self.body)]
        rows = ["| " + " | ".join(map(_escape_markdown, cells)) + " |\n" for cells in lines]
        return "".join([*before, *rows, *after])

    def latex(self) -> str:
        """A `tabular` for the package booktabs, below comments with all lines of text."""
        texts = [*(line.text for line in self.lead), *self.tail]
        lines = [f"% {line}" for text in texts for line in text.splitlines()]
        if self.columns:
            shape = "".join("l" if column.is_text else "r" for column in self.headings)
            head = _latex_row([column.label for column in self.headings])
            rows = [_latex_row(cells) if cells else r"\midrule" for cells in self.body]
            lines += [rf"\begin{{tabular}}{{{shape}}}", r"\toprule", head, r"\midrule", *rows]
            lines += [r"\bottomrule", r"\end{tabular}"]
        return "".join(f"{line}\n" for line in lines)

    def csv(self) -> str:
        """The keys of the columns and unrounded values, without any text around."""
        if not self.columns:
            return ""
        values = (
            [_value(cell) for cell in row]
            for row in self.rows
            if row and not isinstance(row[0], Heading)
        )
        return csv_text([[column.key or column.label for column in self.headings], *values])


FORMATS: Mapping[str, Callable[[Table], str]] = {
    "md": Table.markdown,
    "latex": Table.latex,
    "csv": Table.csv,
}


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    """Rows of values as CSV; None is an empty field, texts are as in `csv_cell`."""
    text = io.StringIO()
    cells = ([csv_cell(value) for value in row] for row in rows)
    csv.writer(text, lineterminator="\n").writerows(cells)
    return text.getvalue()


def write_csv_columns(
    file: TextIO, headings: Iterable[str], columns: Iterable[Sequence[object]]
) -> None:
    """Write columns as CSV, as `csv_text` writes rows; columns without texts unchanged."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(map(csv_cell, headings))
    safe = [
        [*map(csv_cell, column)] if str in {*map(type, column)} else column for column in columns
    ]
    writer.writerows(zip(*safe, strict=True))


def csv_cell(value: Any) -> Any:
    """A value for CSV, with a quote before a text that a spreadsheet would take for a formula."""
    return _csv_text(value) if isinstance(value, str) else value


@lru_cache(maxsize=10000)  # columns of texts have few different ones
def _csv_text(value: str) -> str:
    text = printable(value)
    if not text.startswith(("=", "+", "-", "@")):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def print_tables(tables: Iterable[Table], form: str = "text", width: int | None = None) -> None:
    """Print tables in turn: as text, or in one of `FORMATS` with a blank line between."""
    if form == "text":
        for table in tables:
            table.print(width)
    else:
        print("\n".join(filter(None, map(FORMATS[form], tables))), end="")


def text_of(cell: object) -> str:
    if cell is None:
        return ""
    return printable(cell.text if isinstance(cell, Shown | Heading) else str(cell))


def _value(cell: object) -> object:
    return cell.value if isinstance(cell, Shown) else cell


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', ':')) else '.'}"


def _escape_markdown(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(map(_escape_latex, cells)) + r" \\"


def _escape_latex(text: str) -> str:
    escapes = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(escapes.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in text)


# The lines of a table without a frame. They are those that rich prints (a test compares them), but
# rich takes a second for a thousand rows.


def width_of(text: str) -> int:
    if text.isascii() and text.isprintable():
        return len(text)
    from rich.cells import cell_len

    return max(map(cell_len, text.splitlines()), default=0)


def broken_at_words(text: str, width: int) -> str:
    """The text in lines of at most `width`, or as wide as its longest word."""
    least = max(map(width_of, text.split()), default=0)
    return textwrap.fill(text, max(width, least, 1), break_long_words=False)


def widest_cells(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(width_of, set(cells))) for cells in zip(*rows, strict=True)]


def narrowed(widths: Sequence[int], may_break: Sequence[bool], room: int) -> list[int]:
    """Widths of columns that fit into `room` with the gaps; the widest that may break give way
    first."""
    taken = [width + GAP for width in widths[:-1]] + [*widths[-1:]]
    while (excess := sum(taken) - room) > 0:
        widest = max((t for t, may in zip(taken, may_break, strict=True) if may), default=0)
        if widest <= 1 + GAP:
            break
        widest_columns = [i for i, t in enumerate(taken) if may_break[i] and t == widest]
        next_one = max((t for i, t in enumerate(taken) if may_break[i] and t < widest), default=0)
        for left, index in zip(range(len(widest_columns), 0, -1), widest_columns, strict=True):
            less = min(round(excess / left), widest - next_one)
            taken[index] -= less
            excess -= less
    return [width - GAP for width in taken[:-1]] + taken[-1:]


def row_lines(
    row: Sequence[str], is_text: Sequence[bool], widths: Sequence[int], is_heading: bool = False
) -> list[str]:
    """The lines of a row in columns of these widths: text at the left, numbers at the right,
    headings at the bottom."""
    cells = [_broken(text, width) for text, width in zip(row, widths, strict=True)]
    if is_heading:
        most = max(map(len, cells))
        cells = [[""] * (most - len(lines)) + lines for lines in cells]
    return [
        (" " * GAP).join(map(_placed, parts, widths, is_text))
        for parts in zip_longest(*cells, fillvalue="")
    ]


def _placed(text: str, width: int, is_text: bool) -> str:
    if text.isascii():
        return text.ljust(width) if is_text else text.rjust(width)
    blanks = " " * (width - width_of(text))
    return text + blanks if is_text else blanks + text


@lru_cache(maxsize=10_000)
def _broken(text: str, width: int) -> list[str]:
    if text.isprintable() and width_of(text) <= width:
        return [text.rstrip()]
    from rich.console import Console
    from rich.text import Text

    lines = Text(text).wrap(Console(), max(width, 1), overflow="fold")
    return [line.plain.rstrip() for line in lines]
