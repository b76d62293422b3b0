"""The live display of a pass: progress, how many requests were in flight over the steps, and the
newest arrivals and ends, as lines of text (`View`), shown on a terminal by a thread that draws it
anew, and kept in a file (`Display`). Imports no torch, and rich only on a terminal.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from time import perf_counter

from magicdec.console import make_console
from magicdec.request import Request

WIDTH, HEIGHT = 96, 8  # characters of the histogram
EIGHTHS = " ▁▂▃▄▅▆▇█"
NUM_EVENTS = 6
FRAMES_PER_S = 4


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
    """The requests change while they are served. Another thread may ask for `lines` meanwhile."""

    def __init__(self, name: str, num_rows: int) -> None:
        self.name, self.num_rows = name, num_rows
        self.history, self.num_steps = History(), 0
        self.requests: Sequence[Request] = ()
        self.begin_s, self.now = 0.0, perf_counter

    def begin(self, requests: Sequence[Request], begin_s: float, now: Callable[[], float]) -> None:
        """`requests` are in the order of arrival; the first arrives at `begin_s` on the clock that
        `now` reads."""
        self.begin_s, self.now = begin_s, now
        self.requests = requests

    def step(self, in_flight: int) -> None:
        self.num_steps += 1
        self.history.add(in_flight)

    def lines(self) -> list[str]:
        """One frame; no line before the requests are known."""
        if not self.requests:
            return []
        now_s = self.now()
        return [*self._progress(now_s), "", *self._histogram(), "", *self._events(now_s)]

    def _progress(self, now_s: float) -> list[str]:
        done = sum(len(request.output_ids) for request in self.requests)
        num_tokens = sum(request.sampling.max_new_tokens for request in self.requests)
        ended = sum(request.finished_s is not None for request in self.requests)
        filled = int(WIDTH * done / num_tokens)
        return [
            f"{self.name}: {ended} of {len(self.requests)} requests have ended, {done} of "
            f"{num_tokens} tokens, {now_s - self.begin_s:.1f} s",
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

    def _events(self, now_s: float) -> list[str]:
        """The newest arrivals beside the newest ends."""
        count = bisect_right([request.arrived_s for request in self.requests], now_s)
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
        view = View(name, num_rows)
        with live(view) if self.is_shown else nullcontext():
            yield view
        if self.file is not None:
            self.frames.append("\n".join(view.lines()) + "\n")
            self.file.write_text("\n".join(self.frames), encoding="utf-8")


def live(view: View) -> AbstractContextManager[object]:
    """Shows the newest frame on the terminal in place of the one before, until it is closed. A
    thread of rich draws it."""
    from rich.live import Live
    from rich.text import Text

    return Live(
        console=make_console(to_stderr=True),
        refresh_per_second=FRAMES_PER_S,
        transient=True,
        get_renderable=lambda: Text("\n".join(view.lines())),
    )
