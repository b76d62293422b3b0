"""Llama 1, 2, 3, 3.1, 3.2, models of the same architecture (CodeLlama, TinyLlama, Yi, NanoLlama),
and the families that differ from it in few fields: Mistral, Qwen2, Qwen2.5, Qwen3 and Baichuan 1.
"""

from __future__ import annotations

from typing import Any

from magicdec.model.config import ModelConfig
from magicdec.model.families.family import Family, Names, Raw, only, rope, size

BAICHUAN_2_VOCABULARY = 125696


def read(raw: Raw) -> dict[str, Any]:
    only(raw, "hidden_act", "silu")
    num_heads, hidden_size = size(raw, "num_attention_heads"), size(raw, "hidden_size")
    attention_bias = bool(raw.get("attention_bias", False))
    return {
        "vocab_size": size(raw, "vocab_size"),
        "num_layers": size(raw, "num_hidden_layers"),
        "hidden_size": hidden_size,
        "intermediate_size": size(raw, "intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": size(raw, "num_key_value_heads", default=num_heads),
        "head_dim": size(raw, "head_dim", default=hidden_size // num_heads),
        "max_position_embeddings": size(raw, "max_position_embeddings"),
        "norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "rope": rope(raw),
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "mlp_bias": bool(raw.get("mlp_bias", False)),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
    }


def read_mistral(raw: Raw) -> dict[str, Any]:
    """A sliding window of 4096 tokens if the field is missing, none if it is null."""
    window = raw.get("sliding_window", 4096)
    own = {"output_bias": False, "sliding_window": int(window) if window else None}
    return read(raw) | own


def read_qwen2(raw: Raw) -> dict[str, Any]:
    """Qwen2 and Qwen2.5: biases on q, k and v."""
    own = {"qkv_bias": True, "output_bias": False, "sliding_window": qwen_window(raw)}
    return read(raw) | own


def read_qwen3(raw: Raw) -> dict[str, Any]:
    """Norms on each head of q and k."""
    head_dim = size(raw, "head_dim", default=128)
    own = {"head_dim": head_dim, "qk_norm": True, "sliding_window": qwen_window(raw)}
    return read(raw) | own


def qwen_window(raw: Raw) -> int | None:
    """The window if `use_sliding_window` is set. Only a window on all layers is supported, so
    `max_window_layers`, the first layer with the window, must be 0 or the number of layers."""
    num_layers = raw["num_hidden_layers"]
    first = raw.get("max_window_layers", 28) if raw.get("use_sliding_window") else num_layers
    if 0 < first < num_layers:
        raise ValueError(f"max_window_layers {first} is not supported; choose 0 or {num_layers}")
    window = raw.get("sliding_window", 4096) if first == 0 else None
    return int(window) if window else None


def read_baichuan(raw: Raw) -> dict[str, Any]:
    """Baichuan 7B (RoPE) or 13B (ALiBi). Their architecture names differ only in case, so a field
    tells them apart: the 7B config has `max_position_embeddings`, the 13B config has
    `model_max_length` instead."""
    if "z_loss_weight" in raw or raw.get("vocab_size") == BAICHUAN_2_VOCABULARY:
        raise ValueError(
            f"vocab_size {raw.get('vocab_size')} or z_loss_weight shows that this is Baichuan 2, "
            "whose normalised head is not supported; choose Baichuan 1"
        )
    if "max_position_embeddings" in raw:
        return read(raw)
    length = size(raw, "model_max_length")
    return read(raw | {"max_position_embeddings": length}) | {"positions": "alibi"}


def baichuan_names(config: ModelConfig) -> Names:
    """The names of Llama, with q, k and v in one tensor."""
    return Names(qkv=("self_attn.W_pack",), packing="stacked")


LLAMA, MISTRAL = Family(read), Family(read_mistral)
QWEN2, QWEN3 = Family(read_qwen2), Family(read_qwen3)
BAICHUAN = Family(read_baichuan, baichuan_names)
