"""Models with linear attention (Gated DeltaNet, arXiv 2412.06464) in most layers and gated
attention in the others: Qwen3.5 and 3.6, dense and mixtures, and Qwen3-Next, which is a mixture.
Imports no torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from magicdec.model.config import ExpertsConfig, LayerKind, ModelConfig, RopeConfig
from magicdec.model.families.family import ExpertStack, Family, MtpNames, Names
from magicdec.model.families.fields import ConfigFields, only, size, switch
from magicdec.model.families.planned import (
    LINEAR,
    NEXT_TOKENS,
    common,
    types_of_layers,
    uncounted_quantization,
)
from magicdec.model.families.rope_fields import rope, rope_table
from magicdec.model.families.windows import FULL
from magicdec.model.mixers import LinearAttention

# Of a rotary embedding with places in images, which for text are the places in the text.
IMAGE_ROPE = ("mrope_section", "mrope_interleaved")


def partial_rope(raw: ConfigFields, head_dim: int, share: float) -> RopeConfig:
    """The rotary embedding of a share of a head's dimensions."""
    table = dict(rope_table(raw))
    for field in IMAGE_ROPE:
        table.pop(field, None)
    stated = [raw.get("partial_rotary_factor"), table.pop("partial_rotary_factor", None)]
    shares = {float(share_of_layer) for share_of_layer in stated if share_of_layer is not None} or {
        share
    }
    if len(shares) > 1:
        raise ValueError(f"partial_rotary_factor is stated twice: {sorted(shares)}")
    base = {"rope_theta": raw.get("rope_theta"), "rope_parameters": table}
    base["max_position_embeddings"] = size(raw, "max_position_embeddings")
    return replace(rope(ConfigFields(base)), rotary_dim=int(shares.pop() * head_dim))


def read_qwen(raw: ConfigFields) -> dict[str, Any]:
    """Three layers of linear attention, then one of gated attention, and the number of those of
    the head for multi-token prediction."""
    uncounted_quantization(raw)
    for field in NEXT_TOKENS:
        raw.get(field)
    only(raw, "hidden_act", "silu")
    only(raw, "attn_output_gate", True)
    only(raw, "output_gate_type", "swish")  # that of linear attention, which its config calls so
    only(raw, "mamba_ssm_dtype", "float32")
    only(raw, "mlp_only_layers", [])
    fields = common(raw)
    types = types_of_layers(
        raw, (LINEAR, FULL), size(raw, "full_attention_interval", default=4), LINEAR
    )
    head_dim = size(raw, "head_dim", default=256)
    num_kv_heads = size(raw, "num_key_value_heads", default=4)
    linear = LinearAttention(
        size(raw, "linear_num_key_heads", default=16),
        size(raw, "linear_num_value_heads", default=32),
        size(raw, "linear_key_head_dim", default=128),
        size(raw, "linear_value_head_dim", default=128),
        size(raw, "linear_conv_kernel_dim", default=4),
    )
    if linear.num_value_heads % linear.num_key_heads:
        raise ValueError(
            f"linear_num_value_heads {linear.num_value_heads} is not a multiple of "
            f"linear_num_key_heads {linear.num_key_heads}"
        )
    mixer_of = {LINEAR: linear, FULL: None}
    return fields | {
        "intermediate_size": size(raw, "intermediate_size", default=1),
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rope": partial_rope(raw, head_dim, share=0.25),
        "layer_kinds": tuple(LayerKind(mixer=mixer_of[kind]) for kind in types),
        "qk_norm": True,
        "gated_attention": True,
        "num_mtp_layers": mtp_layers(raw),
    }


def mtp_layers(raw: ConfigFields) -> int:
    """One where the config does not say it, as in some of Qwen3-Next."""
    fields = "mtp_num_hidden_layers", "num_nextn_predict_layers"
    if any(raw.get(field) == 0 for field in fields):
        return 0
    return size(raw, *fields, default=1)


def read_dense(raw: ConfigFields) -> dict[str, Any]:
    return read_qwen(raw) | {"intermediate_size": size(raw, "intermediate_size", default=12288)}


def read_mixture(raw: ConfigFields) -> dict[str, Any]:
    """Every layer has experts, and an MLP for all tokens with a gate of its own."""
    only(raw, "decoder_sparse_step", 1)
    experts = ExpertsConfig(
        size(raw, "num_experts", "num_local_experts"),
        size(raw, "num_experts_per_tok"),
        size(raw, "moe_intermediate_size"),
        renormalises=switch(raw, "norm_topk_prob", True),
        shared_width=size(raw, "shared_expert_intermediate_size"),
        has_shared_gate=True,
    )
    return read_qwen(raw) | {"experts": experts}


def read_mixture_3_5(raw: ConfigFields) -> dict[str, Any]:
    only(raw, "norm_topk_prob", True)
    return read_mixture(raw)


def names(config: ModelConfig) -> Names:
    """Of a model that also sees, the text has a place of its own."""
    text = Names(norm_offset=1.0, stacked_experts=ExpertStack())
    if not config.architecture.endswith("ForConditionalGeneration"):
        return text
    body = "model.language_model."
    return replace(
        text,
        embedding=f"{body}embed_tokens",
        norm=f"{body}norm",
        layer=f"{body}layers.{{}}.",
    )


def next_names(config: ModelConfig) -> Names:
    return Names(norm_offset=1.0, linear_by_key_head=True)


OTHER_PARTS = ("model.visual.", MtpNames.prefix)
QWEN3_5 = Family("qwen3_5_text", read_dense, names, other_parts=OTHER_PARTS)
QWEN3_5_MOE = Family("qwen3_5_moe_text", read_mixture_3_5, names, other_parts=OTHER_PARTS)
QWEN3_NEXT = Family("qwen3_next", read_mixture, next_names, other_parts=OTHER_PARTS)
