"""What names a GGUF file. Imports no library, as commands ask for it before they load any."""

from __future__ import annotations

from pathlib import Path

SUFFIX = ".gguf"
# The way out where a file is whole and not read.
OTHERWISE = (
    "choose another GGUF file of the model, or its Hugging Face directory in bfloat16, float16 or "
    "float32 (docs/models.md lists what is read)"
)


def is_gguf(path: Path) -> bool:
    return path.suffix == SUFFIX
