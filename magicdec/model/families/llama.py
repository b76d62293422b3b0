"""Llama 1, 2, 3, 3.1, 3.2, others of that architecture (CodeLlama, TinyLlama, Yi, NanoLlama), and
Mistral, Qwen2, Qwen2.5, Qwen3 and Baichuan 1.
"""

from __future__ import annotations

from typing import Any

from magicdec.model.config import ModelConfig, RopeConfig
from magicdec.model.families.family import Family, Names
from magicdec.model.families.fields import ConfigFields, only, size, switch
from magicdec.model.families.rope_fields import rope
from magicdec.model.families.windows import (
    check_no_window,
    ministral_kinds,
    mistral_kinds,
    qwen_kinds,
)

BAICHUAN_2_VOCABULARY = 125696


def read(raw: ConfigFields) -> dict[str, Any]:
    check_no_window(raw)
    has_bias = switch(raw, "attention_bias", False)
    own = {"qkv_bias": has_bias, "output_bias": has_bias}
    own["mlp_bias"] = switch(raw, "mlp_bias", False)
    return decoder(raw, heads_if_missing=None) | own


def decoder(
    raw: ConfigFields, heads_if_missing: int | None, length: str = "max_position_embeddings"
) -> dict[str, Any]:
    """The common fields. `heads_if_missing`: KV heads without `num_key_value_heads`; None, and
    null in the file: one for each query head. `length`: the field of the longest context."""
    only(raw, "hidden_act", "silu")
    num_heads = size(raw, "num_attention_heads")
    hidden_size = size(raw, "hidden_size")
    kv_heads = num_heads if "num_key_value_heads" in raw else heads_if_missing or num_heads
    return {
        "vocab_size": size(raw, "vocab_size"),
        "num_layers": size(raw, "num_hidden_layers"),
        "hidden_size": hidden_size,
        "intermediate_size": size(raw, "intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": size(raw, "num_key_value_heads", default=kv_heads),
        "head_dim": size(raw, "head_dim", default=hidden_size // num_heads),
        "max_position_embeddings": size(raw, length),
        "norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "rope": rope(raw),
        "tie_word_embeddings": switch(raw, "tie_word_embeddings", False),
    }


def read_mistral(raw: ConfigFields) -> dict[str, Any]:
    for field in ("attention_bias", "mlp_bias"):
        only(raw, field, False)
    return decoder(raw, heads_if_missing=8) | {"layer_kinds": mistral_kinds(raw)}


def read_ministral(raw: ConfigFields) -> dict[str, Any]:
    """Mistral with layers that may differ in their window."""
    for field in ("attention_bias", "mlp_bias"):
        only(raw, field, False)
    return decoder(raw, heads_if_missing=8) | {"layer_kinds": ministral_kinds(raw)}


def read_qwen2(raw: ConfigFields) -> dict[str, Any]:
    """Qwen2 and Qwen2.5: biases on q, k and v, whatever `attention_bias` says."""
    switch(raw, "attention_bias", True)
    only(raw, "mlp_bias", False)
    own = {"qkv_bias": True, "layer_kinds": qwen_kinds(raw)}
    return decoder(raw, heads_if_missing=32) | own


def read_qwen3(raw: ConfigFields) -> dict[str, Any]:
    only(raw, "mlp_bias", False)
    only(raw, "use_qk_norm", True)
    has_bias = switch(raw, "attention_bias", False)
    return decoder(raw, heads_if_missing=32) | {
        "head_dim": size(raw, "head_dim", default=128),
        "qk_norm": True,
        "qkv_bias": has_bias,
        "output_bias": has_bias,
        "layer_kinds": qwen_kinds(raw),
    }


def read_baichuan(raw: ConfigFields) -> dict[str, Any]:
    """Baichuan 7B (RoPE) or 13B (ALiBi). Architecture names differ only in case, but 13B has
    `model_max_length`, not `max_position_embeddings`. Neither has grouped heads or another RoPE."""
    if "z_loss_weight" in raw or raw.get("vocab_size") == BAICHUAN_2_VOCABULARY:
        raise ValueError(
            f"vocab_size {raw.get('vocab_size')} or z_loss_weight shows that this is Baichuan 2, "
            "whose normalised head is not supported; choose Baichuan 1"
        )
    has_rope = "max_position_embeddings" in raw
    length = "max_position_embeddings" if has_rope else "model_max_length"
    raw.get("model_max_length")  # of the 7B, whose tokenizer alone reads it
    fields = decoder(raw, heads_if_missing=None, length=length)
    only(raw, "num_key_value_heads", fields["num_heads"])
    only(raw, "head_dim", fields["hidden_size"] // fields["num_heads"])
    if fields["rope"] != RopeConfig():
        raise ValueError("rope_theta and rope_scaling are not read by Baichuan; leave them out")
    return fields | {"positions": "rope" if has_rope else "alibi"}


def baichuan_names(config: ModelConfig) -> Names:
    """Llama's names, with q, k and v in one tensor."""
    return Names(qkv=("self_attn.W_pack",), packing="stacked")


LLAMA = Family("llama", read)
MISTRAL = Family("mistral", read_mistral)
MINISTRAL = Family("ministral", read_ministral)
QWEN2 = Family("qwen2", read_qwen2)
QWEN3 = Family("qwen3", read_qwen3)
BAICHUAN = Family("baichuan", read_baichuan, baichuan_names)
