"""Runs a command of this program in a process of its own, whose output is kept.

Must not know any command.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ended:
    """The exit code of a command, and what it said on stderr."""

    code: int
    stderr: str

    @property
    def error(self) -> str:
        """Its last line without the name of the command, which is the error if it failed."""
        last = (self.stderr.strip().splitlines() or [f"it ended with {self.code}"])[-1]
        name, colon, rest = last.partition(": ")
        return rest if colon and name.startswith("magicdec") else last


def run_command(words: Sequence[object]) -> Ended:
    """Run `magicdec WORDS` and wait for its end. What it prints on stdout is dropped."""
    command = [sys.executable, "-m", "magicdec", *map(str, words)]
    done = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
    )
    return Ended(done.returncode, done.stderr)
