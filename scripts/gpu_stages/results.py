"""The measurements of a stage: a JSON file of named cells, written after each cell.

Owns resuming (measured cells are kept, failed ones are repeated) and the stage's deadline. A failed
cell does not affect the others.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

TRACEBACK_LINES = 30


class Incomplete(RuntimeError):
    """A cell that failed, and what it has found before."""

    def __init__(self, message: str, partial: Any) -> None:
        super().__init__(message)
        self.partial = partial


class Results:
    """The cells in `path`, including those of earlier calls. `made_with` describes the device and
    the software; cells made with other ones are not mixed."""

    def __init__(self, path: Path, made_with: dict[str, Any], seconds: float) -> None:
        """Raises ValueError if `path` was made with another device or software."""
        self.path = path
        self._until = time.monotonic() + seconds
        found = read_file(path)
        if found and found["made_with"] != made_with:
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

    @property
    def seconds_left(self) -> float:
        return self._until - time.monotonic()

    @property
    def is_complete(self) -> bool:
        return not self.failed and not self.left

    def cell(self, name: str, measure: Callable[[], Any]) -> None:
        """Measure the cell unless it is measured already. Of an error, the first line is kept."""
        if name in self.cells:
            return
        if self.seconds_left <= 0:
            self.left.append(name)
        else:
            print(f"{self.path.stem}: {name}", file=sys.stderr, flush=True)
            try:
                self.cells[name] = measure()
                self.dates[name] = datetime.date.today().isoformat()
                self.partial.pop(name, None)
            except Exception as error:  # kernels, compilers and peers raise anything
                if isinstance(error, Incomplete):
                    self.partial[name] = error.partial
                lines = str(error).strip().splitlines() or [""]
                self.failed[name] = f"{type(error).__name__}: {lines[0]}"
                self.tracebacks[name] = traceback.format_exc().splitlines()[-TRACEBACK_LINES:]
        self.write()

    def write(self) -> None:
        content = {
            "made_with": self.made_with,
            "cells": self.cells,
            "dates": self.dates,
            "failed": self.failed,
            "tracebacks": self.tracebacks,
            "partial": self.partial,
            "left": self.left,
        }
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text(json.dumps(content, indent=1) + "\n")
        partial.replace(self.path)


def load_cells(path: Path) -> dict[str, Any]:
    """The cells of a stage; empty if it was not run."""
    cells: dict[str, Any] = read_file(path).get("cells", {})
    return cells


def read_file(path: Path) -> dict[str, Any]:
    """What a stage has written; empty if it was not run."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found
