"""Mixtures of experts: Mixtral, Qwen2's with a shared expert (Qwen1.5-MoE-A2.7B) and Qwen3's
(Qwen3-30B-A3B)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from magicdec.model.config import ExpertsConfig, LayerKind, ModelConfig
from magicdec.model.families.family import Family, Names
from magicdec.model.families.fields import ConfigFields, only, shown, size, switch
from magicdec.model.families.llama import decoder
from magicdec.model.families.windows import (
    FULL,
    SLIDING,
    check_alike,
    check_whole,
    kinds,
    layer_types,
    stated_window,
)


def read_mixtral(raw: ConfigFields) -> dict[str, Any]:
    """Every layer has experts. The window is off unless a number is given."""
    fields = decoder(raw, heads_if_missing=8)
    window = None
    if raw.get("sliding_window") is not None:
        window = stated_window(raw)
    check_alike(layer_types(raw) or ())
    only(raw, "router_jitter_noise", 0.0)  # of training
    experts = ExpertsConfig(
        size(raw, "num_local_experts", "num_experts", default=8),
        size(raw, "num_experts_per_tok", default=2),
        fields["intermediate_size"],
        renormalises=True,
    )
    return fields | {"experts": experts, "layer_kinds": (LayerKind(window),)}


def read_qwen3(raw: ConfigFields) -> dict[str, Any]:
    """Qwen3's mixture. One window on all layers, as its class computes it."""
    only(raw, "mlp_bias", False)
    only(raw, "use_qk_norm", True)
    has_bias = switch(raw, "attention_bias", False)
    fields = decoder(raw, heads_if_missing=4)
    num_layers = fields["num_layers"]
    is_windowed = switch(raw, "use_sliding_window", False)
    window = stated_window(raw) if is_windowed else None
    raw.get("sliding_window")
    raw.get("max_window_layers")
    check_alike(layer_types(raw) or ())
    experts = ExpertsConfig(
        size(raw, "num_experts", "num_local_experts", default=128),
        size(raw, "num_experts_per_tok", default=8),
        size(raw, "moe_intermediate_size", default=768),
        renormalises=switch(raw, "norm_topk_prob", False),
    )
    return fields | {
        "head_dim": size(raw, "head_dim", default=fields["hidden_size"] // fields["num_heads"]),
        "qk_norm": True,
        "qkv_bias": has_bias,
        "output_bias": has_bias,
        "experts": experts,
        "layer_kinds": kinds_of_mixture(raw, [window] * num_layers),
    }


def read_qwen2(raw: ConfigFields) -> dict[str, Any]:
    """Qwen2's mixture, with a shared expert. With windows and without `layer_types`, every second
    layer below `max_window_layers` has one, the first among them."""
    only(raw, "mlp_bias", False)
    fields = decoder(raw, heads_if_missing=16)
    num_layers = fields["num_layers"]
    is_windowed = switch(raw, "use_sliding_window", False)
    window = stated_window(raw) if is_windowed else None
    raw.get("sliding_window")
    most = raw.get("max_window_layers", 28)
    types = layer_types(raw)
    if types is None:
        check_whole("max_window_layers", most)
        has_window = [is_windowed and i < most and i % 2 == 0 for i in range(num_layers)]
        types = [SLIDING if is_sliding else FULL for is_sliding in has_window]
    layer_windows = [kind.window for kind in kinds(types, window)]
    windows = layer_windows * num_layers if len(layer_windows) == 1 else layer_windows
    experts = ExpertsConfig(
        size(raw, "num_experts", "num_local_experts", default=60),
        size(raw, "num_experts_per_tok", default=4),
        size(raw, "moe_intermediate_size", default=1408),
        renormalises=switch(raw, "norm_topk_prob", False),
        shared_width=size(raw, "shared_expert_intermediate_size", default=5632),
        has_shared_gate=True,
    )
    return fields | {
        "qkv_bias": switch(raw, "qkv_bias", True),
        "experts": experts,
        "layer_kinds": kinds_of_mixture(raw, windows),
    }


def kinds_of_mixture(raw: ConfigFields, windows: Sequence[int | None]) -> tuple[LayerKind, ...]:
    """Layers of `mlp_only_layers`, and those between every `decoder_sparse_step`, have an MLP."""
    step = size(raw, "decoder_sparse_step", default=1)
    stated = raw.get("mlp_only_layers") or []
    if not isinstance(stated, list) or not all(type(layer) is int for layer in stated):
        raise ValueError(f"mlp_only_layers {shown(stated)} is no list of numbers of layers")
    dense = {layer for layer in range(len(windows)) if (layer + 1) % step} | set(stated)
    layer_kinds = tuple(LayerKind(window, has_mlp=i in dense) for i, window in enumerate(windows))
    return layer_kinds[:1] if len(set(layer_kinds)) == 1 else layer_kinds


def mixtral_names(config: ModelConfig) -> Names:
    return replace(
        Names(),
        router="block_sparse_moe.gate",
        expert="block_sparse_moe.experts.{}.",
        expert_gate_up=("w1", "w3"),
        expert_down="w2",
    )


MIXTRAL = Family("mixtral", read_mixtral, mixtral_names)
QWEN2_MOE = Family("qwen2_moe", read_qwen2)
QWEN3_MOE = Family("qwen3_moe", read_qwen3)
