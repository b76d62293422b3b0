"""The config of a model from its name on the command line, where weights are not needed: imports no
torch and reads no weight files.

Owns the names of packaged and random models; `checkpoint/source.py` finds their weights.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from pathlib import Path

from magicdec.model.config import ModelConfig
from magicdec.model.families.hf_config import load_model_config
from magicdec.model.presets.presets import PRESETS

DEMO_DIRECTORIES = {"demo": "target", "demo-draft": "draft"}
RANDOM_PREFIX = "random:"
WEIGHT_SUFFIXES = (".safetensors", ".pth", ".bin")


def demo_directory(name: str) -> Path:
    """The directory of a packaged model. It may be missing in this installation."""
    return Path(str(resources.files("magicdec") / "demo" / DEMO_DIRECTORIES[name]))


def find_config(flag: str, name: str) -> ModelConfig:
    """The config of the model a user named with `flag`: any name that `find_model` accepts, or a
    preset without its prefix. Of a directory only the config files are read. Raises ValueError for
    an unknown name."""
    path = Path(name).expanduser()
    if name in DEMO_DIRECTORIES:
        return replace(load_model_config(demo_directory(name)), name=name)
    if path.is_dir():
        return load_model_config(path)
    if path.suffix in WEIGHT_SUFFIXES:
        return load_model_config(path.parent)
    preset = PRESETS.get(name.removeprefix(RANDOM_PREFIX))
    if preset is None:
        raise ValueError(
            f"{flag} {name!r} is not known; choose from {', '.join(DEMO_DIRECTORIES)}, a Hugging "
            f"Face directory, or a preset: {', '.join(PRESETS)}"
        )
    return preset.config
