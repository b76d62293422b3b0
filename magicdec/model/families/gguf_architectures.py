"""The architectures of GGUF files (`general.architecture`): what each says beside the keys that all
have, as fields of a Hugging Face config. What a file leaves out is what llama.cpp takes for it
(src/models/*.cpp there). Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from magicdec.model.families.hybrids import LINEAR
from magicdec.model.families.windows import FULL, SLIDING
from magicdec.model.gguf.file import GgufFile

Keys = Mapping[str, Any]
"""The metadata of an architecture, without its name before them."""
HfFields = dict[str, Any]
"""HfFields of a config.json."""

STACKED = re.compile(r"^blk\.\d+\.ffn_(gate|up|gate_up|down)_exps\.(weight|bias)$")
EXPERTS = frozenset({"expert_count", "expert_used_count", "expert_feed_forward_length"})
# Values of keys of mixtures under which llama.cpp computes what is computed here: the softmax of
# all experts, of which the best are divided by their sum.
PLAIN_EXPERTS: dict[str, tuple[Any, ...]] = {
    "expert_gating_func": (1,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "leading_dense_block_count": (0,),
}
NO_EXPERTS: dict[str, tuple[Any, ...]] = {"expert_count": (0,), "expert_used_count": (0,)}
GEMMA3_KEYS = frozenset(
    {"attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"}
)
GPT_OSS_PATTERN = 2  # one of so many layers sees all tokens
GPT_OSS_KEYS = EXPERTS | {"attention.sliding_window", "attention.sliding_window_pattern"}
# Its gate is the softmax of the experts that are used.
SOFTMAX_OF_USED = PLAIN_EXPERTS | {"expert_gating_func": (3,)}
GEMMA3_PATTERN = 6  # one of so many layers sees all tokens
GEMMA3_LOCAL_BASE = 10000.0
GEMMA3_27B_LAYERS = 62  # the only model whose scores are not divided by the root of the head size
# Of models with linear attention.
NEXTN = re.compile(r"^blk\.(\d+)\.nextn\.")
LINEAR_FIELDS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
SHARED_WIDTH = "expert_shared_feed_forward_length"
HYBRID_KEYS = frozenset(LINEAR_FIELDS) | {
    "ssm.inner_size",
    "full_attention_interval",
    "attention.recurrent_layers",
    "nextn_predict_layers",
    "rope.dimension_count",
    "rope.dimension_sections",
}
HYBRID_MIXTURE_KEYS = HYBRID_KEYS | EXPERTS | {SHARED_WIDTH}


@dataclass(frozen=True)
class Architecture:
    """An architecture whose tensors have Llama's roles. `is_permuted`: the rows of q and k are in
    the order of adjacent pairs. `fields`: of the config.json, beside or in place of `known` ones.
    `keys`: those that `fields` reads; `neutral`: values of others that change nothing.
    `mlp_norm`: the name of the norm before the MLP. `has_tiled_heads`: the value heads of linear
    attention are in the order of ggml's broadcast, the first of each key head, then the second."""

    name: str
    model_type: str
    is_permuted: bool
    fields: Callable[[GgufFile, Keys, HfFields], HfFields]
    keys: frozenset[str] = frozenset()
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: NO_EXPERTS)
    mlp_norm: str = "ffn_norm"
    has_tiled_heads: bool = False


def llama_fields(file: GgufFile, own: Keys, known: HfFields) -> HfFields:
    """Mistral's files are Llama's too."""
    names = [f"blk.0.attn_{name}.bias" for name in ("q", "k", "v", "output")]
    has_bias = [name in file.tensors for name in names]
    if any(has_bias) and not all(has_bias):
        found = ", ".join(name for name, there in zip(names, has_bias, strict=True) if there)
        raise ValueError(f"of the biases of attention it has only {found}")
    return {"attention_bias": all(has_bias), "mlp_bias": "blk.0.ffn_down.bias" in file.tensors}


def qwen3_fields(file: GgufFile, own: Keys, known: HfFields) -> HfFields:
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors}


def mixtral_fields(file: GgufFile, own: Keys, known: HfFields) -> HfFields:
    """Experts are as wide as Llama's MLP."""
    width = known["intermediate_size"]
    stated = own.get("expert_feed_forward_length", width)
    if stated != width:
        raise ValueError(f"expert_feed_forward_length {stated} is not feed_forward_length {width}")
    num_experts, num_used = expert_counts(file, own, known, width)
    return {"num_local_experts": num_experts, "num_experts_per_tok": num_used}


def qwen3_moe_fields(file: GgufFile, own: Keys, known: HfFields) -> HfFields:
    """Every layer has experts, and their weights always add up to one."""
    used = own["expert_used_count"]
    width = own.get("expert_feed_forward_length")
    if width is None:
        width = known["intermediate_size"] // max(used, 1)
    num_experts, num_used = expert_counts(file, own, known, width)
    return {
        "intermediate_size": known.get("intermediate_size", width),
        "moe_intermediate_size": width,
        "num_experts": num_experts,
        "num_experts_per_tok": num_used,
        "norm_topk_prob": True,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }


def expert_counts(file: GgufFile, own: Keys, known: HfFields, width: int) -> tuple[int, int]:
    """The experts of a layer and of a token. Raises ValueError if a tensor of experts has another
    shape than the metadata say."""
    count = own["expert_count"]
    hidden = known["hidden_size"]
    if (first := "blk.0.ffn_down_exps.weight") not in file.tensors:
        raise KeyError(first)
    for name, tensor in file.tensors.items():
        if match := STACKED.match(name):
            outputs = 2 * width if match[1] == "gate_up" else width
            expert_shape = (hidden, width) if match[1] == "down" else (outputs, hidden)
            expected = (count, *expert_shape[: 1 if match[2] == "bias" else 2])
            if tensor.shape != expected:
                raise ValueError(
                    f"tensor {name} has shape {tensor.shape}, but expert_count {count}, the "
                    f"experts' width {width} and embedding_length {hidden} make {expected}"
                )
    return count, own["expert_used_count"]


def gpt_oss_fields(file: GgufFile, own: Keys, known: HfFields) -> HfFields:
    """The first of two layers has the window. llama.cpp cuts YaRN's bounds to whole dimensions; the
    model was trained without that, and is computed so."""
    num_layers = known["num_hidden_layers"]
    width = own.get("expert_feed_forward_length", known.get("intermediate_size"))
    num_experts, num_used = expert_counts(file, own, known, width)
    pattern = own.get("attention.sliding_window_pattern", GPT_OSS_PATTERN)
    scaling = known["rope_scaling"]
    if scaling is None or scaling["rope_type"] != "yarn":
        raise ValueError("rope.scaling.type of gpt-oss is not yarn")
    return {
        "intermediate_size": width,
        "num_local_experts": num_experts,
        "num_experts_per_tok": num_used,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "sliding_window": own["attention.sliding_window"],
        "layer_types": layer_types(pattern, num_layers),
        "rope_scaling": scaling | {"truncate": False},
    }


def gemma3_fields(file: GgufFile, own: Keys, known: HfFields) -> HfFields:
    """Without a window, all layers see all tokens."""
    num_layers = known["num_hidden_layers"]
    head_dim = known["head_dim"]
    window = own.get("attention.sliding_window", 0)
    pattern = own.get("attention.sliding_window_pattern", GEMMA3_PATTERN)
    scaling = known["rope_scaling"] or {}
    if scaling.get("rope_type", "linear") != "linear":
        raise ValueError(f"rope type {scaling['rope_type']} of gemma3 is not read; linear is")
    base = float(np.float32(own.get("rope.freq_base_swa", GEMMA3_LOCAL_BASE)))
    is_27b = num_layers == GEMMA3_27B_LAYERS
    scalar = known["hidden_size"] // known["num_attention_heads"] if is_27b else head_dim
    return {
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": window or None,
        "layer_types": layer_types(pattern if window else [False] * num_layers, num_layers),
        "rope_scaling": None,
        "rope_parameters": {
            FULL: {"rope_type": "default"} | scaling | {"rope_theta": known["rope_theta"]},
            SLIDING: {"rope_type": "default", "rope_theta": base},
        },
    }


def layer_types(pattern: Any, num_layers: int) -> list[str]:
    """By a pattern that says of each layer whether it has a window, or of how many layers the last
    has none; 0: all have one."""
    if isinstance(pattern, list):
        if len(pattern) != num_layers:
            raise ValueError(
                f"attention.sliding_window_pattern has {len(pattern)} values for {num_layers} "
                "layers"
            )
        slides = [bool(flag) for flag in pattern]
    else:
        slides = [pattern == 0 or layer % pattern < pattern - 1 for layer in range(num_layers)]
    return [SLIDING if is_sliding else FULL for is_sliding in slides]


def hybrid_fields(file: GgufFile, own: Keys, known: HfFields) -> HfFields:
    """Of Qwen3.5 and its mixtures. The layers of the head for multi-token prediction are counted
    among the blocks, behind the model's."""
    num_blocks = known["num_hidden_layers"]
    num_mtp_layers = own.get("nextn_predict_layers", 0)
    if not 0 <= num_mtp_layers < num_blocks:
        raise ValueError(
            f"nextn_predict_layers {num_mtp_layers} of block_count {num_blocks} leave no layers"
        )
    num_layers = num_blocks - num_mtp_layers
    behind = {int(found[1]) for name in file.tensors if (found := NEXTN.match(name))}
    if odd := behind - set(range(num_layers, num_blocks)):
        raise ValueError(
            f"tensors blk.{min(odd)}.nextn.* are those of a head for multi-token prediction, but "
            f"block_count {num_blocks} and nextn_predict_layers {num_mtp_layers} say otherwise"
        )
    heads = own["ssm.time_step_rank"]
    inner = own["ssm.inner_size"]
    if inner % max(heads, 1):
        raise ValueError(f"ssm.inner_size {inner} is no multiple of ssm.time_step_rank {heads}")
    rotated = own.get("rope.dimension_count", known["head_dim"])
    check_sections(own.get("rope.dimension_sections"), rotated)
    types = own.get("attention.recurrent_layers")
    if types is not None:
        types = recurrent_types(types, num_blocks, num_layers)
    table = {"rope_type": "default"} | (known["rope_scaling"] or {})
    table |= {"rope_theta": known["rope_theta"]}
    return {field: own[key] for key, field in LINEAR_FIELDS.items()} | {
        "num_hidden_layers": num_layers,
        "mtp_num_hidden_layers": num_mtp_layers,
        "linear_value_head_dim": inner // max(heads, 1),
        "layer_types": types,
        "full_attention_interval": own.get("full_attention_interval"),
        "rope_scaling": None,
        "rope_parameters": table | {"partial_rotary_factor": rotated / known["head_dim"]},
    }


def hybrid_mixture_fields(file: GgufFile, own: Keys, known: HfFields) -> HfFields:
    """Also of Qwen3-Next, whose file has the tensors of linear attention apart as Qwen3.5 has
    them, and which computes the same: weights of experts always add up to one."""
    width = own["expert_feed_forward_length"]
    num_experts, num_used = expert_counts(file, own, known, width)
    return hybrid_fields(file, own, known) | {
        "intermediate_size": None,
        "num_experts": num_experts,
        "num_experts_per_tok": num_used,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": own[SHARED_WIDTH],
    }


def recurrent_types(flags: Any, num_blocks: int, num_layers: int) -> list[str]:
    """By a list that says of each block whether it has linear attention."""
    if not isinstance(flags, list) or len(flags) != num_blocks:
        raise ValueError(f"attention.recurrent_layers has no value for each of {num_blocks} blocks")
    if any(flags[num_layers:]):
        raise ValueError(
            "attention.recurrent_layers says that a layer of the head for multi-token prediction "
            "has linear attention"
        )
    return [LINEAR if is_recurrent else FULL for is_recurrent in flags[:num_layers]]


def check_sections(sections: Any, rotated: int) -> None:
    """Raise ValueError unless each pair of rotated dimensions has one of a token's places in time,
    height and width, which are equal in a text: llama.cpp takes others' place for 0."""
    if sections is None:
        return
    total = sum(sections)
    for pair in range(rotated // 2):
        section = pair % max(total, 1)
        if len(sections) < 3 or section >= 3 * sections[section % 3]:
            raise ValueError(
                f"rope.dimension_sections {sections} leave pair {pair} of {rotated} rotated "
                "dimensions without a token's place"
            )


QWEN35_MIXTURE = Architecture(
    "Qwen3_5MoeForCausalLM",
    "qwen3_5_moe_text",
    False,
    hybrid_mixture_fields,
    HYBRID_MIXTURE_KEYS,
    PLAIN_EXPERTS,
    mlp_norm="post_attention_norm",
    has_tiled_heads=True,
)
# By `general.architecture`.
ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", True, llama_fields),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", False, lambda file, own, known: {}),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", False, qwen3_fields),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM", "qwen3_moe", False, qwen3_moe_fields, EXPERTS, PLAIN_EXPERTS
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        "gpt_oss",
        False,
        gpt_oss_fields,
        GPT_OSS_KEYS,
        SOFTMAX_OF_USED,
        mlp_norm="post_attention_norm",
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        False,
        gemma3_fields,
        GEMMA3_KEYS,
        {"final_logit_softcapping": (0.0,)},
    ),
    "qwen35": Architecture(
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        False,
        hybrid_fields,
        HYBRID_KEYS,
        mlp_norm="post_attention_norm",
        has_tiled_heads=True,
    ),
    "qwen35moe": QWEN35_MIXTURE,
    "qwen3next": replace(QWEN35_MIXTURE, has_tiled_heads=False),
}
# Files of Mixtral are Llama's with experts.
MIXTRAL = Architecture(
    "MixtralForCausalLM", "mixtral", True, mixtral_fields, EXPERTS, PLAIN_EXPERTS
)


def architecture_of(file: GgufFile) -> Architecture:
    found = ARCHITECTURES.get(file.architecture)
    if found is None:
        raise ValueError(
            f"general.architecture {file.architecture!r} is not read; those that are: "
            f"{', '.join(ARCHITECTURES)}"
        )
    return MIXTRAL if file.metadata.get("llama.expert_count") and found.is_permuted else found
