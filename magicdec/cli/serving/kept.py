"""The file that a command appends its records to, one by one as they are made."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from magicdec.records.writing import append_line, to_json


class Kept:
    """The file, and how many records it got. A record that cannot be written is lost with a line
    that says so, and the command goes on: what it measures next may still be printed."""

    def __init__(self, path: Path) -> None:
        self.path, self.count = path, 0

    def append(self, record: Any) -> None:
        """Append the record, a dataclass, or say why it is lost."""
        try:
            append_line(self.path, to_json(record))
            self.count += 1
        except OSError as error:
            print(f"--out {self.path}: {error.strerror}; the record is lost", file=sys.stderr)
