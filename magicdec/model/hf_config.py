"""Hugging Face `config.json` and `generation_config.json` to and from ModelConfig; no torch.

Owns the published field names, of transformers 4 and 5 both, and what their absence means.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from magicdec.model.config import ModelConfig, RopeConfig

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")


def load_model_config(directory: Path) -> ModelConfig:
    """Read `config.json` (and `generation_config.json`, whose token ids win) from a checkpoint
    directory.

    Raises ValueError naming the file when it is missing, is not JSON, or describes an unknown
    architecture.
    """
    path = directory / "config.json"
    raw = _read_json(path)
    generation_path = directory / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    try:
        return parse_hf_config(raw, name=directory.resolve().name, generation=generation)
    except KeyError as error:
        raise ValueError(f"{path}: field {error} is missing") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None


def parse_hf_config(
    raw: dict[str, Any], name: str, generation: dict[str, Any] | None = None
) -> ModelConfig:
    """Translate a Hugging Face config (the published field names, transformers 4 and 5) to a
    ModelConfig."""
    architecture = (raw.get("architectures") or ["unknown"])[0]
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"architecture {architecture!r} is not supported; "
            f"choose from {', '.join(ARCHITECTURES)}"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {raw['hidden_act']!r} is not supported; choose from silu")
    num_heads, hidden_size = _size(raw, "num_attention_heads"), _size(raw, "hidden_size")
    attention_bias = bool(raw.get("attention_bias", False))
    ids = {**raw, **{k: v for k, v in (generation or {}).items() if v is not None}}
    return ModelConfig(
        name=name,
        architecture=architecture,
        vocab_size=_size(raw, "vocab_size"),
        num_layers=_size(raw, "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=_size(raw, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=_size(raw, "num_key_value_heads", default=num_heads),
        head_dim=_size(raw, "head_dim", default=hidden_size // num_heads),
        max_position_embeddings=_size(raw, "max_position_embeddings"),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_parse_rope(raw),
        qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
        output_bias=architecture == "LlamaForCausalLM" and attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        sliding_window=_parse_sliding_window(raw, architecture),
        bos_token_id=_first_id(ids.get("bos_token_id")),
        eos_token_ids=_all_ids(ids.get("eos_token_id")),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
    )


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `parse_hf_config`, for checkpoints this project writes."""
    scaling = None
    if config.rope.rope_type != "default":
        scaling = {"rope_type": config.rope.rope_type, "factor": config.rope.factor}
    if config.rope.rope_type == "llama3":
        assert scaling is not None
        scaling |= {
            "low_freq_factor": config.rope.low_freq_factor,
            "high_freq_factor": config.rope.high_freq_factor,
            "original_max_position_embeddings": config.rope.original_max_position_embeddings,
        }
    return {
        "architectures": [config.architecture],
        "model_type": {
            "LlamaForCausalLM": "llama",
            "MistralForCausalLM": "mistral",
            "Qwen2ForCausalLM": "qwen2",
        }[config.architecture],
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": scaling,
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
        "max_window_layers": 0,  # Qwen2: the window is on every layer from this one on
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "torch_dtype": config.dtype,
    }


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path} does not exist; a checkpoint directory needs it")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _size(raw: dict[str, Any], field: str, default: int | None = None) -> int:
    """A positive whole number; a field with a default may be missing or null."""
    value = raw[field] if default is None else raw.get(field)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{field} {value!r} is not a positive whole number")
    return value


def _parse_rope(raw: dict[str, Any]) -> RopeConfig:
    """Old configs have `rope_theta` + `rope_scaling`; transformers 5 has both in one table."""
    parameters = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    if rope_type == "linear":
        return RopeConfig(theta, rope_type, factor=float(parameters["factor"]))
    if rope_type == "llama3":
        return RopeConfig(
            theta,
            rope_type,
            factor=float(parameters["factor"]),
            low_freq_factor=float(parameters["low_freq_factor"]),
            high_freq_factor=float(parameters["high_freq_factor"]),
            original_max_position_embeddings=_size(parameters, "original_max_position_embeddings"),
        )
    return RopeConfig(theta, rope_type)


def _parse_sliding_window(raw: dict[str, Any], architecture: str) -> int | None:
    """Mistral has a window (4096 if the field is missing), Qwen2 one that must be switched on."""
    if architecture == "LlamaForCausalLM":
        return None
    if architecture == "Qwen2ForCausalLM":
        num_layers = raw["num_hidden_layers"]
        first = raw.get("max_window_layers", 28) if raw.get("use_sliding_window") else num_layers
        if 0 < first < num_layers:
            raise ValueError(
                f"max_window_layers {first} is not supported; choose 0 or {num_layers}"
            )
        if first > 0:
            return None
    window = raw.get("sliding_window", 4096)
    return int(window) if window else None


def _all_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)


def _first_id(value: Any) -> int | None:
    ids = _all_ids(value)
    return ids[0] if ids else None
