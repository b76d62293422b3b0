"""Family: the config fields and tensor names of one family of models. Imports no torch.

Owns the interface of `families/`, the look-up by architecture (`names.ARCHITECTURES`), and how all
families read the fields of a `config.json`, with the names of both transformers 4 and 5: sizes,
activations, RoPE parameters. Each of these functions raises ValueError naming the field, the value
and the allowed ones, or KeyError for a missing field. A family must not know how anything is
computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from magicdec.model.config import ModelConfig, RopeConfig
from magicdec.names import ARCHITECTURES, load_named

Raw = dict[str, Any]
GELUS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
PACKINGS = ("separate", "stacked", "grouped")


@dataclass(frozen=True)
class Names:
    """Checkpoint names without ".weight" and ".bias"; the defaults are Llama's. Names from
    `attention_norm` on are appended to `layer`, in which "{}" stands for the layer's number.

    `packing`: q, k and v are three tensors (separate), one tensor with the rows of q, then k, then
    v (stacked), or one tensor with the q, k and v of each KV head together (grouped). `transposed`:
    the layers' matrices are stored [in, out]."""

    embedding: str = "model.embed_tokens"
    position_embedding: str = ""
    embedding_norm: str = ""
    norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{}."
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    packing: str = "separate"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    output: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    transposed: bool = False

    def __post_init__(self) -> None:
        assert self.packing in PACKINGS and len(self.qkv) == (
            3 if self.packing == "separate" else 1
        )


@dataclass(frozen=True)
class Family:
    """`read` turns a config.json into ModelConfig fields, all but name, architecture, token ids and
    dtype. It raises ValueError for what is not implemented.

    `body` is the prefix that is missing from all names in a checkpoint of the model without its
    head. `buffers` are name endings of tensors in old checkpoints that are not parameters."""

    read: Callable[[dict[str, Any]], dict[str, Any]]
    names: Callable[[ModelConfig], Names] = lambda config: Names()
    body: str = ""
    buffers: tuple[str, ...] = (".rotary_emb.inv_freq",)


def find_family(architecture: str) -> Family:
    """The family of an architecture named in `config.json`. Raises ValueError listing the supported
    ones."""
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"architecture {architecture!r} is not supported; "
            f"choose from {', '.join(ARCHITECTURES)}"
        )
    family: Family = load_named(ARCHITECTURES, architecture)
    return family


def size(raw: Raw, *fields: str, default: int | None = None) -> int:
    """The first of `fields` that is present, a positive whole number. With a default, all may be
    missing or null."""
    field = next((name for name in fields if raw.get(name) is not None), fields[0])
    value = raw[field] if default is None else raw.get(field)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{field} {value!r} is not a positive whole number")
    return value


def only(raw: Raw, field: str, supported: Any) -> None:
    """Raise ValueError if the field is present and its value is not the supported one."""
    value = raw.get(field)
    if value is not None and value != supported:
        raise ValueError(f"{field} {value!r} is not supported; choose from {supported}")


def activation(raw: Raw, field: str, default: str) -> str:
    """ModelConfig's name of the GELU variant in `field`."""
    value = raw.get(field) or default
    if value not in GELUS:
        raise ValueError(f"{field} {value!r} is not supported; choose from {', '.join(GELUS)}")
    return GELUS[value]


def rope(raw: Raw) -> RopeConfig:
    """RopeConfig from `rope_theta` and `rope_scaling` (transformers 4), or from `rope_parameters`
    (transformers 5)."""
    table = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope_type = table.get("rope_type") or table.get("type") or "default"
    theta = float(table.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    if float(table.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is not supported; choose from 1.0")
    if rope_type in ("linear", "dynamic"):
        return RopeConfig(theta, rope_type, factor=float(table["factor"]))
    if rope_type == "llama3":
        low, high = float(table["low_freq_factor"]), float(table["high_freq_factor"])
        trained = size(table, "original_max_position_embeddings")
        return RopeConfig(theta, rope_type, float(table["factor"]), low, high, trained)
    return _yarn(raw, table, theta) if rope_type == "yarn" else RopeConfig(theta, rope_type)


def _yarn(raw: Raw, table: Raw, theta: float) -> RopeConfig:
    factor, scale = float(table["factor"]), table.get("attention_factor")
    if table.get("mscale"):
        raise ValueError("rope_scaling: mscale is not supported; leave it out")
    if scale is None:  # of q and k (YaRN, equation 22)
        scale = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    trained = size(raw, "max_position_embeddings")
    return RopeConfig(
        theta,
        "yarn",
        factor=factor,
        original_max_position_embeddings=size(
            table, "original_max_position_embeddings", default=trained
        ),
        attention_factor=float(scale),
        beta_fast=float(table.get("beta_fast") or 32),
        beta_slow=float(table.get("beta_slow") or 1),
        truncate=bool(table.get("truncate", True)),
    )
