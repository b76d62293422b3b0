"""GGUF files of models with linear attention, as llama.cpp's converter writes them: logits, tokens
and tensors of transformers' models, heads for multi-token prediction, and files that lie. What the
converter does to a tensor is written here from its definition, row by row."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Command
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from test_gguf import MIXED, PLAIN, check_logits, refused, trained_bpe, vocabulary_of
from test_gguf_families import write_with
from tiny_gguf import name_of, random_blocks, write_gguf
from tiny_hybrids import PlainMtpHead, the_model
from torch import Tensor

from magicdec.bench.gguf_reference import values_of
from magicdec.bench.model_check import check_model
from magicdec.config.sections import KVSection
from magicdec.llm import LLM
from magicdec.model.checkpoint import checked
from magicdec.model.checkpoint.mtp_weights import find_mtp_head
from magicdec.model.checkpoint.source import find_model
from magicdec.model.families.gguf_config import load_gguf_config
from magicdec.model.families.hf_config import parse_hf_config, to_hf_config

VOCAB = 97
KEY_HEADS = 2
GROUP = 4  # value heads of a key head: more than key heads, so that two orders differ from one
KEY = 16
VALUE = 32  # a group of the types of blocks
SIZES = {
    "hidden_size": 256,
    "head_dim": 64,
    "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": KEY_HEADS * GROUP,
    "linear_key_head_dim": KEY,
    "linear_value_head_dim": VALUE,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2}
WIDTHS = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
# By architecture: transformers' class and its fields.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen35": ("Qwen3_5ForCausalLM", {"intermediate_size": 256}),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", WIDTHS),
    "qwen3next": ("Qwen3NextForCausalLM", WIDTHS),
}
PLAIN_PARTS = ("token_embd", "output", "ffn_gate_inp", "ffn_gate_inp_shexp", "ssm_conv1d")
MTP_NAMES = {
    "mtp.fc.weight": "nextn.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "mtp.norm.weight": "nextn.shared_head_norm.weight",
}


def a_model(architecture: str, **changes: Any) -> Any:
    kind, own = MODELS[architecture]
    return the_model(VOCAB, kind, **(SIZES | own | changes))


def keys_of(config: Any, **more: Any) -> dict[str, Any]:
    """What the converter says of a model, without the architecture's name."""
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "rope.dimension_count": config.head_dim // 4,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "full_attention_interval": 4,
    }
    if hasattr(config, "num_experts"):
        keys |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        }
    else:
        keys["feed_forward_length"] = config.intermediate_size
    if config.model_type != "qwen3_next":
        keys["rope.dimension_sections"] = [11, 11, 10, 0]
    return keys | {key.replace("__", "."): value for key, value in more.items()}


def tiled(config: Any, size: int, first: int = 0) -> list[int]:
    """For each stored row of value heads of `size` rows, which begin with the row `first`, the one
    of Hugging Face: ggml repeats all key heads one after the other, so that the value head j of
    the key head g is at place j * (number of key heads) + g."""
    keys = config.linear_num_key_heads
    group = config.linear_num_value_heads // keys
    rows = [0] * (keys * group * size)
    for g in range(keys):
        for j in range(group):
            for i in range(size):
                rows[(j * keys + g) * size + i] = first + (g * group + j) * size + i
    return rows


def by_key_head(config: Any) -> tuple[list[int], list[int]]:
    """Of Qwen3-Next's `in_proj_qkvz`, which has q, k, v and z of a key head beside each other: the
    rows of q of all heads, then of k, then of v; and those of z."""
    key = config.linear_key_head_dim
    group = config.linear_num_value_heads // config.linear_num_key_heads
    value = group * config.linear_value_head_dim
    found: dict[str, list[int]] = {part: [] for part in "qkvz"}
    row = 0
    for _ in range(config.linear_num_key_heads):
        for part, count in (("q", key), ("k", key), ("v", value), ("z", value)):
            found[part] += range(row, row + count)
            row += count
    return found["q"] + found["k"] + found["v"], found["z"]


def stored_parts(
    architecture: str, name: str, values: Tensor, config: Any, is_old: bool = False
) -> list[tuple[str, Tensor, list[int] | None, int]]:
    """The tensors that the converter makes of one: their names, what they are made of, and in which
    order of its rows (or columns, if the dimension is 1)."""
    end = name.partition("linear_attn.")[2]
    is_tiled = architecture != "qwen3next"
    ours = name.replace("dt_bias", "dt_proj.bias")
    if name.endswith("experts.gate_up_proj"):
        parts = zip(("gate", "up"), values.chunk(2, dim=1), strict=True)
        return [(name.replace("gate_up_proj", f"{p}_proj.weight"), v, None, 0) for p, v in parts]
    if name.endswith("experts.down_proj"):
        return [(f"{name}.weight", values, None, 0)]
    if end == "in_proj_qkvz.weight" and not is_old:
        qkv, z = by_key_head(config)
        names = [name.replace("qkvz", part) for part in ("qkv", "z")]
        return [(names[0], values, qkv, 0), (names[1], values, z, 0)]
    if end == "conv1d.weight":
        values = values[:, 0]
    if not is_tiled or not end or end == "norm.weight":
        return [(ours, values, None, 0)]
    num_keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    size = config.linear_value_head_dim
    if end in ("in_proj_qkv.weight", "conv1d.weight"):
        return [(ours, values, [*range(num_keys), *tiled(config, size, num_keys)], 0)]
    if end == "out_proj.weight":
        return [(ours, values, tiled(config, size), 1)]
    return [(ours, values, tiled(config, size if end == "in_proj_z.weight" else 1), 0)]


def save(
    path: Path,
    architecture: str,
    model: Any,
    types: tuple[Type, ...] = MIXED,
    head: PlainMtpHead | None = None,
    strings: dict[str, Any] | None = None,
    is_old: bool = False,
    **more: Any,
) -> None:
    """Write a model's file, with random blocks in matrices of quantised types, and give the model
    the weights that these stand for."""
    config = model.config
    stored: dict[str, Any] = {}
    parameters = [(name, p.data) for name, p in model.named_parameters()]
    num_layers = config.num_hidden_layers
    if head is not None:
        more = {"block_count": num_layers + 1, "nextn_predict_layers": 1} | more
        parameters += head_parameters(head)
    seed = 0
    for name, parameter in parameters:
        ours = name.replace("mtp.layers.0.", f"model.layers.{num_layers}.")
        for part, values, order, dim in stored_parts(architecture, ours, parameter, config, is_old):
            seed += 1
            if part in MTP_NAMES:
                known = f"blk.{num_layers}.{MTP_NAMES[part]}"
            else:
                known = name_of(architecture, part)
            if name.endswith("A_log"):
                known = known.removesuffix(".weight")
                values.copy_((values.exp()).log())
                stored[known] = (-values.exp()).numpy()
            if name.endswith("norm.weight") or "pre_fc_norm" in name:
                if "linear_attn" not in name:
                    values.copy_((values + 1) - 1)
                    stored[known] = (values + 1).numpy()
            if known not in stored:
                stored[known] = in_type(known, values, types[seed % len(types)], order, dim, seed)
            elif order is not None:
                stored[known] = stored[known][order]
    write_gguf(path, architecture, keys_of(config, **more), stored, strings)


def in_type(
    name: str, values: Tensor, kind: Type, order: list[int] | None, dim: int, seed: int
) -> Any:
    """What is stored of values, which become those that it stands for. Blocks are of the order in
    the file."""
    index = torch.arange(values.shape[dim]) if order is None else torch.tensor(order)
    if values.dim() == 1 or name.split(".")[-2] in PLAIN_PARTS:
        return values.index_select(dim, index).contiguous().numpy()
    if kind in PLAIN:
        blocks = quantize(values.index_select(dim, index).contiguous().numpy(), kind)
    else:
        shape = list(values.shape)
        shape[dim] = len(index)
        blocks = random_blocks(tuple(shape), kind, seed)
    values.index_copy_(dim, index, torch.from_numpy(dequantize(blocks, kind).copy()))
    return blocks, kind


def head_parameters(head: PlainMtpHead) -> list[tuple[str, Tensor]]:
    layer = {
        name.replace("model.", "mtp.", 1): parameter.data
        for name, parameter in head.layer.named_parameters()
        if name.startswith(("model.layers.", "model.norm."))
    }
    return [
        *layer.items(),
        ("mtp.fc.weight", head.fc),
        ("mtp.pre_fc_norm_embedding.weight", head.token_norm),
        ("mtp.pre_fc_norm_hidden.weight", head.state_norm),
    ]


@pytest.mark.parametrize("types", [(Type.F32,), (Type.F16,), MIXED], ids=["F32", "F16", "blocks"])
@pytest.mark.parametrize("architecture", MODELS)
def test_a_model_computes_as_transformers(
    architecture: str, types: tuple[Type, ...], tmp_path: Path
) -> None:
    """Block types are mixed, so that the parts of a layer's projections differ."""
    path = tmp_path / "model.gguf"
    model = a_model(architecture)
    save(path, architecture, model, types)
    check_logits(path, model)
