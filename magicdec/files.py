"""Writes files that are complete or absent: a full disk or Ctrl-C leaves no unfinished file, and an
error names the file that the user asked for. Also checksums of files, and what is wrong in the
content of one. Imports nothing of this package.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

READ_BYTES = 1 << 22


@contextmanager
def complete_file(flag: str, path: Path) -> Iterator[Path]:
    """Yields the path of a partial file beside `path`, which takes the place of `path` when the
    block ends. Links and devices are written to directly. Makes the directory. Raises ValueError,
    naming the flag and `path`, if the file cannot be written; no partial file is left then."""
    is_plain = not path.is_symlink() and (path.is_file() or not path.exists())
    partial = path.with_name(f"{path.stem}.partial{path.suffix}") if is_plain else path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
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
    """What a user may have meant by a path that does not exist: a similar name in the same
    directory or in one with a similar name, or the same name here. None if nothing is like it."""
    for parent in (path.parent, nearest(path.parent) if path.parent.name else None):
        names = list[str]()
        with suppress(OSError):
            names = [each.name for each in parent.iterdir()] if parent is not None else []
        if parent is not None and (close := difflib.get_close_matches(path.name, names, n=1)):
            return parent / close[0]
    here = Path(path.name)
    return here if len(path.parts) > 1 and here.exists() else None


def no_such(path: Path, kind: str) -> str:
    """That nothing of this kind is at `path`, and what is."""
    close = nearest(path)
    return f"no such {kind}" + ("" if close is None else f"; did you mean {close}?")


def hash_file(path: Path, digest: hashlib._Hash | None = None) -> str:
    """The checksum of a file in hexadecimal digits: its sha256, or what `digest` makes of it."""
    digest = digest or hashlib.sha256()
    with path.open("rb") as handle:
        while data := handle.read(READ_BYTES):
            digest.update(data)
    return digest.hexdigest()


def first_error(error: ValidationError) -> str:
    """The first key of a file that is wrong, and why."""
    first = error.errors()[0]
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    key = "".join(parts).strip(".") or "it"
    if first["type"] == "missing":
        return f"{key} is missing"
    reason = first["msg"].replace("Input should", "it must").replace("String should", "it must")
    return f"{key} is {json.dumps(first['input'])[:40]}; {reason}"
