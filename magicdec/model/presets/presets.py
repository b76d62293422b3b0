"""Published model configs as data (`presets.json`), for `random:<preset>` and cost models. Imports
no torch.

`checked`: the published file itself was read, on the hub or as a verbatim copy; others agree with
published sizes, which is weaker evidence. A tied head counts once in parameter counts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from magicdec.model.config import ModelConfig
from magicdec.model.families.hf_config import load_model_config, parse_hf_config
from magicdec.model.gguf.named import SUFFIX, is_gguf
from magicdec.output.files import nearest, no_such

FILE = Path(__file__).with_name("presets.json")


@dataclass(frozen=True)
class Preset:
    config: ModelConfig
    repo_id: str
    num_parameters: int
    checked: bool


PRESETS = {
    name: Preset(**fields | {"config": parse_hf_config(fields["config"], name)})
    for name, fields in json.loads(FILE.read_text()).items()
}


DEMO_DIRECTORIES = {
    "demo": "target",
    "demo-draft": "draft",
    "demo-eagle": "eagle",
    "demo-eagle-8k": "eagle-8k",
    "demo-hybrid": "hybrid",
}
RANDOM_PREFIX = "random:"
WEIGHT_SUFFIXES = (".safetensors", ".pth", ".bin", SUFFIX)


def demo_directory(name: str) -> Path:
    return Path(str(resources.files("magicdec") / "demo" / DEMO_DIRECTORIES[name]))


def find_config(flag: str, name: str) -> ModelConfig:
    """The config of a model named with `flag`: a name that `find_model` accepts, or a preset
    without prefix. Reads no weights. Raises ValueError for an unknown name."""
    path = Path(name).expanduser()
    if name in DEMO_DIRECTORIES:
        return replace(load_model_config(demo_directory(name)), name=name)
    if path.is_dir():
        return load_model_config(path)
    if is_gguf(path) and path.is_file():
        from magicdec.model.families.gguf_config import load_gguf_config  # which imports numpy

        return load_gguf_config(path)
    if path.suffix in WEIGHT_SUFFIXES and not is_gguf(path):
        return load_model_config(path.parent)
    preset = PRESETS.get(name.removeprefix(RANDOM_PREFIX))
    if preset is None:
        prefix = RANDOM_PREFIX if name.startswith(RANDOM_PREFIX) else ""
        choices = (
            f"{', '.join(DEMO_DIRECTORIES)}, a Hugging Face directory, or a preset: "
            f"{', '.join(prefix + key for key in PRESETS)}"
        )
        raise unknown_model(flag, name, choices)
    return preset.config


def unknown_model(flag: str, name: str, choices: str) -> ValueError:
    """The error for an unknown name, with a similar path or all choices."""
    path = Path(name).expanduser()
    is_preset = name.startswith(RANDOM_PREFIX)
    is_path = not is_preset and (len(path.parts) > 1 or name.startswith((".", "~")))
    if is_path or (not is_preset and nearest(path) is not None):
        return ValueError(f"{flag} {name}: {no_such(path, 'directory or file of weights')}")
    return ValueError(f"{flag} {name!r} is not known; choose from {choices}")
