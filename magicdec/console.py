"""What the user sees while a command runs and when it ends: the console that prints tables, and
progress on stderr. Progress comes from the leading rank only: a bar on a terminal, a plain line
every ten seconds elsewhere.

Imports rich only when something is printed.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

FILE_WIDTH = 160  # columns of a table that is written to a file or a pipe
LINE_EVERY_S = 10.0
REFRESH_EVERY_S = 0.25


def make_console(to_stderr: bool = False) -> Console:
    """The console for tables. Text is printed as it is, because a path or an error message may hold
    [brackets] and :colons:. In a file or a pipe, lines are wide enough that no number is cut."""
    from rich.console import Console

    is_terminal = (sys.stderr if to_stderr else sys.stdout).isatty()
    width = None if is_terminal else FILE_WIDTH
    return Console(stderr=to_stderr, width=width, highlight=False, markup=False, emoji=False)


def print_table(table: Table) -> None:
    """Print a table. On a terminal that is too narrow for it, it has no frame, and headings and
    cells are broken into lines, so that nothing is cut."""
    console = make_console()
    needed = console.measure(table, options=console.options.update(max_width=FILE_WIDTH))
    if needed.maximum > console.width:
        table.box, table.padding, table.pad_edge = None, (0, 1, 0, 0), False
        for column in table.columns:
            column.no_wrap, column.overflow = False, "fold"
    console.print(table)


def labelled(label: str, text: str, indent: int = 11) -> str:
    """A label and a text beside it. On a terminal, a long text goes on in further lines, each
    indented; in a file or a pipe it is one line."""
    line = f"{label:<{indent - 1}} {text}"
    if not sys.stdout.isatty():
        return line
    width = max(shutil.get_terminal_size().columns, 2 * indent)
    return textwrap.fill(
        line, width, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False
    )


def spinner(text: str, is_leader: bool) -> AbstractContextManager[object]:
    """Shows that the program is busy: a spinner on the leading rank's terminal, nothing
    elsewhere."""
    if is_leader and sys.stderr.isatty():
        return make_console(to_stderr=True).status(text)
    return nullcontext()


class Progress(Protocol):
    @contextmanager
    def task(self, name: str, total: int) -> Iterator[Advance]: ...


class Advance(Protocol):
    def __call__(self, amount: int = 1) -> None: ...


class Silent:
    @contextmanager
    def task(self, name: str, total: int) -> Iterator[Advance]:
        def advance(amount: int = 1) -> None:
            pass

        yield advance


class Lines:
    """For logs: a line after the first ten seconds of a task, and one every ten seconds after
    that."""

    @contextmanager
    def task(self, name: str, total: int) -> Iterator[Advance]:
        started = last = time.monotonic()
        done = 0

        def advance(amount: int = 1) -> None:
            nonlocal last, done
            done += amount
            now = time.monotonic()
            if now - last >= LINE_EVERY_S:
                last = now
                print(
                    f"{name}: {done}/{total} ({now - started:.0f} s)", file=sys.stderr, flush=True
                )

        yield advance


class Bar:
    """A rich bar. It is drawn only when the task advances: a thread that refreshes it would compete
    with what is timed."""

    @contextmanager
    def task(self, name: str, total: int) -> Iterator[Advance]:
        from rich.progress import Progress as RichProgress

        console = make_console(to_stderr=True)
        bar = RichProgress(console=console, auto_refresh=False, transient=True)
        with bar:
            task, last = bar.add_task(name, total=total), 0.0
            bar.refresh()

            def advance(amount: int = 1) -> None:
                nonlocal last
                bar.advance(task, amount)
                now = time.monotonic()
                if now - last >= REFRESH_EVERY_S:
                    last = now
                    bar.refresh()

            yield advance


def make_progress(is_leader: bool) -> Progress:
    if not is_leader:
        return Silent()
    return Bar() if sys.stderr.isatty() else Lines()
