"""The measurements of a stage: a JSON file of named cells, written before and after each cell.

Owns resuming (measured cells are kept, failed ones are repeated), the stage's deadline, and what a
cell does to the others: one that fails costs no other. One that hangs, or after which the device
computes nothing more in this process, ends the process, and `quick` starts it again for the rest.
"""

from __future__ import annotations

import datetime
import functools
import gc
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TRACEBACK_LINES = 30
STARTED_ANEW = 3  # exit status of a process that must be started again for the cells that are left
# In errors after which every call of this process may fail.
BROKEN_DEVICE = ("CUDA error", "Triton Error [CUDA]")
NOTED = "driver"  # of `made_with`, but of no weight: cells of two drivers are mixed


class Incomplete(RuntimeError):
    """A cell that failed, and what it has found before."""

    def __init__(self, message: str, partial: Any) -> None:
        super().__init__(message)
        self.partial = partial


class Results:
    """The cells in `path`, including those of earlier calls. `made_with` describes the device and
    the software; cells made with other ones are not mixed."""

    def __init__(
        self,
        path: Path,
        made_with: dict[str, Any],
        seconds: float,
        cell_seconds: float | None = None,
        keeps_failed: bool = False,
        after_cell: Callable[[], object] = gc.collect,
    ) -> None:
        """`cell_seconds`: a cell that takes longer ends the process, which is to be started again.
        `keeps_failed`: it was, and what has failed in it is not repeated. `after_cell` frees what a
        cell has left. Raises ValueError if `path` was made with another device or software."""
        self.path = path
        self._until = time.monotonic() + seconds
        self._cell_seconds = cell_seconds
        self._after_cell = after_cell
        found = read_file(path)
        if found and not is_alike(found["made_with"], made_with):
            raise ValueError(
                f"--out: {path} was made with {found['made_with']}, not with {made_with}; "
                "choose another directory"
            )
        self.made_with = made_with
        self.cells: dict[str, Any] = found.get("cells", {})
        self.dates: dict[str, str] = found.get("dates", {})  # of cells
        self.failed: dict[str, str] = {}
        self.tracebacks: dict[str, list[str]] = {}  # the ends of those of failed cells
        self.partial: dict[str, Any] = found.get("partial", {})  # of cells that failed
        self.left: list[str] = []  # cells for which there was no time
        self.running: str | None = None
        self._is_broken = False
        self._kept: set[str] = set()
        if keeps_failed:
            self._keep_failed(found)

    def _keep_failed(self, found: dict[str, Any]) -> None:
        """What failed in the process before this one; so did what ran when it ended."""
        self.failed = found.get("failed", {})
        self.tracebacks = found.get("tracebacks", {})
        if (running := found.get("running")) is not None:
            self.failed[running] = "the process ended while it ran"
        self._kept = set(self.failed)
        self.write()

    @property
    def seconds_left(self) -> float:
        return self._until - time.monotonic()

    @property
    def is_complete(self) -> bool:
        return not self.failed and not self.left

    def cell(self, name: str, measure: Callable[[], Any]) -> None:
        """Measure the cell unless it is measured already. Of an error, the first line is kept."""
        if name in self.cells or name in self._kept:
            return
        if self.seconds_left <= 0:
            self.left.append(name)
            self.write()
            return
        print(f"{self.path.stem}: {name}", file=sys.stderr, flush=True)
        self.running = name
        self.write()
        with self._watched(name):
            self._measure(name, measure)
        self.running = None
        self.write()
        if self._is_broken:
            self._end_process()
        self._after_cell()

    def _measure(self, name: str, measure: Callable[[], Any]) -> None:
        try:
            self.cells[name] = measure()
            self.dates[name] = datetime.date.today().isoformat()
            self.partial.pop(name, None)
        except Exception as error:  # kernels, compilers and peers raise anything
            self._is_broken = any(words in str(error) for words in BROKEN_DEVICE)
            if isinstance(error, Incomplete):
                self.partial[name] = error.partial
            lines = str(error).strip().splitlines() or [""]
            self.failed[name] = f"{type(error).__name__}: {lines[0]}"
            self.tracebacks[name] = traceback.format_exc().splitlines()[-TRACEBACK_LINES:]

    @contextmanager
    def _watched(self, name: str) -> Iterator[None]:
        """Within it, the process ends if it takes too long: what hangs cannot be interrupted."""
        if self._cell_seconds is None:
            yield
            return

        def give_up() -> None:
            self.failed[name] = f"it was not done after {self._cell_seconds:.0f} s"
            frames = sys._current_frames()[main]
            stack = "".join(traceback.format_stack(frames)).splitlines()
            self.tracebacks[name] = stack[-TRACEBACK_LINES:]
            self.running = None
            self.write()
            self._end_process()

        main = threading.get_ident()
        timer = threading.Timer(self._cell_seconds, give_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _end_process(self) -> None:
        """At once, since what tidies up would wait for the device."""
        sys.stderr.flush()
        os._exit(STARTED_ANEW)

    def write(self) -> None:
        content = {
            "made_with": self.made_with,
            "cells": self.cells,
            "dates": self.dates,
            "failed": self.failed,
            "tracebacks": self.tracebacks,
            "partial": self.partial,
            "left": self.left,
            "running": self.running,
        }
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text(json.dumps(content, indent=1) + "\n")
        partial.replace(self.path)


def is_alike(made_with: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether cells made with these may stand side by side."""
    mine, theirs = ({k: v for k, v in m.items() if k != NOTED} for m in (made_with, other))
    return mine == theirs


def load_cells(path: Path) -> dict[str, Any]:
    """The cells of a stage; empty if it was not run."""
    cells: dict[str, Any] = read_file(path).get("cells", {})
    return cells


def read_file(path: Path) -> dict[str, Any]:
    """What a stage has written; empty if it was not run. A file that is no such file counts as none
    and is said in a line."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        say_left_out(path, str(error).splitlines()[0])
        return {}
    if not isinstance(found, dict) or not isinstance(found.get("made_with"), dict):
        say_left_out(path, "it does not say what it was made with")
        return {}
    return found


@functools.cache
def say_left_out(path: Path, why: str) -> None:
    print(f"{path} is left out: {why}", file=sys.stderr)
