"""Family: the config fields and tensor names of a model family, looked up by architecture
(`names.ARCHITECTURES`). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from magicdec.model.config import ModelConfig
from magicdec.model.families.fields import ConfigFields
from magicdec.names import ARCHITECTURES, DRAFT_HEADS, PLANNED, load_named

PACKINGS = ("separate", "stacked", "grouped")


@dataclass(frozen=True)
class MtpNames:
    """Checkpoint names of a head for multi-token prediction, Qwen3.5's by default. All begin with
    `prefix`, and those of its layers with `layer`, whose "{}" is the layer's number."""

    prefix: str = "mtp."
    layer: str = "mtp.layers.{}."
    norm: str = "mtp.norm"
    token_norm: str = "mtp.pre_fc_norm_embedding"
    state_norm: str = "mtp.pre_fc_norm_hidden"
    projection: str = "mtp.fc"


@dataclass(frozen=True)
class ExpertStack:
    """How one tensor has the matrices of all experts of a layer: as [in, out] if they are
    `transposed`, and outputs of the gate and the up projection by turns, or first all of the
    gate."""

    is_transposed: bool = False
    takes_turns: bool = False


@dataclass(frozen=True)
class Names:
    """Checkpoint names without ".weight" and ".bias", Llama's by default. Names from
    `attention_norm` on are appended to `layer`, whose "{}" is the layer's number, and those of an
    expert to `expert`, whose "{}" is its own, or to `shared_expert`; those of linear attention
    follow `linear`, q, k, v and the rest in tensors of their own, or in two `linear_by_key_head`.

    `packing`: q, k and v are three tensors (separate), one with all rows of q, then k, then v
    (stacked), or one by KV head (grouped). `transposed`: layers' matrices are [in, out].
    `stacked_experts`: those of a layer's experts may be stored as one (`stacked_experts.py`).
    `norm_offset`: what is added to norms' weights as stored."""

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
    sinks: str = "self_attn.sinks"
    output: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    expert: str = "mlp.experts.{}."
    expert_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    shared_expert: str = "mlp.shared_expert."
    shared_gate: str = "mlp.shared_expert_gate"
    stacked_experts: ExpertStack | None = None
    post_attention_norm: str = ""
    post_mlp_norm: str = ""
    linear: str = "linear_attn."
    linear_by_key_head: bool = False
    transposed: bool = False
    norm_offset: float = 0.0
    mtp: MtpNames = MtpNames()

    def __post_init__(self) -> None:
        assert self.packing in PACKINGS and len(self.qkv) == (
            3 if self.packing == "separate" else 1
        )

    def mtp_head_names(self) -> Names:
        """Those of the model's head for multi-token prediction."""
        return replace(self, layer=self.mtp.layer, norm=self.mtp.norm)


@dataclass(frozen=True)
class Family:
    """A model family. `read` turns a config.json into ModelConfig fields but name, architecture,
    token ids and dtype, or raises ValueError. Fields that it does not read are refused unless
    `config_keys` knows them.

    `model_type`: as in its configs. `has_head_bias`: also with a tied head. `body`: the prefix
    missing in a checkpoint without head. `buffers`: name endings of old tensors that are no
    parameters. `other_parts`: beginnings of the names of tensors that are other parts of a
    checkpoint, such as what sees images."""

    model_type: str
    read: Callable[[ConfigFields], dict[str, Any]]
    names: Callable[[ModelConfig], Names] = lambda config: Names()
    body: str = ""
    buffers: tuple[str, ...] = (".rotary_emb.inv_freq",)
    has_head_bias: bool = False
    other_parts: tuple[str, ...] = ()


def find_family(architecture: str) -> Family:
    """The family of an architecture. Raises ValueError listing the supported ones."""
    if architecture in DRAFT_HEADS:
        head: Family = load_named(DRAFT_HEADS, architecture)
        return head
    if architecture not in ARCHITECTURES | PLANNED:
        raise ValueError(
            f"architecture {architecture!r} is not supported; "
            f"choose from {', '.join(ARCHITECTURES)}"
        )
    family: Family = load_named(ARCHITECTURES | PLANNED, architecture)
    return family


def check_computed(where: str, config: ModelConfig, name: str) -> None:
    """Raise ValueError for a model that only `magicdec plan` knows. `where`: the flag and value, or
    the file, that name it; `name`: the model, as a plan takes it."""
    if config.planned_only:
        raise ValueError(
            f"{where}: its config has {config.planned_only}, which this version does not compute; "
            f"`magicdec plan --model {name}` predicts when drafts would pay"
        )
