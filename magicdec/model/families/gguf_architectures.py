"""The architectures of GGUF files (`general.architecture`): what each says beside the keys that all
have, as fields of a Hugging Face config. What a file leaves out is what llama.cpp takes for it
(src/models/*.cpp there). Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from magicdec.model.families.windows import FULL, SLIDING
from magicdec.model.gguf.file import GgufFile

Keys = Mapping[str, Any]
"""The metadata of an architecture, without its name before them."""
HfFields = dict[str, Any]
"""HfFields of a config.json."""

STACKED = re.compile(r"^blk\.\d+\.ffn_(gate|up|down)_exps\.(weight|bias)$")
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


@dataclass(frozen=True)
class Architecture:
    """An architecture whose tensors have Llama's roles. `is_permuted`: the rows of q and k are in
    the order of adjacent pairs. `fields`: of the config.json, beside or in place of `known` ones.
    `keys`: those that `fields` reads; `neutral`: values of others that change nothing.
    `mlp_norm`: the name of the norm before the MLP."""

    name: str
    model_type: str
    is_permuted: bool
    fields: Callable[[GgufFile, Keys, HfFields], HfFields]
    keys: frozenset[str] = frozenset()
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: NO_EXPERTS)
    mlp_norm: str = "ffn_norm"


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
            expert_shape = (hidden, width) if match[1] == "down" else (width, hidden)
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
