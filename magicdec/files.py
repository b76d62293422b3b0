"""Writes files that are complete or absent: a full disk or Ctrl-C leaves no unfinished file, and an
error names the file that the user asked for. Imports nothing of this package.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOTS_PER_INCH = 150


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


@contextmanager
def removed(*partials: Path, out: Path) -> Iterator[None]:
    """Delete these partial files of `out` on leaving the block. An OSError names `out`."""
    try:
        yield
    except OSError as error:
        if error.filename is not None and Path(error.filename) in partials:
            error.filename, error.filename2 = str(out), None
        raise
    finally:
        for path in partials:
            path.unlink(missing_ok=True)


def save_figure(flag: str, path: Path, figure: Figure) -> None:
    """Write a figure in the format that the name of `path` ends in. Raises ValueError as
    `complete_file` does."""
    with complete_file(flag, path) as partial:
        figure.savefig(partial, dpi=DOTS_PER_INCH)
