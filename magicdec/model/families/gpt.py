"""GPT-2, and families with its layer norms and MLP without a gate: StarCoder (gpt_bigcode), GPT-J,
BLOOM and Falcon.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from magicdec.model.config import ModelConfig, RopeConfig
from magicdec.model.families.family import Family, Names
from magicdec.model.families.fields import ConfigFields, activation, only, size, switch
from magicdec.model.families.rope_fields import rope

TRAINED_LENGTH = 2048  # `seq_length` of every published BLOOM
MASKS = (".attn.bias", ".attn.masked_bias")  # the causal mask, stored in old files
GPT2_NAMES = Names(
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
GPTJ_NAMES = Names(
    embedding="transformer.wte",
    norm="transformer.ln_f",
    layer="transformer.h.{}.",
    attention_norm="ln_1",
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    output="attn.out_proj",
    gate_up=("mlp.fc_in",),
    down="mlp.fc_out",
)
BLOOM_NAMES = Names(
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


def common(raw: ConfigFields, inner: str | None = "n_inner") -> dict[str, Any]:
    """The common fields: a KV head for each query head, a bias in every layer. `inner` is the
    field of the MLP's width; None, or if missing: four times the hidden size."""
    hidden_size = size(raw, "n_embd", "hidden_size", "n_embed")
    num_heads = size(raw, "n_head", "num_attention_heads")
    widest = 4 * hidden_size
    return {
        "vocab_size": size(raw, "vocab_size"),
        "num_layers": size(raw, "n_layer", "num_hidden_layers"),
        "hidden_size": hidden_size,
        "intermediate_size": size(raw, inner, default=widest) if inner else widest,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": hidden_size // num_heads,
        "norm": "layer",
        "norm_eps": float(raw.get("layer_norm_epsilon", 1e-5)),
        "gated_mlp": False,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": switch(raw, "tie_word_embeddings", True),
    }


def read_gpt2(raw: ConfigFields, default_activation: str = "gelu_new") -> dict[str, Any]:
    """Learned positions."""
    return common(raw) | {
        "max_position_embeddings": size(raw, "n_positions", "max_position_embeddings"),
        "positions": "learned",
        "activation": activation(raw, "activation_function", default_activation),
    }


def read_bigcode(raw: ConfigFields) -> dict[str, Any]:
    """GPT-2 with one KV head, unless multi-query attention is off."""
    fields = read_gpt2(raw, "gelu_pytorch_tanh")
    kv_heads = 1 if switch(raw, "multi_query", True) else fields["num_heads"]
    only(raw, "num_key_value_heads", kv_heads)
    return fields | {"num_kv_heads": kv_heads}


def bigcode_names(config: ModelConfig) -> Names:
    # Without multi-query attention, the tensor is grouped by head.
    packing = "stacked" if config.num_kv_heads == 1 else "grouped"
    return replace(GPT2_NAMES, packing=packing, transposed=False)


def read_gptj(raw: ConfigFields) -> dict[str, Any]:
    """Attention and MLP in parallel after one norm, interleaved RoPE on a part of each head, a
    head bias."""
    is_tied = switch(raw, "tie_word_embeddings", False)
    return common(raw) | {
        "max_position_embeddings": size(raw, "n_positions", "max_position_embeddings"),
        "rope": RopeConfig(rotary_dim=size(raw, "rotary_dim", default=64), interleaved=True),
        "activation": activation(raw, "activation_function", "gelu_new"),
        "residual": "parallel_shared_norm",
        "qkv_bias": False,
        "output_bias": False,
        "head_bias": not is_tied,
        "tie_word_embeddings": is_tied,
    }


def read_bloom(raw: ConfigFields) -> dict[str, Any]:
    """ALiBi, a norm after the embedding, and q, k and v grouped by head."""
    return common(raw, inner=None) | {
        "max_position_embeddings": size(raw, "seq_length", default=TRAINED_LENGTH),
        "positions": "alibi",
        "activation": "gelu_tanh",
        "embedding_norm": True,
    }


def read_falcon(raw: ConfigFields) -> dict[str, Any]:
    """Falcon 7B (one KV head and norm), 40B and 180B (several KV heads, two norms), with
    parallel blocks. ALiBi variants (falcon-rw) are refused: they scale and round the bias
    differently."""
    only(raw, "alibi", False)
    fields = common(raw, "ffn_hidden_size")
    bias = switch(raw, "bias", False)
    num_heads = fields["num_heads"]
    num_norms = raw.get("num_ln_in_parallel_attn")
    only(raw, "head_dim", fields["head_dim"])
    is_parallel = switch(raw, "parallel_attn", True)
    has_one_kv_head = switch(raw, "multi_query", True)
    kv_heads = size(raw, "num_kv_heads", "n_head_kv", default=num_heads)
    if switch(raw, "new_decoder_architecture", False):  # which ignores `multi_query`
        only(raw, "parallel_attn", True)
        if num_norms not in (None, 1, 2):
            raise ValueError(f"num_ln_in_parallel_attn {num_norms} is not supported; choose 1 or 2")
        residual = "parallel_shared_norm" if num_norms == 1 else "parallel"
    else:
        only(raw, "num_ln_in_parallel_attn", 1)
        kv_heads = 1 if has_one_kv_head else num_heads
        residual = "parallel_shared_norm" if is_parallel else "sequential"
    return fields | {
        "num_kv_heads": kv_heads,
        "max_position_embeddings": size(raw, "max_position_embeddings", default=2048),
        "rope": rope(raw),
        "activation": activation(raw, "activation", "gelu"),
        "residual": residual,
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": bias,
    }


def falcon_names(config: ModelConfig) -> Names:
    names = replace(BLOOM_NAMES, embedding_norm="")
    if config.residual == "parallel":
        names = replace(names, attention_norm="ln_attn", mlp_norm="ln_mlp")
    return names


GPT2 = Family("gpt2", read_gpt2, lambda config: GPT2_NAMES, "transformer.", MASKS)
BIGCODE = Family("gpt_bigcode", read_bigcode, bigcode_names, "transformer.", MASKS)
GPTJ = Family(
    "gptj",
    read_gptj,
    lambda config: GPTJ_NAMES,
    "transformer.",
    buffers=(*MASKS, ".attn.embed_positions"),
    has_head_bias=True,
)
BLOOM = Family("bloom", read_bloom, lambda config: BLOOM_NAMES, "transformer.")
FALCON = Family("falcon", read_falcon, falcon_names, "transformer.", (".inv_freq",))
