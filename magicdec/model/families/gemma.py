"""Gemma 3, the text model (`Gemma3ForCausalLM`): four norms a layer, whose weights are stored less
1, a scaled embedding, and layers with a window and a rotary embedding of their own.
"""

from __future__ import annotations

import math
from typing import Any

from magicdec.model.config import ModelConfig, RopeConfig
from magicdec.model.families.family import Family, Names
from magicdec.model.families.fields import (
    ConfigFields,
    activation,
    only,
    positive,
    shown,
    size,
    switch,
)
from magicdec.model.families.rope_fields import rope
from magicdec.model.families.windows import FULL, SLIDING, kinds, layer_types, stated_window

PATTERN = 6  # one of so many layers sees all tokens
THETA = {FULL: 1e6, SLIDING: 1e4}


def read(raw: ConfigFields) -> dict[str, Any]:
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        if raw.get(field) is not None:
            raise ValueError(f"{field} {shown(raw[field])} is not supported; choose null")
    only(raw, "use_bidirectional_attention", False)
    kind = activation(raw, "hidden_activation", "gelu_pytorch_tanh")
    num_layers = size(raw, "num_hidden_layers")
    hidden_size = size(raw, "hidden_size")
    head_dim = size(raw, "head_dim", default=256)
    has_bias = switch(raw, "attention_bias", False)
    ropes = read_ropes(raw)
    scale = positive(raw, "query_pre_attn_scalar") if "query_pre_attn_scalar" in raw else 256.0
    return {
        "vocab_size": size(raw, "vocab_size"),
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "intermediate_size": size(raw, "intermediate_size"),
        "num_heads": size(raw, "num_attention_heads"),
        "num_kv_heads": size(raw, "num_key_value_heads", default=4),
        "head_dim": head_dim,
        "max_position_embeddings": size(raw, "max_position_embeddings"),
        "norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "rope": ropes[FULL],
        "layer_kinds": kinds(
            types_of_layers(raw, num_layers), stated_window(raw), {SLIDING: ropes[SLIDING]}
        ),
        "tie_word_embeddings": switch(raw, "tie_word_embeddings", True),
        "qkv_bias": has_bias,
        "output_bias": has_bias,
        "activation": kind,
        "qk_norm": True,
        "post_norms": True,
        "embedding_scale": math.sqrt(hidden_size),
        "query_scale": math.sqrt(head_dim / scale),
    }


def types_of_layers(raw: ConfigFields, num_layers: int) -> list[str]:
    pattern = size(raw, "sliding_window_pattern", "_sliding_window_pattern", default=PATTERN)
    stated = layer_types(raw)
    if stated is not None:
        return stated
    return [SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers)]


def read_ropes(raw: ConfigFields) -> dict[str, RopeConfig]:
    """The rotary embedding by type of layer: in `rope_parameters` a table for each, in older files
    `rope_theta` and `rope_scaling` of full layers and `rope_local_base_freq` of the others."""
    longest = size(raw, "max_position_embeddings")
    tables = raw.get("rope_parameters")
    scaling = raw.get("rope_scaling")
    bases = {FULL: raw.get("rope_theta"), SLIDING: raw.get("rope_local_base_freq")}
    if tables is None:
        tables = {FULL: scaling or {}, SLIDING: {}}
    elif scaling:
        raise ValueError(
            f"rope_parameters {shown(tables)} and rope_scaling {shown(scaling)} contradict each "
            "other; keep one of them"
        )
    if not isinstance(tables, dict) or not set(tables) <= {FULL, SLIDING}:
        raise ValueError(
            f"rope_parameters {shown(tables)} is no object with a table for {FULL} and {SLIDING}"
        )
    found = {}
    for kind, base in bases.items():
        table = tables.get(kind) or {}
        if not isinstance(table, dict):
            raise ValueError(f"rope_parameters: {kind} {shown(table)} is not a JSON object")
        theta = table.get("rope_theta")
        if None not in (theta, base) and theta != base:
            raise ValueError(
                f"rope_theta {shown(theta)} of {kind} contradicts the {shown(base)} of rope_theta "
                "or rope_local_base_freq; state one of them"
            )
        known = theta if theta is not None else base
        own = table | {"rope_theta": THETA[kind] if known is None else known}
        found[kind] = rope(
            ConfigFields({"rope_parameters": own, "max_position_embeddings": longest})
        )
    return found


def names(config: ModelConfig) -> Names:
    return Names(
        mlp_norm="pre_feedforward_layernorm",
        post_attention_norm="post_attention_layernorm",
        post_mlp_norm="post_feedforward_layernorm",
        norm_offset=1.0,
    )


GEMMA3 = Family("gemma3_text", read, names)
