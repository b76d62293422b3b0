"""GPT-2: learned positions, layer norms, matrices stored [in, out]. StarCoder (gpt_bigcode) is the
same with one KV head and matrices stored [out, in]."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from magicdec.model.config import ModelConfig
from magicdec.model.families.family import Family, Names
from magicdec.model.families.fields import Raw, activation, only, size


def read(raw: Raw) -> dict[str, Any]:
    only(raw, "scale_attn_weights", True)
    only(raw, "scale_attn_by_inverse_layer_idx", False)
    only(raw, "add_cross_attention", False)
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
        "positions": "learned",
        "activation": activation(raw, "activation_function", "gelu_new"),
        "gated_mlp": False,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
    }


def read_bigcode(raw: Raw) -> dict[str, Any]:
    fields = read({"activation_function": "gelu_pytorch_tanh"} | raw)
    return fields | ({"num_kv_heads": 1} if raw.get("multi_query", True) else {})


def names(config: ModelConfig) -> Names:
    return Names(
        embedding="transformer.wte",
        position_embedding="transformer.wpe",
        norm="transformer.ln_f",
        layer="transformer.h.{}.",
        attention_norm="ln_1",
        mlp_norm="ln_2",
        qkv=("attn.c_attn",),
        packing="stacked",
        output="attn.c_proj",
        gate_up=("mlp.c_fc",),
        down="mlp.c_proj",
        transposed=True,
    )


def bigcode_names(config: ModelConfig) -> Names:
    # Without multi-query attention, the tensor is grouped by head.
    packing = "stacked" if config.num_kv_heads == 1 else "grouped"
    return replace(names(config), packing=packing, transposed=False)


MASKS = (".attn.bias", ".attn.masked_bias")  # the causal mask, stored in old files
GPT2 = Family(read, names, "transformer.", MASKS)
BIGCODE = Family(read_bigcode, bigcode_names, "transformer.", MASKS)
