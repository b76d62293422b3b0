"""Published model configs as data, for `random:<preset>` benchmarks and for cost models.

Owns the numbers of each published `config.json` of Llama, Qwen 2, Yi and Mistral (`published` has
the other families), and the names of packaged and random models, whose weights
`checkpoint/source.py` finds. Imports no torch and reads no weight files. `checked` means that the
published file itself was read: its page on the hub, or a verbatim copy in a public repository. The
other presets agree with at least two configs re-saved from the same base model, which is weaker
evidence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from magicdec.model.config import ModelConfig, RopeConfig
from magicdec.model.families.hf_config import load_model_config, parse_hf_config
from magicdec.model.presets.published import PUBLISHED


@dataclass(frozen=True)
class Preset:
    """A published model: config, repository on the hub, published parameter count."""

    config: ModelConfig
    repo_id: str
    num_parameters: int
    checked: bool


def _llama3_rope(factor: float) -> RopeConfig:
    return RopeConfig(500000.0, "llama3", factor, 1.0, 4.0, 8192)


# Fields common to a family. Others have ModelConfig's defaults (eps 1e-5, no biases, untied head).
LLAMA_2: dict[str, Any] = {
    "vocab_size": 32000,
    "bos_token_id": 1,
    "eos_token_ids": (2,),
    "dtype": "float16",
}
LLAMA_2_LINEAR_8 = LLAMA_2 | {"rope": RopeConfig(rope_type="linear", factor=8.0)}
LLAMA_68M = LLAMA_2 | {"bos_token_id": 0, "norm_eps": 1e-6, "dtype": "float32"}
TINYLLAMA = LLAMA_2 | {"dtype": "bfloat16"}
LLAMA_3: dict[str, Any] = {
    "vocab_size": 128256,
    "rope": RopeConfig(500000.0),
    "bos_token_id": 128000,
    "eos_token_ids": (128001,),
}
LLAMA_3_1 = LLAMA_3 | {"rope": _llama3_rope(8.0)}
LLAMA_3_2 = LLAMA_3 | {"rope": _llama3_rope(32.0), "tie_word_embeddings": True}
QWEN_2_5: dict[str, Any] = {
    "architecture": "Qwen2ForCausalLM",
    "vocab_size": 152064,
    "rope": RopeConfig(1000000.0),
    "qkv_bias": True,
    "bos_token_id": 151643,
    "eos_token_ids": (151643,),
}
YI_1_5: dict[str, Any] = {
    "vocab_size": 64000,
    "rope": RopeConfig(5000000.0),
    "norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_ids": (2,),
}
MISTRAL_0_1: dict[str, Any] = {
    "architecture": "MistralForCausalLM",
    "vocab_size": 32000,
    "sliding_window": 4096,
    "bos_token_id": 1,
    "eos_token_ids": (2,),
}
MISTRAL_0_3 = MISTRAL_0_1 | {
    "vocab_size": 32768,
    "sliding_window": None,
    "rope": RopeConfig(1000000.0),
}

Sizes = tuple[int, int, int, int, int, int]
"""Layers, hidden size, FFN size, heads, KV heads, positions."""


def _preset(
    name: str, repo_id: str, count: int, checked: bool, family: dict[str, Any], sizes: Sizes
) -> Preset:
    layers, hidden, ffn, heads, kv_heads, positions = sizes
    config = ModelConfig(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=positions,
        **family,
    )
    return Preset(config, repo_id, count, checked)


# fmt: off
_ROWS: tuple[tuple[str, str, int, bool, dict[str, Any], Sizes], ...] = (
    ("llama-2-7b", "meta-llama/Llama-2-7b-hf", 6_738_415_616, True,
     LLAMA_2, (32, 4096, 11008, 32, 32, 4096)),
    ("llama-2-7b-32k", "togethercomputer/LLaMA-2-7B-32K", 6_738_415_616, True,
     LLAMA_2_LINEAR_8, (32, 4096, 11008, 32, 32, 32768)),
    ("llama-2-13b", "meta-llama/Llama-2-13b-hf", 13_015_864_320, True,
     LLAMA_2, (40, 5120, 13824, 40, 40, 4096)),
    ("llama-2-70b", "meta-llama/Llama-2-70b-hf", 68_976_648_192, True,
     LLAMA_2, (80, 8192, 28672, 64, 8, 4096)),
    ("llama-3-8b", "meta-llama/Meta-Llama-3-8B", 8_030_261_248, True,
     LLAMA_3, (32, 4096, 14336, 32, 8, 8192)),
    ("llama-3-70b", "meta-llama/Meta-Llama-3-70B", 70_553_706_496, False,
     LLAMA_3, (80, 8192, 28672, 64, 8, 8192)),
    ("llama-3.1-8b", "meta-llama/Llama-3.1-8B", 8_030_261_248, True,
     LLAMA_3_1, (32, 4096, 14336, 32, 8, 131072)),
    ("llama-3.1-70b", "meta-llama/Llama-3.1-70B", 70_553_706_496, False,
     LLAMA_3_1, (80, 8192, 28672, 64, 8, 131072)),
    ("llama-3.2-1b", "meta-llama/Llama-3.2-1B", 1_235_814_400, True,
     LLAMA_3_2, (16, 2048, 8192, 32, 8, 131072)),
    ("llama-68m", "JackFram/llama-68m", 68_030_208, True,
     LLAMA_68M, (2, 768, 3072, 12, 12, 2048)),
    ("tinyllama-1.1b", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", 1_100_048_384, True,
     TINYLLAMA, (22, 2048, 5632, 32, 4, 2048)),
    ("qwen2.5-7b", "Qwen/Qwen2.5-7B", 7_615_616_512, True,
     QWEN_2_5 | {"norm_eps": 1e-6}, (28, 3584, 18944, 28, 4, 131072)),
    ("qwen2.5-14b", "Qwen/Qwen2.5-14B", 14_770_033_664, True,
     QWEN_2_5, (48, 5120, 13824, 40, 8, 131072)),
    ("qwen2.5-32b", "Qwen/Qwen2.5-32B", 32_763_876_352, True,
     QWEN_2_5, (64, 5120, 27648, 40, 8, 131072)),
    ("yi-1.5-6b", "01-ai/Yi-1.5-6B", 6_061_035_520, True,
     YI_1_5, (32, 4096, 11008, 32, 4, 4096)),
    ("yi-1.5-34b-32k", "01-ai/Yi-1.5-34B-32K", 34_388_917_248, False,
     YI_1_5, (60, 7168, 20480, 56, 8, 32768)),
    ("mistral-7b-v0.1", "mistralai/Mistral-7B-v0.1", 7_241_732_096, True,
     MISTRAL_0_1, (32, 4096, 14336, 32, 8, 32768)),
    ("mistral-7b-v0.3", "mistralai/Mistral-7B-v0.3", 7_248_023_552, False,
     MISTRAL_0_3, (32, 4096, 14336, 32, 8, 32768)),
)
# fmt: on

PRESETS: dict[str, Preset] = {row[0]: _preset(*row) for row in _ROWS}
for _name, _repo_id, _count, _checked, _raw in PUBLISHED:
    PRESETS[_name] = Preset(parse_hf_config(_raw, _name), _repo_id, _count, _checked)


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
