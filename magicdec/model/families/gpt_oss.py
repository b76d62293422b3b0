"""gpt-oss (arXiv 2508.10925): a mixture of experts with biases, whose heads have sink logits and
whose layers have a window by turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from magicdec.model.config import ClampedGate, ExpertsConfig, ModelConfig, RopeConfig
from magicdec.model.families.config_keys import FOREIGN
from magicdec.model.families.family import ExpertStack, Family, Names
from magicdec.model.families.fields import ConfigFields, only, positive, size, switch
from magicdec.model.families.llama import decoder
from magicdec.model.families.windows import FULL, SLIDING, kinds, layer_types

DEFAULT_WINDOW = 128
MXFP4_BYTES = 4.25 / 8  # of a weight as published, with a byte of scale for each 32


def read(raw: ConfigFields) -> dict[str, Any]:
    if not (raw.get("rope_parameters") or raw.get("rope_scaling")):
        raise ValueError("rope_parameters is missing; copy it from the model's own config.json")
    fields = decoder(raw, heads_if_missing=8)
    num_layers = fields["num_layers"]
    has_bias = switch(raw, "attention_bias", True)
    types = layer_types(raw) or [(SLIDING, FULL)[layer % 2] for layer in range(num_layers)]
    window = size(raw, "sliding_window", default=DEFAULT_WINDOW)
    gate = ClampedGate(
        positive(raw, "swiglu_limit") if "swiglu_limit" in raw else ClampedGate.limit,
        positive(raw, "swiglu_alpha") if "swiglu_alpha" in raw else ClampedGate.alpha,
    )
    is_mxfp4 = (raw.get(FOREIGN) or {}).get("quant_method") == "mxfp4"
    experts = ExpertsConfig(
        size(raw, "num_local_experts", "num_experts", default=128),
        size(raw, "num_experts_per_tok", "experts_per_token", default=4),
        fields["intermediate_size"],
        renormalises=True,
        has_bias=True,
        gate=gate,
        stored_bytes=MXFP4_BYTES if is_mxfp4 else None,
    )
    rope: RopeConfig = fields["rope"]
    only(raw, "initial_context_length", rope.original_max_position_embeddings)  # its own name of it
    return fields | {
        "head_dim": size(raw, "head_dim", default=64),
        "qkv_bias": has_bias,
        "output_bias": has_bias,
        "sink_logits": True,
        "experts": experts,
        "layer_kinds": kinds(types, window),
    }


def names(config: ModelConfig) -> Names:
    stack = ExpertStack(is_transposed=True, takes_turns=True)
    return replace(Names(), router="mlp.router", stacked_experts=stack)


GPT_OSS = Family("gpt_oss", read, names)
