"""Hugging Face `config.json` and `generation_config.json` to and from ModelConfig: files, token ids
and dtype; the family reads the rest. Imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from magicdec.model.config import ModelConfig, RopeConfig
from magicdec.model.families.config_keys import check_quantization, check_unread
from magicdec.model.families.eagle import is_head, read_head
from magicdec.model.families.family import find_family
from magicdec.model.families.fields import ConfigFields, only, shown
from magicdec.model.families.hybrids import LINEAR
from magicdec.model.families.windows import FULL, SLIDING, types_of
from magicdec.model.mixers import LinearAttention
from magicdec.names import PLANNED
from magicdec.output.files import load_object

# The architectures that `to_hf_config` can write.
WRITTEN = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MinistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "Gemma3ForCausalLM",
    "GptOssForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
)
# The object with the text model of one that also sees or hears, and what lies beside it.
TEXT = "text_config"
BESIDE = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config", "model_type")
# Fields that are written for the others.
NOT_OF_HYBRIDS = (
    "mlp_bias",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "rope_theta",
    "rope_scaling",
)
LEFT_OUT = {
    "Qwen3_5ForCausalLM": NOT_OF_HYBRIDS,
    "Qwen3_5MoeForCausalLM": (*NOT_OF_HYBRIDS, "intermediate_size"),
    "GptOssForCausalLM": ("mlp_bias", "use_sliding_window", "max_window_layers"),
    "MixtralForCausalLM": ("mlp_bias", "use_sliding_window", "max_window_layers"),
    "Gemma3ForCausalLM": (
        "mlp_bias",
        "use_sliding_window",
        "max_window_layers",
        "rope_theta",
        "rope_scaling",
        "hidden_act",
    ),
}
ROPE_FIELDS = {
    "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "truncate",
    ),
}


def load_model_config(directory: Path) -> ModelConfig:
    """The ModelConfig of a checkpoint directory. Token ids of `generation_config.json` take
    precedence.

    Raises:
        ValueError: names the file that is missing, no JSON, or of an unknown architecture.
    """
    path = directory / "config.json"
    raw = _read_json(path)
    generation_path = directory / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    try:
        return parse_hf_config(raw, name=directory.resolve().name, generation=generation)
    except KeyError as error:
        raise ValueError(f"{path}: field {error} is missing") from None
    except (ValueError, TypeError, ArithmeticError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from None


def parse_hf_config(
    raw: dict[str, Any], name: str, generation: dict[str, Any] | None = None
) -> ModelConfig:
    """Translate a Hugging Face config (transformers 4 or 5). Raises ValueError, or KeyError for
    a missing field, unless this model is certainly computed."""
    if is_head(raw):
        return read_head(raw, name)
    architecture = (raw.get("architectures") or ["unknown"])[0]
    family = find_family(architecture)
    raw = text_fields(raw) if architecture in PLANNED or family.other_parts else raw
    read = ConfigFields(raw)
    check_quantization(read)
    only(read, "model_type", family.model_type)
    fields = family.read(read)
    dtype = str(read.get("dtype") or read.get("torch_dtype") or "float32")
    check_unread(read, architecture)
    ids = {**raw, **{k: v for k, v in (generation or {}).items() if v is not None}}
    return ModelConfig(
        name=name,
        architecture=architecture,
        bos_token_id=next(iter(_all_ids(ids.get("bos_token_id"))), None),
        eos_token_ids=_all_ids(ids.get("eos_token_id")),
        dtype=dtype,
        **fields,
    )


def text_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of the text model, which is all that is read of one that also sees."""
    inner = raw.get(TEXT)
    if inner is None:
        return raw
    if not isinstance(inner, dict):
        raise ValueError(f"{TEXT} {shown(inner)} is not a JSON object")
    outer = {field: raw[field] for field in BESIDE if field in raw}
    stated = {field: value for field, value in inner.items() if value is not None}
    return outer | stated | {"architectures": raw["architectures"]}


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `parse_hf_config`, for architectures with Llama's roles of tensors
    (WRITTEN)."""
    assert config.architecture in WRITTEN, "only Llama-like checkpoints are written"
    own = {} if config.experts is None else experts_fields(config)
    if config.post_norms:
        own |= gemma3_fields(config)
    if config.gated_attention:
        own |= hybrid_fields(config)
    window = config.narrowest_window
    mixed = {} if len(config.windows) == 1 else {"layer_types": types_of(config.kinds)}
    fields = mixed | {
        "architectures": [config.architecture],
        "model_type": find_family(config.architecture).model_type,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": scaling_fields(config.rope),
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "max_window_layers": 0,  # Qwen2: the window is on every layer from this one on
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "torch_dtype": config.dtype,
    }
    for name in LEFT_OUT.get(config.architecture, ()):
        del fields[name]
    return fields | own


def scaling_fields(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.rope_type == "default":
        return None
    names = ("factor", *ROPE_FIELDS.get(rope.rope_type, ()))
    return {"rope_type": rope.rope_type} | {name: getattr(rope, name) for name in names}


def experts_fields(config: ModelConfig) -> dict[str, Any]:
    experts = config.experts
    assert experts is not None, "asked of a mixture"
    if config.architecture in ("MixtralForCausalLM", "GptOssForCausalLM"):
        gate = experts.gate
        clamps = {} if gate is None else {"swiglu_limit": gate.limit, "swiglu_alpha": gate.alpha}
        return clamps | {
            "num_local_experts": experts.num_experts,
            "num_experts_per_tok": experts.num_used,
        }
    fields = {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_used,
        "moe_intermediate_size": experts.width,
    }
    if experts.has_shared_gate:
        return fields | {"shared_expert_intermediate_size": experts.shared_width}
    return fields | {
        "norm_topk_prob": experts.renormalises,
        "mlp_only_layers": [i for i, kind in enumerate(config.kinds) if kind.has_mlp],
    }


def gemma3_fields(config: ModelConfig) -> dict[str, Any]:
    """The tables of RoPE are by type of layer. The scale of queries is stored as the number whose
    root divides scores."""
    local = next((kind.rope for kind in config.layer_kinds if kind.rope is not None), config.rope)
    ropes = {FULL: config.rope, SLIDING: local}
    tables = {
        kind: {"rope_type": "default", **(scaling_fields(rope) or {}), "rope_theta": rope.theta}
        for kind, rope in ropes.items()
    }
    return {
        "rope_parameters": tables,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(config.head_dim / config.query_scale**2),
        "layer_types": types_of(config.kinds),
    }


def hybrid_fields(config: ModelConfig) -> dict[str, Any]:
    """Of Qwen3.5, whose rotary embedding is of a share of a head's dimensions."""
    rotated = config.rope.rotary_dim or config.head_dim
    fields: dict[str, Any] = {}
    for mixer in config.mixers:  # which are alike
        assert isinstance(mixer, LinearAttention), "others are only planned"
        fields = {
            "linear_num_key_heads": mixer.num_key_heads,
            "linear_num_value_heads": mixer.num_value_heads,
            "linear_key_head_dim": mixer.key_dim,
            "linear_value_head_dim": mixer.value_dim,
            "linear_conv_kernel_dim": mixer.kernel,
        }
    return fields | {
        "rope_parameters": {
            "rope_type": "default",
            **(scaling_fields(config.rope) or {}),
            "rope_theta": config.rope.theta,
            "partial_rotary_factor": rotated / config.head_dim,
        },
        "layer_types": [FULL if kind.mixer is None else LINEAR for kind in config.kinds],
        "mtp_num_hidden_layers": config.num_mtp_layers,
    }


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return load_object(path)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; a checkpoint directory needs it") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _all_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)
