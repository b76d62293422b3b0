"""A record in `~/.cache/magicdec/checked` of checkpoints compared with another implementation, and
the outcome. Equal config files, and equal names, sizes and times of weight files, make a checkpoint
the same. An unusable cache is no error.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from magicdec.model.checkpoint.source import ModelSource
from magicdec.model.families.config_keys import QUANTIZATION_FILES
from magicdec.model.presets.presets import DEMO_DIRECTORIES

VARIABLE = "MAGICDEC_CHECKED"  # another folder, as for the tests of this project
CONFIG_FILES = ("config.json", "generation_config.json", *QUANTIZATION_FILES)
# How a comparison has ended. TOLD: the user knows how to compare, and no more.
EQUAL = "equal"
DIFFERS = "differs"
NOT_COMPARED = "not compared"
TOLD = "told"


def is_exempt(source: ModelSource) -> bool:
    """Whether a source needs no comparison: tests compare packaged models, random weights are
    untrained, and what a draft head proposes is verified."""
    return source.is_random or source.config.is_head or source.name in DEMO_DIRECTORIES


def outcome_of(source: ModelSource) -> str | None:
    """The outcome of this checkpoint's comparison, or TOLD; None if there was none."""
    try:
        value = json.loads(_file_of(source).read_text(encoding="utf-8"))
        return str(value["outcome"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember(source: ModelSource, outcome: str) -> None:
    with suppress(OSError):
        file = _file_of(source)
        file.parent.mkdir(parents=True, exist_ok=True)
        content = {"outcome": outcome, "model": source.name}
        file.write_text(json.dumps(content) + "\n", encoding="utf-8")


def _file_of(source: ModelSource) -> Path:
    usual = Path.home() / ".cache" / "magicdec" / "checked"
    return Path(os.environ.get(VARIABLE) or usual) / f"{_identity(source)}.json"


def _identity(source: ModelSource) -> str:
    digest = hashlib.sha256()
    assert source.tokenizer_path is not None, "a checkpoint has a directory"
    for name in CONFIG_FILES:
        file = source.tokenizer_path / name
        digest.update(f"{name} ".encode() + (file.read_bytes() if file.is_file() else b""))
    files = {stored.file for stored in source.weights.tensors.values()} - {None}
    for file in sorted(given for given in files if given is not None):
        stat = file.stat()
        digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns} ".encode())
    return digest.hexdigest()[:32]
