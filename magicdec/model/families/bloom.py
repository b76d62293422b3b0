"""BLOOM: ALiBi, a norm after the embedding, and one tensor for q, k and v, grouped by head."""

from __future__ import annotations

from typing import Any

from magicdec.model.config import ModelConfig
from magicdec.model.families.family import Family, Names
from magicdec.model.families.fields import Raw, only, size

TRAINED_LENGTH = 2048  # `seq_length` of every published BLOOM


def read(raw: Raw) -> dict[str, Any]:
    only(raw, "apply_residual_connection_post_layernorm", False)
    hidden_size = size(raw, "hidden_size", "n_embed")
    num_heads = size(raw, "n_head", "num_attention_heads")
    return {
        "vocab_size": size(raw, "vocab_size"),
        "num_layers": size(raw, "n_layer", "num_hidden_layers"),
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": hidden_size // num_heads,
        "max_position_embeddings": size(raw, "seq_length", default=TRAINED_LENGTH),
        "norm": "layer",
        "norm_eps": float(raw.get("layer_norm_epsilon", 1e-5)),
        "positions": "alibi",
        "activation": "gelu_tanh",
        "gated_mlp": False,
        "embedding_norm": True,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
    }


def names(config: ModelConfig) -> Names:
    return Names(
        embedding="transformer.word_embeddings",
        embedding_norm="transformer.word_embeddings_layernorm",
        norm="transformer.ln_f",
        layer="transformer.h.{}.",
        qkv=("self_attention.query_key_value",),
        packing="grouped",
        output="self_attention.dense",
        gate_up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
    )


BLOOM = Family(read, names, "transformer.")
