"""The live display of a pass: progress, how many requests were in flight over the steps, and the
newest arrivals and ends, as lines of text (`View`), shown on a terminal and kept in a file
(`Display`). Imports no torch, and rich only on a terminal. Must not know when it is drawn
(`DrawingClock`).
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from magicdec.console import make_console
from magicdec.request import Request

WIDTH, HEIGHT = 96, 8  # characters of the histogram
EIGHTHS = " ▁▂▃▄▅▆▇█"
NUM_EVENTS = 6


class History:
    """The most requests in flight during equal numbers of steps, at most `WIDTH` of them. When they
    are full, two become one, so that its size does not grow with the run."""

    def __init__(self) -> None:
        self.columns: list[int] = []
        self.steps_per_column, self._in_last = 1, 0

    def add(self, in_flight: int) -> None:
        if self._in_last == 0:
            if len(self.columns) == WIDTH:
                pairs = zip(self.columns[::2], self.columns[1::2], strict=True)
                self.columns = [max(pair) for pair in pairs]
                self.steps_per_column *= 2
            self.columns.append(in_flight)
        self.columns[-1] = max(self.columns[-1], in_flight)
        self._in_last = (self._in_last + 1) % self.steps_per_column


class View:
    """`show` gets the lines whenever they are drawn. The requests change while they are served."""

    def __init__(self, name: str, num_rows: int, show: Callable[[list[str]], None]) -> None:
        self.name, self.num_rows, self.show = name, num_rows, show
        self.history, self.num_steps = History(), 0
        self.requests: Sequence[Request] = ()
        self.begin_s = self.now_s = 0.0

    def begin(self, requests: Sequence[Request], begin_s: float) -> None:
        """`requests` are in the order of arrival; the first arrives at `begin_s`."""
        self.requests, self.begin_s = requests, begin_s
        self.arrivals_s = [request.arrived_s for request in requests]
        self.num_tokens = sum(request.sampling.max_new_tokens for request in requests)

    def step(self, in_flight: int) -> None:
        self.num_steps += 1
        self.history.add(in_flight)

    def draw(self, now: float) -> None:
        self.now_s = now
        self.show(self.lines())

    def lines(self) -> list[str]:
        """One frame."""
        return [*self._progress(), "", *self._histogram(), "", *self._events()]

    def _progress(self) -> list[str]:
        done = sum(len(request.output_ids) for request in self.requests)
        ended = sum(request.finished_s is not None for request in self.requests)
        filled = int(WIDTH * done / self.num_tokens)
        return [
            f"{self.name}: {ended} of {len(self.requests)} requests have ended, {done} of "
            f"{self.num_tokens} tokens, {self.now_s - self.begin_s:.1f} s",
            "█" * filled + "░" * (WIDTH - filled),
        ]

    def _histogram(self) -> list[str]:
        """Columns of up to `HEIGHT` characters; the top is the number of rows."""
        heights = [round(8 * HEIGHT * n / self.num_rows) for n in self.history.columns]
        lines = []
        for level in reversed(range(HEIGHT)):
            label = self.num_rows if level == HEIGHT - 1 else ""
            bars = "".join(EIGHTHS[min(8, max(0, height - 8 * level))] for height in heights)
            lines.append(f"{label:>5} │{bars}")
        lines.append(f"{0:>5} └{'─' * WIDTH}")
        return ["requests in flight", *lines, f"{'':>7}{self.num_steps} steps"]

    def _events(self) -> list[str]:
        """The newest arrivals beside the newest ends."""
        count = bisect_right(self.arrivals_s, self.now_s)
        arrived = [
            f"request {r.request_id} at {r.arrived_s - self.begin_s:.2f} s"
            for r in self.requests[max(0, count - NUM_EVENTS) : count]
        ]
        ends = [(r.finished_s, r) for r in self.requests if r.finished_s is not None]
        newest = sorted(ends, key=lambda end: (end[0], end[1].request_id))[-NUM_EVENTS:]
        ended = [f"request {r.request_id} after {at - r.arrived_s:.2f} s" for at, r in newest]
        lines = [f"{f'arrived: {count}':<40}ended: {len(ends)}"]
        for row in range(NUM_EVENTS):
            left, right = (rows[row] if row < len(rows) else "" for rows in (arrived, ended))
            lines.append(f"{left:<40}{right}".rstrip())
        return lines


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
