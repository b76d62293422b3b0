"""Falcon 7B (one KV head, one norm per block), 40B and 180B (several KV heads, two norms), with
attention and MLP in parallel. The variants with ALiBi (falcon-rw) are refused, because they scale
and round the bias differently."""

from __future__ import annotations

from typing import Any

from magicdec.model.config import ModelConfig
from magicdec.model.families.family import Family, Names
from magicdec.model.families.fields import Raw, activation, only, rope, size


def read(raw: Raw) -> dict[str, Any]:
    only(raw, "alibi", False)
    hidden_size = size(raw, "hidden_size", "n_embed")
    num_heads = size(raw, "num_attention_heads", "n_head")
    is_new = bool(raw.get("new_decoder_architecture", False))
    bias = bool(raw.get("bias", False))
    return {
        "vocab_size": size(raw, "vocab_size"),
        "num_layers": size(raw, "num_hidden_layers", "n_layer"),
        "hidden_size": hidden_size,
        "intermediate_size": size(raw, "ffn_hidden_size", default=4 * hidden_size),
        "num_heads": num_heads,
        "num_kv_heads": _num_kv_heads(raw, num_heads, is_new),
        "head_dim": hidden_size // num_heads,
        "max_position_embeddings": size(raw, "max_position_embeddings", default=2048),
        "norm": "layer",
        "norm_eps": float(raw.get("layer_norm_epsilon", 1e-5)),
        "rope": rope(raw),
        "activation": activation(raw, "activation", "gelu"),
        "gated_mlp": False,
        "residual": _residual(raw, is_new),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": bias,
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
    }


def _num_kv_heads(raw: Raw, num_heads: int, is_new: bool) -> int:
    if is_new:
        return size(raw, "num_kv_heads", "n_head_kv", default=num_heads)
    return 1 if raw.get("multi_query", True) else num_heads


def _residual(raw: Raw, is_new: bool) -> str:
    if is_new:
        two = (raw.get("num_ln_in_parallel_attn") or 2) == 2
        return "parallel" if two else "parallel_shared_norm"
    return "parallel_shared_norm" if raw.get("parallel_attn", True) else "sequential"


def names(config: ModelConfig) -> Names:
    norms = ("input_layernorm", "post_attention_layernorm")
    if config.residual == "parallel":
        norms = ("ln_attn", "ln_mlp")
    return Names(
        embedding="transformer.word_embeddings",
        norm="transformer.ln_f",
        layer="transformer.h.{}.",
        attention_norm=norms[0],
        mlp_norm=norms[1],
        qkv=("self_attention.query_key_value",),
        packing="grouped",
        output="self_attention.dense",
        gate_up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
    )


FALCON = Family(read, names, "transformer.", (".inv_freq",))
