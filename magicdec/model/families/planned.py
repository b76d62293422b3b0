"""Families whose layers nothing here computes, and whose configs `magicdec plan` reads: DeepSeek-V3
(latents) and V4 (compressed caches), Kimi Linear (latents, and a delta rule of its own), and Gemma
4 (global layers with other heads). State spaces are in `mamba_hybrids.py`, and other linear
attention in `hybrids.py`. Imports no torch.

A field that changes what a forward costs is read, or has one supported value; one that changes only
what it computes, such as how a router scores, is in `FREE`, since nothing here computes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from magicdec.model.config import ExpertsConfig, LayerKind
from magicdec.model.families.config_keys import FOREIGN
from magicdec.model.families.family import Family
from magicdec.model.families.fields import (
    ConfigFields,
    activation,
    only,
    shown,
    size,
    switch,
)
from magicdec.model.families.gpt_oss import MXFP4_BYTES
from magicdec.model.families.rope_fields import rope
from magicdec.model.families.windows import FULL, SLIDING
from magicdec.model.mixers import (
    CompressedAttention,
    KimiDeltaAttention,
    LatentAttention,
    OtherAttention,
)

# What changes how an output is computed, and not which bytes are read nor how much is computed.
FREE = {
    "deepseek": (
        "routed_scaling_factor",
        "n_group",
        "topk_group",
        "norm_topk_prob",
        "rope_interleave",
        "scoring_func",
        "topk_method",
        "seq_aux",
        "aux_loss_alpha",
        "ep_size",
        "qk_head_dim",
    ),
    "deepseek4": (
        "routed_scaling_factor",
        "norm_topk_prob",
        "scoring_func",
        "topk_method",
        "rope_theta",
        "swiglu_limit",
        "hc_sinkhorn_iters",
        "hc_eps",
        "rope_scaling",
        "rope_parameters",
        "qk_rope_head_dim",
        "partial_rotary_factor",
        "compress_rope_theta",
        "num_hash_layers",
        "router_jitter_noise",
        "mlp_layer_types",
    ),
    "kimi_linear": (
        "routed_scaling_factor",
        "n_group",
        "num_expert_group",
        "topk_group",
        "use_grouped_topk",
        "norm_topk_prob",
        "moe_renormalize",
        "moe_router_activation_func",
        "head_dim",
        "qk_head_dim",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "mla_use_nope",
    ),
    "gemma4": ("final_logit_softcapping", "vocab_size_per_layer_input"),
    "nemotron_h": (
        "routed_scaling_factor",
        "n_group",
        "topk_group",
        "norm_topk_prob",
        "moe_shared_expert_overlap",
        "norm_eps",
        "chunk_size",
        "expand",
        "time_step_min",
        "time_step_max",
        "time_step_floor",
        "time_step_limit",
        "time_step_rank",
        "rescale_prenorm_residual",
        "residual_in_fp32",
        "num_logits_to_keep",
        "use_mamba_kernels",
        "mtp_layers_block_type",
        "mtp_hybrid_override_pattern",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
    ),
    "granite_hybrid": (
        "embedding_multiplier",
        "logits_scaling",
        "residual_multiplier",
        "attention_multiplier",
        "mamba_chunk_size",
        "time_step_limit",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "normalization_function",
    ),
}
# Layers that draft further tokens, which a plan takes for a draft head and does not count here.
NEXT_TOKENS = (
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
    "num_nextn_predict_layers",
    "num_mtp_layers",
)
LINEAR = "linear_attention"
# Of Kimi Linear, within its table of linear attention: the layers of both kinds, and the sizes,
# with what transformers calls each beside the table, and its default.
KDA_LAYERS = ("full_attn_layers", "kda_layers")
KDA_SIZES = {
    "num_heads": ("linear_num_heads", 32),
    "head_dim": ("linear_head_dim", 128),
    "short_conv_kernel_size": ("linear_conv_kernel_dim", 4),
}
SCALE_BYTES = 4  # of a block of FP8 weights
SMALL_SCALE = "ue8m0"  # the format of scales that have one byte
# The settings of such weights. Others, as of a mixture with NVFP4, may say that they are narrower.
BLOCK_SETTINGS = ("quant_method", "weight_block_size", "activation_scheme", "fmt", "scale_fmt")
# Tokens of an entry, where some are chosen and where all are read.
SPARSE_RATE = 4
DENSE_RATE = 128


def free(raw: ConfigFields, family: str) -> None:
    for field in (*FREE[family], *NEXT_TOKENS):
        raw.get(field)


def common(raw: ConfigFields, num_layers: int | None = None) -> dict[str, Any]:
    """Fields that all of these read alike. `num_layers` where the config need not state it."""
    only(raw, "attention_bias", False)
    return {
        "vocab_size": size(raw, "vocab_size"),
        "num_layers": size(raw, "num_hidden_layers", default=num_layers),
        "hidden_size": size(raw, "hidden_size"),
        "num_heads": size(raw, "num_attention_heads"),
        "max_position_embeddings": size(raw, "max_position_embeddings", "model_max_length"),
        "norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "tie_word_embeddings": switch(raw, "tie_word_embeddings", False),
    }


def types_of_layers(
    raw: ConfigFields, known: Sequence[str], interval: int, otherwise: str
) -> list[str]:
    """`layer_types`, or without it every `interval`-th layer full and the others `otherwise`."""
    num_layers = size(raw, "num_hidden_layers")
    stated = raw.get("layer_types")
    if stated is None:
        return [otherwise if (layer + 1) % interval else FULL for layer in range(num_layers)]
    if not isinstance(stated, list) or len(stated) != num_layers:
        raise ValueError(
            f"layer_types {shown(stated)} is no list of {num_layers} types, one for each layer "
            "(num_hidden_layers)"
        )
    odd = next((name for name in stated if name not in known), None)
    if odd is not None:
        raise ValueError(f"layer_types: {odd!r} is not counted; choose from {', '.join(known)}")
    return [str(name) for name in stated]


def uncounted_quantization(raw: ConfigFields) -> None:
    if raw.get(FOREIGN):
        raise ValueError(
            f"{FOREIGN} {shown(raw[FOREIGN])}: the bytes of these weights are not counted; name "
            "the checkpoint in bfloat16, and --target_dtype int8 if it shall be narrower"
        )


def read_deepseek(raw: ConfigFields) -> dict[str, Any]:
    free(raw, "deepseek")
    only(raw, "hidden_act", "silu")
    only(raw, "moe_layer_freq", 1)
    fields = common(raw)
    num_heads = fields["num_heads"]
    mixer = latents(raw, num_heads, q_rank=1536)
    only(raw, "head_dim", mixer.rope_dim)  # as transformers writes it
    num_dense = dense_layers(raw, fields["num_layers"], default=3)
    width = size(raw, "moe_intermediate_size", default=2048)
    experts = ExpertsConfig(
        size(raw, "n_routed_experts", "num_local_experts", default=256),
        size(raw, "num_experts_per_tok", default=8),
        width,
        shared_width=width * size(raw, "n_shared_experts", default=1),
    )
    kinds = [LayerKind(has_mlp=n < num_dense, mixer=mixer) for n in range(fields["num_layers"])]
    return fields | {
        "intermediate_size": size(raw, "intermediate_size", default=18432),
        "num_kv_heads": num_heads,
        "head_dim": mixer.plain_dim + mixer.rope_dim,
        "rope": rope(raw),
        "layer_kinds": tuple(kinds),
        "experts": experts,
        "stored_bytes": block_bytes(raw.get(FOREIGN)),
        "planned_only": "kv_lora_rank (multi-head latent attention) and n_shared_experts",
    }


def latents(raw: ConfigFields, num_heads: int, q_rank: int | None) -> LatentAttention:
    """Multi-head latent attention; `q_rank` where the config does not state one."""
    only(raw, "num_key_value_heads", num_heads)
    stated_rank = raw.get("q_lora_rank", q_rank)
    return LatentAttention(
        num_heads,
        None if stated_rank is None else size(raw, "q_lora_rank", default=q_rank),
        size(raw, "kv_lora_rank", default=512),
        size(raw, "qk_nope_head_dim", default=128),
        size(raw, "qk_rope_head_dim", default=64),
        size(raw, "v_head_dim", default=128),
    )


def read_kimi_linear(raw: ConfigFields) -> dict[str, Any]:
    """Kimi Delta Attention in most layers and latents in the others. Published configs number the
    layers of each kind from 1, within `linear_attn_config`."""
    uncounted_quantization(raw)
    free(raw, "kimi_linear")
    only(raw, "hidden_act", "silu")
    only(raw, "moe_layer_freq", 1)
    fields = common(raw)
    num_layers = fields["num_layers"]
    mixer = latents(raw, fields["num_heads"], q_rank=None)
    table = raw.get("linear_attn_config") or {}
    if not isinstance(table, dict):
        raise ValueError(f"linear_attn_config {shown(table)} is not a JSON object")
    if unread := set(table) - {*KDA_SIZES, *KDA_LAYERS}:
        raise ValueError(f"linear_attn_config: {', '.join(sorted(unread))} is not counted")
    stated = ConfigFields(table)
    linear = KimiDeltaAttention(
        *(
            size(stated, name, default=size(raw, other, default=otherwise))
            for name, (other, otherwise) in KDA_SIZES.items()
        )
    )
    full_layers = layers_with_latents(raw, table)
    num_dense = dense_layers(raw, num_layers, default=1)
    mlps = raw.get("mlp_layer_types")
    if mlps not in (None, ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense)):
        raise ValueError(
            f"mlp_layer_types {shown(mlps)} has other layers without experts than the first "
            f"{num_dense} (first_k_dense_replace), which is not counted"
        )
    width = size(raw, "moe_intermediate_size", default=1024)
    experts = ExpertsConfig(
        size(raw, "num_experts", "num_local_experts", default=256),
        size(raw, "num_experts_per_token", "num_experts_per_tok", default=8),
        width,
        shared_width=width * size(raw, "num_shared_experts", "n_shared_experts", default=1),
    )
    kinds = [
        LayerKind(has_mlp=n < num_dense, mixer=mixer if n in full_layers else linear)
        for n in range(num_layers)
    ]
    return fields | {
        "intermediate_size": size(raw, "intermediate_size", default=9216),
        "num_kv_heads": fields["num_heads"],
        "head_dim": mixer.plain_dim + mixer.rope_dim,
        "layer_kinds": tuple(kinds),
        "experts": experts,
        "planned_only": "linear_attn_config (Kimi Delta Attention) and kv_lora_rank (latents)",
    }


def dense_layers(raw: ConfigFields, num_layers: int, default: int) -> int:
    """How many of the first layers have no experts."""
    found = raw.get("first_k_dense_replace", default)
    if type(found) is not int or not 0 <= found <= num_layers:
        raise ValueError(f"first_k_dense_replace {shown(found)} is no number of layers")
    return found


def layers_with_latents(raw: ConfigFields, table: Mapping[str, Any]) -> set[int]:
    """By `layer_types`, or by the numbers from 1 on that the `table` has of layers of each kind; as
    in transformers, the first are taken of both, and without either every fourth after the first
    layer."""
    num_layers = size(raw, "num_hidden_layers")
    if raw.get("layer_types") is not None:
        types = types_of_layers(raw, (LINEAR, FULL), 4, LINEAR)
        return {n for n, kind in enumerate(types) if kind == FULL}
    full, linear = (table.get(name) for name in KDA_LAYERS)
    if full is None and linear is None:
        return {*range(4, num_layers, 4)}
    numbers = [n for part in (full, linear) if isinstance(part, list) for n in part]
    if not all(type(n) is int for n in numbers) or sorted(numbers) != [*range(1, num_layers + 1)]:
        raise ValueError(
            f"linear_attn_config: {' and '.join(KDA_LAYERS)} are not the numbers 1 to "
            f"{num_layers}, each once"
        )
    return {number - 1 for number in full or ()}


def block_bytes(table: Any) -> float | None:
    """Bytes of a weight in FP8 with a scale for each block; None without quantisation. Raises
    ValueError for another quantisation."""
    if not table:
        return None
    block = table.get("weight_block_size")
    is_fp8 = table.get("quant_method") == "fp8"
    other = {field: table[field] for field in table if table[field] and field not in BLOCK_SETTINGS}
    is_block = isinstance(block, list) and all(type(n) is int and n > 0 for n in block)
    if not (is_fp8 and is_block and len(block) == 2) or other:
        raise ValueError(
            f"{FOREIGN} {shown(other if is_fp8 and other else table)}: the bytes of these weights "
            "are not counted; choose fp8 with a weight_block_size for all of them, or no "
            "quantisation"
        )
    scale = 1 if table.get("scale_fmt") == SMALL_SCALE else SCALE_BYTES
    return 1 + scale / (block[0] * block[1])


def read_deepseek_v4(raw: ConfigFields) -> dict[str, Any]:
    """Every layer has experts. `compress_ratios` may go on with the layers that draft."""
    free(raw, "deepseek4")
    only(raw, "hidden_act", "silu")
    only(raw, "num_key_value_heads", 1)
    fields = common(raw)
    sizes = {
        "num_heads": fields["num_heads"],
        "head_dim": size(raw, "head_dim", default=512),
        "q_rank": size(raw, "q_lora_rank", default=1024),
        "num_groups": size(raw, "o_groups", default=8),
        "group_rank": size(raw, "o_lora_rank", default=1024),
        "window": size(raw, "sliding_window", default=128),
        "index_heads": size(raw, "index_n_heads", default=64),
        "index_dim": size(raw, "index_head_dim", default=128),
        "streams": size(raw, "hc_mult", default=4),
    }
    num_chosen = size(raw, "index_topk", default=512)
    rates = raw["compress_ratios"]
    num_layers = fields["num_layers"]
    is_known = isinstance(rates, list) and len(rates) >= num_layers
    if not is_known or not set(rates) <= {0, DENSE_RATE, SPARSE_RATE}:
        raise ValueError(
            f"compress_ratios {shown(rates)} is no list of 0, {SPARSE_RATE} or {DENSE_RATE} for "
            f"each of {num_layers} layers"
        )
    mixers = [
        CompressedAttention(
            **sizes,
            rate=rate,
            num_chosen=num_chosen if rate == SPARSE_RATE else 0,
            joins_streams=layer == num_layers - 1,
        )
        for layer, rate in enumerate(rates[:num_layers])
    ]
    width = size(raw, "moe_intermediate_size", default=2048)
    only(raw, "expert_dtype", "fp4")
    stored = block_bytes(raw.get(FOREIGN))
    experts = ExpertsConfig(
        size(raw, "n_routed_experts", "num_local_experts", default=256),
        size(raw, "num_experts_per_tok", default=6),
        width,
        shared_width=width * size(raw, "n_shared_experts", default=1),
        stored_bytes=None if stored is None or raw.get("expert_dtype") is None else MXFP4_BYTES,
    )
    return fields | {
        "intermediate_size": width,
        "num_kv_heads": 1,
        "head_dim": sizes["head_dim"],
        "layer_kinds": tuple(LayerKind(mixer=mixer) for mixer in mixers),
        "experts": experts,
        "stored_bytes": stored,
        "planned_only": "compress_ratios (compressed attention), n_shared_experts and hc_mult",
    }


def read_gemma4(raw: ConfigFields) -> dict[str, Any]:
    """Gemma 4 without per-layer embeddings, shared caches and experts, as its 31B is."""
    uncounted_quantization(raw)
    free(raw, "gemma4")
    if size_or_zero(raw, "hidden_size_per_layer_input", default=256):
        raise ValueError(
            f"hidden_size_per_layer_input {shown(raw['hidden_size_per_layer_input'])} (per-layer "
            "embeddings) is neither computed nor counted by `magicdec plan`; choose 0, as Gemma 4 "
            "31B has"
        )
    only(raw, "num_kv_shared_layers", 0)
    only(raw, "enable_moe_block", False)
    only(raw, "use_double_wide_mlp", False)
    only(raw, "use_bidirectional_attention", "vision")  # which text does not see
    for field in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        only(raw, field, None)
    fields = common(raw)
    *types, _ = types_of_layers(raw, (SLIDING, FULL), 6, SLIDING)
    types.append(FULL)  # the last one, whatever is stated
    head_dim = size(raw, "head_dim", default=256)
    num_kv_heads = size(raw, "num_key_value_heads", default=4)
    shares = switch(raw, "attention_k_eq_v", False)
    num_global = size(raw, "num_global_key_value_heads", default=num_kv_heads)
    full = OtherAttention(
        fields["num_heads"],
        num_global if shares else num_kv_heads,
        size(raw, "global_head_dim", default=512),
        projects_values=not shares,
    )
    window = size(raw, "sliding_window", default=512)
    sliding = LayerKind(window)
    raw.get("rope_parameters")  # of both kinds of layers; no length follows from it
    return fields | {
        "intermediate_size": size(raw, "intermediate_size"),
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "layer_kinds": tuple(
            sliding if kind == SLIDING else LayerKind(mixer=full) for kind in types
        ),
        "activation": activation(raw, "hidden_activation", "gelu_pytorch_tanh"),
        "tie_word_embeddings": switch(raw, "tie_word_embeddings", True),
        "qk_norm": True,
        "post_norms": True,
        "planned_only": "global_head_dim (layers whose heads differ in size)",
    }


def size_or_zero(raw: ConfigFields, field: str, default: int) -> int:
    return 0 if raw.get(field, default) == 0 else size(raw, field, default=default)


DEEPSEEK_V3 = Family("deepseek_v3", read_deepseek)
DEEPSEEK_V4 = Family("deepseek_v4", read_deepseek_v4)
KIMI_LINEAR = Family("kimi_linear", read_kimi_linear)
GEMMA4 = Family("gemma4_text", read_gemma4)
