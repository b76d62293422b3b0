"""Which tensors of Hugging Face a GGUF file has, and what llama.cpp's converter has made of each: a
name, an order of rows or columns, a sum, a share of a stacked tensor."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from magicdec.model.config import ModelConfig
from magicdec.model.families.family import Names, find_family
from magicdec.model.families.gguf_architectures import STACKED, architecture_of
from magicdec.model.families.gguf_config import ROPE_DIVISORS
from magicdec.model.gguf.file import GgufFile, GgufTensor
from magicdec.model.mixers import LinearAttention
from magicdec.output.files import AGAIN

BLOCK = re.compile(r"^blk\.(\d{1,9})\.([\w.]+?)(?:\.(weight|bias))?$")
PERMUTED = ("attn_q", "attn_k")
SINKS = "attn_sinks"
SHARED_GATE = "ffn_gate_inp_shexp"
NORM = "norm.weight"  # the end of the names that the converter adds an offset to
PLAIN_NORM = ".ssm_norm.weight"  # and that of those that it leaves as they are
# Of a head for multi-token prediction, beside the tensors of its layer.
MTP_PARTS = {
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
}
Order = NDArray[np.int64]
"""For each row, or column, of a tensor of Hugging Face the stored one."""


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor of Hugging Face in a file: the `rows` (of a vector, the numbers) and `columns` of
    `stored` that it has, None for all in their order. `offset` was added to its numbers; if it
    `is_decay`, minus the exponentials of its numbers are stored. If it `has_channels`, it has a
    dimension of one before its columns, which the file leaves out."""

    stored: GgufTensor
    rows: Order | None = None
    columns: Order | None = None
    offset: float = 0.0
    is_decay: bool = False
    has_channels: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        outputs, *inputs = self.stored.shape
        outputs = outputs if self.rows is None else len(self.rows)
        return (outputs, 1, *inputs) if self.has_channels else (outputs, *inputs)


Placed = dict[str, PlacedTensor]
"""By Hugging Face name."""


def placed_tensors(file: GgufFile, config: ModelConfig) -> Placed:
    """All tensors of a file. One that the family does not have keeps its name. Raises ValueError,
    one line with the file, for a tensor that the metadata contradict."""
    placing = Placing(file, config)
    found: Placed = {}
    for name, tensor in file.tensors.items():
        if name == ROPE_DIVISORS:
            continue
        own = placing.place(name, tensor)
        if twice := found.keys() & own.keys():
            raise ValueError(f"{file.path}: tensor {name} has {min(twice)} once more; {AGAIN}")
        found |= own
    return found


class Placing:
    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self.path = file.path
        self.config = config
        self.architecture = architecture_of(file)
        self.names = find_family(config.architecture).names(config)
        mixer = next(iter(config.mixers), None)
        is_tiled = self.architecture.has_tiled_heads
        self.linear = LinearOrders(mixer, is_tiled) if isinstance(mixer, LinearAttention) else None

    def place(self, name: str, tensor: GgufTensor) -> Placed:
        match = BLOCK.match(name)
        if match is None:
            return {hf_name(name, self.names): self.plain(name, tensor)}
        layer, part, leaf = match.groups()
        names = self.names
        if self.config.num_mtp_layers and int(layer) >= self.config.num_layers:
            names = names.mtp_head_names()
            layer = str(int(layer) - self.config.num_layers)
            if part.startswith("nextn."):
                theirs = MTP_PARTS.get(part, part.removeprefix("nextn."))
                return {f"{names.mtp.prefix}{theirs}.{leaf}": self.plain(name, tensor)}
        prefix = names.layer.format(layer)
        if self.linear is not None and part in self.linear.sizes:
            parts = self.linear_parts(name, part, tensor, self.linear)
            return {f"{prefix}{names.linear}{theirs}": placed for theirs, placed in parts.items()}
        if self.config.experts is not None and STACKED.match(name):
            return self.expert_parts(prefix, names, part, leaf, tensor)
        if part == SHARED_GATE and len(tensor.shape) == 1:
            tensor = replace(tensor, shape=(1, *tensor.shape))
        return {
            layer_name(name, prefix, names, self.architecture.mlp_norm): self.plain(name, tensor)
        }

    def plain(self, name: str, tensor: GgufTensor) -> PlacedTensor:
        has_offset = name.endswith(NORM) and not name.endswith(PLAIN_NORM)
        rows: Order | None = None
        size = self.config.head_dim
        is_permuted = self.architecture.is_permuted and name.split(".")[-2] in PERMUTED
        if is_permuted and tensor.shape[0] % size == 0:  # other shapes are refused
            rows = unpermuted(tensor.shape[0], size)
        return PlacedTensor(tensor, rows, offset=self.names.norm_offset if has_offset else 0.0)

    def expert_parts(
        self, prefix: str, names: Names, part: str, leaf: str, tensor: GgufTensor
    ) -> Placed:
        """Each expert's matrix, or its bias; of a tensor of gates and ups, both."""
        gate, up = names.expert_gate_up
        theirs = {
            "ffn_gate_exps": [gate],
            "ffn_up_exps": [up],
            "ffn_down_exps": [names.expert_down],
            "ffn_gate_up_exps": [gate, up],
        }[part]
        own_rows: list[Order | None] = [None]
        if len(theirs) > 1:
            own_rows = list(np.arange(tensor.shape[1]).reshape(len(theirs), -1))
        return {
            f"{prefix}{names.expert.format(number)}{matrix}.{leaf}": PlacedTensor(stored, rows)
            for number, stored in enumerate(expert_tensors(tensor))
            for matrix, rows in zip(theirs, own_rows, strict=True)
        }

    def linear_parts(
        self, name: str, part: str, tensor: GgufTensor, orders: LinearOrders
    ) -> Placed:
        """The tensors of linear attention, by the ends of their names. Sizes are compared before
        anything of that size is made."""
        size = orders.sizes[part]
        stored_size = tensor.shape[-1 if part == "ssm_out" else 0]
        if stored_size != size:
            raise ValueError(
                f"{self.path}: tensor {name} has shape {tensor.shape}, but the keys ssm.* make "
                f"{size} in place of {stored_size}; {AGAIN}"
            )
        return orders.parts(part, tensor)


class LinearOrders:
    """The order of the heads of linear attention. If they are `tiled`, a file has the first value
    head of each key head, then the second of each, and so on, but Hugging Face the value heads of
    a key head beside each other."""

    def __init__(self, mixer: LinearAttention, is_tiled: bool) -> None:
        self.mixer = mixer
        self.is_tiled = is_tiled
        self.group = mixer.num_value_heads // mixer.num_key_heads
        heads = mixer.num_value_heads
        self.num_keys = 2 * mixer.num_key_heads * mixer.key_dim
        values = heads * mixer.value_dim
        # By part of a name: its rows, of `ssm_out` its columns.
        self.sizes = {
            "attn_qkv": self.num_keys + values,
            "attn_gate": values,
            "ssm_in": self.num_keys + 2 * values,
            "ssm_beta": heads,
            "ssm_alpha": heads,
            "ssm_ba": 2 * heads,
            "ssm_conv1d": self.num_keys + values,
            "ssm_a": heads,
            "ssm_dt": heads,
            "ssm_norm": mixer.value_dim,
            "ssm_out": values,
        }

    def parts(self, part: str, tensor: GgufTensor) -> Placed:
        if part == "ssm_in":
            qkv, z = self.by_key_head()
            return {
                "in_proj_qkv.weight": PlacedTensor(tensor, qkv),
                "in_proj_z.weight": PlacedTensor(tensor, z),
            }
        if part == "ssm_ba":
            rates = np.arange(self.sizes[part]).reshape(-1, 2, self.group).swapaxes(0, 1)
            both = [rows.reshape(-1) for rows in rates]
            names = ("in_proj_b.weight", "in_proj_a.weight")
            return {n: PlacedTensor(tensor, rows) for n, rows in zip(names, both, strict=True)}
        if part == "ssm_conv1d":
            flat = replace(tensor, shape=(tensor.shape[0], tensor.shape[-1]))
            placed = PlacedTensor(flat, self.channels(), has_channels=True)
            return {"conv1d.weight": placed}
        values = self.values(self.mixer.value_dim)
        return {
            "attn_qkv": {"in_proj_qkv.weight": PlacedTensor(tensor, self.channels())},
            "attn_gate": {"in_proj_z.weight": PlacedTensor(tensor, values)},
            "ssm_beta": {"in_proj_b.weight": PlacedTensor(tensor, self.values(1))},
            "ssm_alpha": {"in_proj_a.weight": PlacedTensor(tensor, self.values(1))},
            "ssm_a": {"A_log": PlacedTensor(tensor, self.values(1), is_decay=True)},
            "ssm_dt": {"dt_bias": PlacedTensor(tensor, self.values(1))},
            "ssm_norm": {"norm.weight": PlacedTensor(tensor)},
            "ssm_out": {"out_proj.weight": PlacedTensor(tensor, columns=values)},
        }[part]

    def values(self, size: int) -> Order:
        """The value heads' rows, of which each head has `size`."""
        heads = np.arange(self.mixer.num_value_heads)
        if self.is_tiled:
            heads = heads.reshape(self.group, -1).T.reshape(-1)
        return (heads[:, None] * size + np.arange(size)).reshape(-1)

    def channels(self) -> Order:
        """Those of q, of k and of v."""
        values = self.num_keys + self.values(self.mixer.value_dim)
        return np.concatenate([np.arange(self.num_keys), values])

    def by_key_head(self) -> tuple[Order, Order]:
        """The rows of q, k and v, and those of z, of a tensor that has the four head by head, which
        older files of Qwen3-Next are in."""
        key = self.mixer.key_dim
        value = self.group * self.mixer.value_dim
        heads = np.arange(self.sizes["ssm_in"]).reshape(self.mixer.num_key_heads, -1)
        q, k, v, z = np.split(heads, [key, 2 * key, 2 * key + value], axis=1)
        return np.concatenate([rows.reshape(-1) for rows in (q, k, v)]), z.reshape(-1)


def parts_of_layer(names: Names, mlp_norm: str = "ffn_norm") -> dict[str, str]:
    """What stands between "blk.N." and the end of a name, and what it is called in the family's
    layers."""
    query, key, value = names.qkv
    gate, up = names.gate_up
    shared_gate, shared_up = (names.shared_expert + name for name in names.expert_gate_up)
    parts = {
        "attn_norm": names.attention_norm,
        "attn_q": query,
        "attn_k": key,
        "attn_v": value,
        "attn_q_norm": names.q_norm,
        "attn_k_norm": names.k_norm,
        "attn_output": names.output,
        "post_attention_norm": names.post_attention_norm,
        mlp_norm: names.mlp_norm,
        "ffn_gate": gate,
        "ffn_up": up,
        "ffn_down": names.down,
        "ffn_gate_inp": names.router,
        SHARED_GATE: names.shared_gate,
        "ffn_gate_shexp": shared_gate,
        "ffn_up_shexp": shared_up,
        "ffn_down_shexp": names.shared_expert + names.expert_down,
        "post_ffw_norm": names.post_mlp_norm,
    }
    return {ours: theirs for ours, theirs in parts.items() if theirs}


def hf_name(name: str, names: Names = Names(), mlp_norm: str = "ffn_norm") -> str:
    """The Hugging Face name of a tensor that has one as a whole, else its own."""
    if match := BLOCK.match(name):
        return layer_name(name, names.layer.format(match[1]), names, mlp_norm)
    stem, _, leaf = name.rpartition(".")
    whole = {"token_embd": names.embedding, "output_norm": names.norm, "output": names.head}
    return f"{whole[stem]}.{leaf}" if stem in whole else name


def layer_name(name: str, prefix: str, names: Names, mlp_norm: str) -> str:
    """The same of a tensor of a layer whose names begin with `prefix`."""
    match = BLOCK.match(name)
    assert match is not None, "it is of a layer"
    _, part, leaf = match.groups()
    if part == SINKS:
        return f"{prefix}{names.sinks}"
    theirs = parts_of_layer(names, mlp_norm).get(part)
    return f"{prefix}{theirs}.{leaf}" if theirs and leaf else name


def expert_tensors(tensor: GgufTensor) -> list[GgufTensor]:
    """Each expert's matrix [outputs, inputs] of a stacked tensor [experts, outputs, inputs], or its
    bias of [experts, outputs]."""
    experts, *outputs = tensor.shape[:-1]
    size = math.prod(outputs) * tensor.row_bytes
    return [
        replace(tensor, shape=tensor.shape[1:], offset=tensor.offset + number * size)
        for number in range(experts)
    ]


def unpermuted(num_rows: int, head_dim: int) -> Order:
    """For each output of q or k, in whole heads, the stored one: the converter of llama.cpp has put
    the two outputs that are rotated together, which are half a head apart, beside each other."""
    rows = np.arange(num_rows).reshape(-1, head_dim // 2, 2)
    return rows.transpose(0, 2, 1).reshape(-1)
