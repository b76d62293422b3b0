"""The decoder, from token ids to logits: a transformer for any contiguous range of layers and any
tensor-parallel shard. The caller passes attention: `attend(layer, q, k, v) -> output`.

Shapes: B rows, T new tokens, H query heads and G KV heads on this rank, D head size, V vocabulary
rows on this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.block import MLP, Attend, Attention, Block, RMSNorm, add_norm, make_norm
from magicdec.model.config import ROUTER, SHARED_GATE, LayerKind, ModelConfig, RopeConfig
from magicdec.model.elementwise.operators import Elementwise
from magicdec.model.experts import Experts
from magicdec.model.gated_delta import Remember
from magicdec.model.linear.grouped import GroupedLinear
from magicdec.model.linear.packed import (
    Linear,
    PackedLinear,
    Reduce,
    exchange,
    pack,
)
from magicdec.model.mixers import LinearAttention
from magicdec.model.positions import (
    PositionEncoding,
    alibi,
    alibi_slopes,
    rope_table,
    rotate,
    split_heads,
)

BeforeLayer = Callable[[int], None]
"""A function that is called with each layer before it is computed. An exception in it ends the
forward."""
KeepState = Callable[[int, Tensor], None]
"""A function of a number of layers and the hidden states [B, T, hidden] after them."""


def embedding_scale(config: ModelConfig, dtype: torch.dtype) -> float:
    """The factor of embedded tokens, rounded to `dtype` as in the published code."""
    return float(torch.tensor(config.embedding_scale).to(dtype))


def make_block(config: ModelConfig, shard: Shard, kind: LayerKind) -> Block:
    has_experts = config.experts is not None and not kind.has_mlp
    mixer = kind.mixer
    assert mixer is None or isinstance(mixer, LinearAttention), "others are refused before"
    return Block(config, shard, has_experts, mixer)


class Embedding(nn.Embedding):
    """An embedding without initialization on the meta device, where `normal_` would import
    torch's compiler: 130 MB and a second per process."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class Transformer(nn.Module):
    """Layers `layers` of the model, with the embedding before the first, and the final norm and
    head after the last.

    `has_ends` overrides that for stages of a ring: True gives these layers embedding, norm and
    head; False none."""

    ropes: dict[RopeConfig, Tensor]  # rotary tables, replaced together by longer ones
    slopes: Tensor

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard = Shard(),
        layers: range | None = None,
        has_ends: bool | None = None,
    ) -> None:
        super().__init__()
        self.set_part(config, shard, layers, has_ends)
        self.elementwise = Elementwise()
        if self.has_embedding or (self.has_head and config.tie_word_embeddings):
            self.embedding = Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = self.embedding_norm = None
        if self.has_embedding and config.positions == "learned":
            self.position_embedding = Embedding(config.max_position_embeddings, config.hidden_size)
        if self.has_embedding and config.embedding_norm:
            self.embedding_norm = make_norm(config)
        kinds = config.kinds
        self.blocks = nn.ModuleList(
            make_block(config, shard, kinds[layer]) for layer in self.layers
        )
        if self.has_head:
            self.norm = make_norm(config)
            if not config.tie_word_embeddings:
                self.head: Linear | None = nn.Linear(
                    config.hidden_size,
                    self.head_rows[1] - self.head_rows[0],
                    bias=config.head_bias,
                )
            else:
                self.head = None

    def set_part(
        self, config: ModelConfig, shard: Shard, layers: range | None, has_ends: bool | None
    ) -> None:
        self.config = config
        self.shard = shard
        self.layers = range(config.num_layers) if layers is None else layers
        assert self.layers.step == 1
        assert 0 <= self.layers.start <= self.layers.stop <= config.num_layers
        self.is_last = self.layers.stop == config.num_layers
        self.has_embedding = self.layers.start == 0 if has_ends is None else has_ends
        self.has_head = self.is_last if has_ends is None else has_ends
        self.head_rows = shard.split(config.vocab_size)

    @property
    def part_config(self) -> ModelConfig:
        """The config of these layers."""
        return self.config.part(self.layers)

    def set_positions(self, max_positions: int, device: torch.device) -> None:
        """Prepare ALiBi's slopes, or rotary tables for at least positions 0 .. max_positions -
        1."""
        config = self.config
        if config.positions == "alibi":
            first, last = self.shard.heads(config.num_heads, config.num_kv_heads)[0]
            self.slopes = alibi_slopes(config)[first:last].to(device)
            return
        reach = min(map(len, self.ropes.values()), default=0) if hasattr(self, "ropes") else 0
        if config.positions == "rope" and reach < max_positions:
            tables = {}
            for rope in config.ropes:
                tables[rope] = rope_table(rope, config.head_dim, max_positions).to(device)
            self.ropes = tables

    def sinks(self) -> Tensor | None:
        """The sink logits of these layers, float32 [L, H], None without."""
        attentions = [block.attention for block in self.blocks if isinstance(block, Block)]
        layer_sinks = [part.sinks for part in attentions if isinstance(part, Attention)]
        found = [sinks.detach().float() for sinks in layer_sinks if sinks is not None]
        return torch.stack(found) if found else None

    def rope_of(self, layer: int) -> Tensor:
        """The rotary table of a layer, float32 [positions, 2, R/2]."""
        config = self.config
        return self.ropes[config.rope_of(config.kinds[layer])]

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        attend: Attend,
        reduce: Reduce,
        num_outputs: int | None = None,
        before_layer: BeforeLayer = lambda layer: None,
        keep: KeepState | None = None,
        remember: Remember | None = None,
    ) -> Tensor:
        """Token ids [B,T], or hidden states [B,T,hidden] without the embedding, to this rank's
        logits [B,T,V], or hidden states without last layer and head. After the last layer only
        the last `num_outputs` positions are kept, by default all. `keep` is called before each
        layer and after the last. `remember` keeps the states of layers with linear attention."""
        if self.has_embedding:
            x = self._embed(x, positions)
        encodings = self._position_encodings(positions)
        y: Tensor | None = None  # what the layer before adds to x
        for layer, block in zip(self.layers, self.blocks, strict=True):
            before_layer(layer)
            if keep is not None:
                keep(layer, x if y is None else x + y)
            encode = encodings[layer % len(encodings)]
            x, y = block(x, y, layer, encode, attend, reduce, remember)
        if keep is not None and y is not None:
            keep(self.layers.stop, x + y)
        assert y is not None, "a part has at least one layer"
        if self.is_last and num_outputs is not None:
            x, y = (part[:, part.shape[1] - num_outputs :] for part in (x, y))
        if self.is_last and num_outputs == 0:
            return x.new_empty(*x.shape[:2], self.width_out)
        if self.is_last and self.has_head:
            return self.multiply_head(add_norm(self.norm, x, y)[1])
        return x + y

    @property
    def width_out(self) -> int:
        """The last size of `forward`'s result: this rank's vocabulary, or the hidden size."""
        first, last = self.head_rows
        return last - first if self.is_last and self.has_head else self.config.hidden_size

    def logits(self, x: Tensor) -> Tensor:
        """This rank's logits [B,T,V] from hidden states [B,T,hidden] after the last layer."""
        return self.multiply_head(self.norm(x))

    @property
    def has_tied_head(self) -> bool:
        """Whether logits are products with rows of the embedding (`tied_head`)."""
        return self.has_head and self.head is None

    def multiply_head(self, x: Tensor) -> Tensor:
        """This rank's logits [B,T,V] of normed states [B,T,hidden]."""
        logits: Tensor = F.linear(x, self.tied_head) if self.head is None else self.head(x)
        return logits

    def _embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        x: Tensor = self.embedding(token_ids)
        if self.config.embedding_scale != 1.0:
            x = x * embedding_scale(self.config, x.dtype)
        if self.position_embedding is not None:
            # Draft tokens may lie beyond the last learned position; they are never accepted.
            last = self.config.max_position_embeddings - 1
            x = x + self.position_embedding(positions.clamp(max=last))
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def _position_encodings(self, positions: Tensor) -> list[PositionEncoding]:
        """One for each layer of the model, or one for all."""
        config = self.config
        if config.positions == "rope":
            made = {}
            for rope, table in self.ropes.items():
                rows = table[positions]  # [B, T, 2, R/2]
                made[rope] = rotate(rows, rope, self.elementwise, config.query_scale)
            return [made[config.rope_of(kind)] for kind in config.layer_kinds]
        if config.positions == "alibi":
            return [alibi(positions, self.slopes, config.cached_head_dim)]
        return [split_heads]

    def take_experts_read(self) -> int:
        """The experts that forwards have read since this was asked last, in all layers."""
        total = 0
        for block in self.blocks:
            if isinstance(block, Block) and isinstance(block.mlp, Experts):
                total += block.mlp.num_read
                block.mlp.num_read = 0
        return total

    @property
    def tied_head(self) -> Tensor:
        """[V, hidden]: this rank's rows of the embedding, as weights of the head."""
        return self.embedding.weight[self.head_rows[0] : self.head_rows[1]]

    def use(self, elementwise: Elementwise) -> None:
        """Compute RMS norms, rotary embedding and SiLU gates with `elementwise`. Other norms and
        activations are torch's."""
        for part in self.modules():
            if isinstance(part, RMSNorm | MLP | Experts | Transformer):
                part.elementwise = elementwise

    def pack(self, rounds: bool = False) -> None:
        """Pack the weights of all linear layers for `packed.cpp`; `rounds` as in PackedLinear.
        Raises ValueError unless bfloat16, float32 or in groups."""
        exchange(self, partial(pack, rounds=rounds))
        if self.has_tied_head:
            self.head = PackedLinear(self.tied_head)

    def with_linears(self, make: Callable[[Linear], Linear]) -> Transformer:
        """A model that shares all but its linear layers, which `make` makes, and the routers of
        experts. A tied head becomes a layer of its own."""
        memo: dict[int, Any] = {id(parameter): parameter for parameter in self.parameters()}
        layers = [
            module
            for name, module in self.named_modules()
            if isinstance(module, nn.Linear | PackedLinear | GroupedLinear)
            and not name.endswith((f".{ROUTER}", f".{SHARED_GATE}"))
        ]
        memo |= {id(layer): make(layer) for layer in layers}
        other = deepcopy(self, memo)
        if other.has_tied_head:
            head = nn.Linear(1, 1, bias=False, device="meta")
            head.weight = nn.Parameter(self.tied_head, requires_grad=False)
            other.head = make(head)
        return other
