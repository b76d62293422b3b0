"""GPT-J: attention and MLP in parallel after one norm, RoPE on a part of each head in interleaved
pairs, a bias on the head."""

from __future__ import annotations

from typing import Any

from magicdec.model.config import ModelConfig, RopeConfig
from magicdec.model.families.family import Family, Names
from magicdec.model.families.fields import Raw, activation, size


def read(raw: Raw) -> dict[str, Any]:
    hidden_size = size(raw, "n_embd", "hidden_size")
    num_heads = size(raw, "n_head", "num_attention_heads")
    return {
        "vocab_size": size(raw, "vocab_size"),
        "num_layers": size(raw, "n_layer", "num_hidden_layers"),
        "hidden_size": hidden_size,
        "intermediate_size": size(raw, "n_inner", default=4 * hidden_size),
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": hidden_size // num_heads,
        "max_position_embeddings": size(raw, "n_positions", "max_position_embeddings"),
        "norm": "layer",
        "norm_eps": float(raw.get("layer_norm_epsilon", 1e-5)),
        "rope": RopeConfig(rotary_dim=size(raw, "rotary_dim", default=64), interleaved=True),
        "activation": activation(raw, "activation_function", "gelu_new"),
        "gated_mlp": False,
        "residual": "parallel_shared_norm",
        "mlp_bias": True,
        "head_bias": not raw.get("tie_word_embeddings", False),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
    }


def names(config: ModelConfig) -> Names:
    return Names(
        embedding="transformer.wte",
        norm="transformer.ln_f",
        layer="transformer.h.{}.",
        attention_norm="ln_1",
        qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        output="attn.out_proj",
        gate_up=("mlp.fc_in",),
        down="mlp.fc_out",
    )


BUFFERS = (".attn.bias", ".attn.masked_bias", ".attn.embed_positions")
GPTJ = Family(read, names, "transformer.", BUFFERS)
