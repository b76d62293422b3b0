"""What names a GGUF file. Imports no library, as commands ask for it before they load any."""

from __future__ import annotations

from pathlib import Path

SUFFIX = ".gguf"


def is_gguf(path: Path) -> bool:
    return path.suffix == SUFFIX
