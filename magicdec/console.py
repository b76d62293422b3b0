"""Progress on stderr, from the leading rank only: a bar on a terminal, a plain line every ten
seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

LINE_EVERY_S = 10.0
REFRESH_EVERY_S = 0.25


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
    """For logs: one line when a task has run for ten seconds, and every ten after that."""

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
    """A rich bar, drawn only when told of progress: no thread of its own competes with what is
    timed."""

    @contextmanager
    def task(self, name: str, total: int) -> Iterator[Advance]:
        from rich.console import Console
        from rich.progress import Progress as RichProgress

        bar = RichProgress(console=Console(stderr=True), auto_refresh=False, transient=True)
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
