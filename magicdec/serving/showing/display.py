"""Display: shows the view of each pass on a terminal while it runs, and keeps its last frame in a
file. Imports rich only on a terminal.

Must not know what a view shows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from magicdec.console import make_console
from magicdec.serving.showing.view import View


class Display:
    """`is_shown`: frames are drawn on this rank's terminal. `file` gets the last frame of each
    pass; None keeps none."""

    def __init__(self, is_shown: bool, file: Path | None = None) -> None:
        self.is_shown, self.file, self.frames = is_shown, file, list[str]()

    @classmethod
    def of_rank(cls, is_leader: bool, file: Path | None) -> Display:
        """The leading rank shows frames if its stderr is a terminal."""
        return cls(is_leader and sys.stderr.isatty(), file if is_leader else None)

    @contextmanager
    def view(self, name: str, num_rows: int) -> Iterator[View | None]:
        """The view of one pass; None if nobody would see it."""
        if not self.is_shown and self.file is None:
            yield None
            return
        with ExitStack() as stack:
            view = View(name, num_rows, self._live(stack) if self.is_shown else lambda lines: None)
            yield view
        if self.file is not None:
            self.frames.append("\n".join(view.lines()) + "\n")
            self.file.write_text("\n".join(self.frames), encoding="utf-8")

    def _live(self, stack: ExitStack) -> Callable[[list[str]], None]:
        """A function that shows a frame in place of the one before, until the stack is closed."""
        from rich.live import Live
        from rich.text import Text

        live = Live(console=make_console(to_stderr=True), auto_refresh=False, transient=True)
        stack.enter_context(live)
        return lambda lines: live.update(Text("\n".join(lines)), refresh=True)
