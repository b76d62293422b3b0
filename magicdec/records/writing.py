"""Writes what the commands found: a line for each run, a file for everything else. Imports no
torch.

Every file of a command begins with the same envelope: `schema_version` and `kind`. NaN and infinity
are refused. Must not know what is in a record.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

# The kinds of file beside records, and the version of each one's schema.
VERSIONS = {"latency": 1, "plan": 1, "machine": 2}


def to_json(content: Any, indent: int | None = None) -> str:
    """Of a dataclass or of plain JSON values. Raises ValueError for NaN and infinity."""
    is_typed = is_dataclass(content) and not isinstance(content, type)
    return json.dumps(asdict(content) if is_typed else content, allow_nan=False, indent=indent)


def write_file(flag: str, path: Path, kind: str, content: Any) -> None:
    """Write a dataclass in the envelope of its kind. Raises ValueError as `write_text`."""
    envelope = {"schema_version": VERSIONS[kind], "kind": kind}
    write_text(flag, path, to_json(envelope | asdict(content), indent=1) + "\n")


def write_text(flag: str, path: Path, text: str) -> None:
    """A file appears whole or not at all; a link or a device is written to directly. Raises
    ValueError, naming the flag, where that cannot be done."""
    is_plain = not path.is_symlink() and (path.is_file() or not path.exists())
    partial = path.with_name(path.name + ".partial") if is_plain else path
    try:
        partial.write_text(text, encoding="utf-8")
        if is_plain:
            partial.replace(path)
    except OSError as error:
        raise ValueError(f"{flag} {path}: {error.strerror}") from None


def append_line(path: Path, line: str) -> None:
    """Append one line in one write, and make sure that it is on disk. If a crash cut off the last
    line of the file, that line is ended first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = line + "\n"
    if path.exists() and path.stat().st_size:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                text = "\n" + text
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, text.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
