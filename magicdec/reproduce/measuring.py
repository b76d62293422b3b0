"""Runs the commands of a published table, one after the other, each in a process of its own.

Owns what is kept when a command fails or Ctrl-C ends all: the table is saved after each command.
Must not know any system.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from magicdec.records.writing import append_line
from magicdec.reproduce.published_table import PublishedTable


def measure(table: PublishedTable, is_demo: bool, out: Path) -> int:
    """Measure one part of the table and save it. Every record is appended to `out`. Returns how
    many commands failed. Raises ValueError if a file cannot be written."""
    commands, num_failed = table.commands(is_demo), 0
    for number, command in enumerate(commands, start=1):
        print(f"{number}/{len(commands)}  {shown(command)}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            records = Path(folder, "records.jsonl")
            why_not = start(command, records)
            table.enter(command, is_demo, records, why_not)
            keep(records, out)
        table.save()
        if why_not:
            print(f"  {why_not}", file=sys.stderr, flush=True)
            num_failed += 1
    return num_failed


def shown(command: list[str]) -> str:
    return shlex.join(["magicdec", *command])


def start(command: list[str], records: Path) -> str:
    """Run `magicdec COMMAND --out RECORDS`. Returns why it failed; empty if it did not."""
    words = [sys.executable, "-m", "magicdec", *command, "--out", str(records)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
    return f"its run ended with {done.returncode}: {' '.join(said)}"


def keep(records: Path, out: Path) -> None:
    try:
        for line in records.read_text(encoding="utf-8").splitlines() if records.exists() else ():
            append_line(out, line)
    except OSError as error:
        raise ValueError(f"--out {out}: {error.strerror}") from None
