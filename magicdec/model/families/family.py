"""Family: the config fields and tensor names of one family of models. Imports no torch.

Owns the interface of `families/` and the look-up by architecture (`names.ARCHITECTURES`). A family
must not know how anything is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from magicdec.model.config import ModelConfig
from magicdec.model.families.fields import ConfigFields
from magicdec.names import ARCHITECTURES, load_named

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
    dtype. It raises ValueError for what is not implemented. A field that it does not read is
    refused, unless `config_keys` says that it does not matter.

    `model_type` is that of the family's configs, by which transformers chooses the code.
    `has_head_bias`: the head has a bias, also where its matrix is the embedding. `body` is the
    prefix that is missing from all names in a checkpoint of the model without its head. `buffers`
    are name endings of tensors in old checkpoints that are not parameters."""

    model_type: str
    read: Callable[[ConfigFields], dict[str, Any]]
    names: Callable[[ModelConfig], Names] = lambda config: Names()
    body: str = ""
    buffers: tuple[str, ...] = (".rotary_emb.inv_freq",)
    has_head_bias: bool = False


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
