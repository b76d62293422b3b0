"""Runs the commands of a published table, one after the other, each in a process of its own.

Owns what is kept when a command fails or Ctrl-C ends all: the table is saved after each command.
Must not know any system.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from pathlib import Path

from magicdec.distributed.ranks import run_command
from magicdec.records.writing import append_file
from magicdec.reproduce.published_table import PublishedTable


def measure(table: PublishedTable, is_demo: bool, out: Path) -> int:
    """Measure one part of the table and save it. Every record is appended to `out`. Returns how
    many commands failed. Raises ValueError if a file cannot be written."""
    commands, num_failed = table.commands(is_demo), 0
    for number, command in enumerate(commands, start=1):
        print(f"{number}/{len(commands)}  {shown(command)}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            records = Path(folder, "records.jsonl")
            ended = run_command([*command, "--out", records])
            why_not = f"its run ended with {ended.code}: {ended.error}" if ended.code else ""
            table.enter(command, is_demo, records, why_not)
            append_file("--out", records, out)
        table.save()
        if why_not:
            print(f"  {why_not}", file=sys.stderr, flush=True)
            num_failed += 1
    return num_failed


def shown(command: list[str]) -> str:
    return shlex.join(["magicdec", *command])
