"""Llama 1, 2, 3, 3.1, 3.2 and models of the same architecture: CodeLlama, TinyLlama, Yi,
NanoLlama."""

from __future__ import annotations

from typing import Any

from magicdec.model.families.family import Family
from magicdec.model.families.fields import Raw, only, rope, size


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


LLAMA = Family(read)
