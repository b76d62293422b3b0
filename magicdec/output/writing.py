"""Writes results: appended JSON lines and whole files, without NaN and infinity. Imports no torch,
and knows no record's content but the key by which one is told."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from magicdec.output.files import complete_file


def to_json(content: Any, indent: int | None = None) -> str:
    """A dataclass or JSON values as JSON text. Raises ValueError for NaN and infinity. Half a
    surrogate pair (a byte that is not UTF-8) is escaped again, since no JSON reader takes it."""
    is_typed = is_dataclass(content) and not isinstance(content, type)
    values = asdict(content) if is_typed else content
    text = json.dumps(values, allow_nan=False, indent=indent)
    if "\\ud" not in text:
        return text
    return json.dumps(_without_halves(values), allow_nan=False, indent=indent)


RECORD_KEY = "schema_version"  # a key of every record
MOST_OTHER_LINES = 1000  # torn or damaged, before the first record of a file
NO_SEAL = ', "seal": null}'  # how the line of a record ends
SEAL = re.compile(r', "seal": "([^"]*)"\}\s*$')


def seal_of(line: str) -> str:
    """The hash of a line that ends without a seal."""
    return hashlib.sha256(line.encode()).hexdigest()[:16]


def with_seal(line: str, seal: str) -> str:
    assert line.endswith(NO_SEAL), "the seal is the last field of a record"
    return f'{line.removesuffix(NO_SEAL)}, "seal": "{seal}"}}'


def is_intact(line: str) -> bool:
    found = SEAL.search(line)
    return found is not None and found[1] == seal_of(line[: found.start()] + NO_SEAL)


def _without_halves(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_without_halves(key): _without_halves(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_halves(part) for part in value]
    return value


def write_text(flag: str, path: Path, text: str) -> None:
    with complete_file(flag, path) as partial:
        partial.write_text(text, encoding="utf-8")


def check_files(files: Mapping[str, Path | None]) -> None:
    """As `check_writable`, for the files of several flags; None is left out."""
    for flag, path in files.items():
        if path is not None:
            check_writable(flag, path)


def check_writable(flag: str, path: Path) -> None:
    """Raises ValueError, naming the flag, if `path` cannot be written or made. Changes nothing."""
    try:
        if path.exists():
            # Without O_NONBLOCK, opening a pipe would wait for a reader.
            flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
            with os.fdopen(os.open(path, flags), "ab", buffering=0) as file:
                file.write(b"")  # a full device says so
            return
        directory = next(parent for parent in path.parents if parent.exists())
        if not directory.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"no file can be made in {directory}")
    except OSError as error:
        reason = "nobody reads this pipe" if error.errno == errno.ENXIO else error.strerror
        raise ValueError(f"{flag} {path}: {reason}; name a file to write to") from None


def check_record_file(flag: str, path: Path) -> None:
    """Raises ValueError, naming the flag, if records cannot be appended to `path`, or if it is a
    file of something else, which they would spoil."""
    check_writable(flag, path)
    if not path.is_file() or not path.stat().st_size:
        return
    with path.open("rb") as file:
        if not any(_is_of_record(line) for line in islice(file, MOST_OTHER_LINES)):
            raise ValueError(
                f"{flag} {path} exists and has no records, to which these could be appended; name "
                "another file"
            )


def _is_of_record(line: bytes) -> bool:
    try:
        return RECORD_KEY in json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return False


def append_line(path: Path, line: str) -> None:
    """Append a line under a lock, on disk when it returns, after a line end lost in a crash. Raises
    OSError if it was not written whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:  # whose end gives the lock back
        with suppress(OSError):  # a file system without locks: one write is the best there is
            fcntl.flock(file, fcntl.LOCK_EX)
        rest = (("\n" if _is_torn(path) else "") + line + "\n").encode()
        while rest:
            rest = rest[os.write(file.fileno(), rest) :]
        os.fsync(file.fileno())


def append_file(flag: str, lines: Path, path: Path) -> None:
    """Append the lines of the file `lines`, if it exists. Raises ValueError, naming the flag."""
    try:
        for line in lines.read_text(encoding="utf-8").splitlines() if lines.exists() else ():
            append_line(path, line)
    except OSError as error:
        raise ValueError(f"{flag} {path}: {error.strerror}") from None


def _is_torn(path: Path) -> bool:
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
