"""The console that prints tables, and progress on stderr of the leading rank: a bar on a terminal,
lines elsewhere. Imports rich only to print."""

from __future__ import annotations

import io
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress

FILE_WIDTH = 160  # columns of a table that is written to a file or a pipe
LINE_EVERY_S = 10.0
REFRESH_EVERY_S = 0.25
BAR_WIDTH = 20
START = 7  # columns of the labels before a run


# What a terminal or a viewer acts on instead of showing it: control characters, except the ends of
# lines, and those that turn the direction of writing.
ACTING = {
    code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
    for code in (*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
    if code != ord("\n")
}


def printable(text: str) -> str:
    """A text in which control characters for a terminal are escaped."""
    return text.translate(ACTING)


def escape_what_has_no_code() -> None:
    """Let standard streams escape characters that their encoding lacks, instead of ending the
    program."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def make_console(to_stderr: bool = False) -> Console:
    """The console for tables. Text is printed as it is; in a file or a pipe, numbers stay whole."""
    from rich.console import Console

    is_terminal = (sys.stderr if to_stderr else sys.stdout).isatty()
    width = None if is_terminal else FILE_WIDTH
    return Console(stderr=to_stderr, width=width, highlight=False, markup=False, emoji=False)


def labelled(label: str, text: str, indent: int = 11) -> str:
    """A line for standard output. On a terminal it is broken between words, under the text."""
    line = f"{label:<{indent - 1}} {text}"
    if not sys.stdout.isatty():
        return line
    return textwrap.fill(
        line,
        shutil.get_terminal_size().columns,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def spinner(text: str, is_leader: bool) -> AbstractContextManager[object]:
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
        yield lambda amount=1: None


class Lines:
    """Progress for logs: a line every ten seconds."""

    @contextmanager
    def task(self, name: str, total: int) -> Iterator[Advance]:
        started = time.monotonic()

        def tell(done: int) -> None:
            text = f"{name}: {done}/{total} ({time.monotonic() - started:.0f} s)"
            print(text, file=sys.stderr, flush=True)

        yield telling(tell, LINE_EVERY_S)


class ProgressBar:
    """A rich bar, drawn only when the task advances: a refreshing thread would compete with what is
    timed."""

    @contextmanager
    def task(self, name: str, total: int) -> Iterator[Advance]:
        with self._bar() as bar:
            task = bar.add_task(name, total=total)
            bar.refresh()
            yield telling(
                lambda done: bar.update(task, completed=done, refresh=True), REFRESH_EVERY_S
            )

    def _bar(self) -> RichProgress:
        from rich import progress
        from rich.table import Column

        name = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        return progress.Progress(
            progress.TextColumn("{task.description}", table_column=name),
            progress.BarColumn(BAR_WIDTH, table_column=Column(min_width=BAR_WIDTH)),
            progress.TaskProgressColumn(table_column=Column(min_width=len("100%"))),
            progress.TimeRemainingColumn(table_column=Column(min_width=len("0:00:00"))),
            console=make_console(to_stderr=True),
            auto_refresh=False,
            transient=True,
            expand=True,
        )


def telling(tell: Callable[[int], None], every_s: float) -> Advance:
    """An `Advance` that calls `tell` with the progress, at most once in `every_s`."""
    last = time.monotonic()
    done = 0

    def advance(amount: int = 1) -> None:
        nonlocal last, done
        done += amount
        if time.monotonic() - last >= every_s:
            last = time.monotonic()
            tell(done)

    return advance


def make_progress(is_leader: bool) -> Progress:
    if not is_leader:
        return Silent()
    return ProgressBar() if sys.stderr.isatty() else Lines()
