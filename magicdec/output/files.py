"""Reads and writes files. Imports nothing of this package.

Only regular files within a largest size are read: a pipe or a device may never end. Errors are
OSError or ValueError with a short reason; the caller names flag and path. Written files are
complete or absent, also on Ctrl-C.
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import json
import os
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, AnyStr, BinaryIO

if TYPE_CHECKING:
    from pydantic import ValidationError

READ_BYTES = 1 << 22
MOST_LINE_BYTES = 256 << 20  # of a line; a book is one line of a dataset
MOST_JSON_BYTES = 64 << 20  # of a file that is one JSON value or TOML; a tokenizer has 20 MB
# The way out where a checkpoint is damaged or incomplete.
AGAIN = "fetch or convert the checkpoint again, with all of its files"
MOST_INTEGER = 1 << 63  # counts and lengths of a file are below it
KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def is_utf8(name: str) -> bool:
    """Whether a name was UTF-8; Python writes other bytes as half a surrogate pair."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def exists(path: Path | str) -> bool:
    """Whether the path exists; it need not be a valid name."""
    try:
        return path != "" and Path(path).exists()
    except OSError:  # such as a name that is too long
        return False


def is_folder(path: Path | str) -> bool:
    return exists(path) and Path(path).is_dir()


def check_regular(path: Path | str) -> None:
    """Raises OSError unless the path is a regular file, for libraries that open it themselves."""
    _check_mode(Path(path).stat().st_mode)


def open_regular(path: Path | str) -> BinaryIO:
    """The file, opened for reading bytes. Raises OSError unless it is regular; never waits for a
    pipe."""
    check_regular(path)  # opening some devices has an effect
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_mode(os.fstat(descriptor).st_mode)
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path | str, most: int = MOST_JSON_BYTES) -> bytes:
    """All of a file. Raises OSError as `open_regular`, and for more than `most` bytes."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {_size(most)}")
    return data


def read_text(path: Path | str, most: int = MOST_JSON_BYTES) -> str:
    """All of a file as text, without a byte-order mark. Raises OSError as `read_bytes`, and
    UnicodeDecodeError, a ValueError."""
    return read_bytes(path, most).decode("utf-8-sig")


def lines_of(file: IO[AnyStr], most: int = MOST_LINE_BYTES) -> Iterator[tuple[int, AnyStr]]:
    """The non-empty lines of an open file, counted from 1. Raises OSError for a line of more than
    `most` bytes or characters."""
    number = 0
    while line := file.readline(most + 1):
        number += 1
        if len(line) > most:
            raise OSError(errno.EFBIG, f"line {number} has more than {_size(most)}")
        if line.strip():
            yield number, line


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError, one line, also for deep nesting and too many
    digits."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def load_json(path: Path | str, most: int = MOST_JSON_BYTES) -> Any:
    """The value of a JSON file. Raises OSError as `read_bytes` and ValueError as `parse_json`."""
    return parse_json(read_text(path, most))


def load_object(path: Path | str, most: int = MOST_JSON_BYTES) -> dict[str, Any]:
    """The JSON object of a file, with numbers of 64 bits. Raises OSError as `read_bytes`, or
    ValueError."""
    try:
        value = load_json(path, most)
    except ValueError as error:
        raise ValueError(f"not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, found {type(value).__name__}")
    for key, part in value.items():
        check_integers(key, part)
    return value


def check_integers(key: str, value: Any) -> None:
    """Raises ValueError, naming the key, for a whole number, at any depth, that exceeds 64 bits."""
    if isinstance(value, int) and not -MOST_INTEGER <= value < MOST_INTEGER:
        raise ValueError(f"{key} is a whole number of {len(str(abs(value)))} digits")
    if isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            check_integers(key, part)


def _check_mode(mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file")


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MB" if num_bytes >> 20 else f"{num_bytes} bytes"


@contextmanager
def complete_file(flag: str, path: Path) -> Iterator[Path]:
    """The path of a partial file, which replaces `path` at the end of the block. Makes the
    directory; writes to links and devices directly. Raises ValueError, naming the flag and `path`,
    and leaves no partial file."""
    is_plain = not path.is_symlink() and (path.is_file() or not path.exists())
    partial = path.with_name(f"{path.stem}.partial{path.suffix}") if is_plain else path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if is_plain:
            make_new(partial)
        yield partial
        if is_plain:
            partial.replace(path)
    except FileExistsError:
        raise ValueError(f"{flag} {path}: {path.parent} is not a directory") from None
    except OSError as error:
        raise ValueError(f"{flag} {path}: {error.strerror or error}") from None
    finally:
        if is_plain:
            with suppress(OSError):
                partial.unlink(missing_ok=True)


def nearest(path: Path) -> Path | None:
    """An existing path like a missing one: a similar name in the same or a similar directory, or
    the same name here; or None."""
    for parent in (path.parent, nearest(path.parent) if path.parent.name else None):
        names = list[str]()
        with suppress(OSError):
            names = [sibling.name for sibling in parent.iterdir()] if parent is not None else []
        if parent is not None and (close := difflib.get_close_matches(path.name, names, n=1)):
            return parent / close[0]
    here = Path(path.name)
    return here if len(path.parts) > 1 and here.exists() else None


def no_such(path: Path, kind: str) -> str:
    close = nearest(path)
    return f"no such {kind}" + ("" if close is None else f"; did you mean {close}?")


def make_new(path: Path) -> None:
    """Make an empty file, replacing a file or a link, whose target stays. Raises OSError."""
    path.unlink(missing_ok=True)
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    os.close(os.open(path, flags, 0o666))


def hash_file(path: Path, digest: hashlib._Hash | None = None) -> str:
    """The checksum of a file in hexadecimal digits: its sha256, or that of `digest`."""
    digest = digest or hashlib.sha256()
    with open_regular(path) as handle:
        while data := handle.read(READ_BYTES):
            digest.update(data)
    return digest.hexdigest()


def first_error(error: ValidationError, tags: Collection[str] = ()) -> str:
    """The first of the errors, with key and value. Names of `tags` in its place, which tell types
    apart, are no keys."""
    first = error.errors()[0]
    place = (part for part in first["loc"] if part not in tags)
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    key = "".join(parts).strip(".") or "it"
    if first["type"] == "missing":
        return f"{key} is missing"
    if first["type"] == "unexpected_keyword_argument":
        return f"{key} is no key that is known here"
    reason = first["msg"].replace("Input should", "it must").replace("String should", "it must")
    value = json.dumps(first["input"], default=lambda line: line.decode(errors="replace"))
    return f"{key} is {value[:40]}; {reason}"
