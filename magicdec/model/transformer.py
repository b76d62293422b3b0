"""The decoder: one Llama-family transformer over any contiguous range of layers and any
tensor-parallel shard.

Owns the arithmetic between token ids and logits, and the table that says where each weight comes
from. It must not know of caches, policies or backends: attention is a callable, `attend(layer, q,
k, v) -> output`, that the caller supplies.

Shapes: B rows, T new tokens, H query heads and G KV heads on this rank, D head size, V vocabulary
rows on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.config import ModelConfig
from magicdec.model.linear import PackedLinear
from magicdec.model.rope import apply_rope, rope_table

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [B,T,H,D], k [B,T,G,D], v [B,T,G,D]) -> [B,T,H,D]; positions are already rotated into q
and k."""

Reduce = Callable[[Tensor], Tensor]
"""Sum a partial result over the ranks of the tensor-parallel group."""


class PartialLinear(nn.Linear):
    """A linear layer whose inputs are spread over ranks. `forward` leaves the bias out: it is added
    once, after the sum."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        super().__init__()
        (q_first, q_last), (kv_first, kv_last) = shard.heads(config.num_heads, config.num_kv_heads)
        self.head_dim = config.head_dim
        self.num_heads, self.num_kv_heads = q_last - q_first, kv_last - kv_first
        self.qkv: nn.Linear | PackedLinear = nn.Linear(
            config.hidden_size,
            (self.num_heads + 2 * self.num_kv_heads) * self.head_dim,
            bias=config.qkv_bias,
        )
        self.output: nn.Linear | PackedLinear = PartialLinear(
            self.num_heads * self.head_dim, config.hidden_size, bias=config.output_bias
        )

    def forward(
        self, x: Tensor, layer: int, rope: Tensor, attend: Attend, reduce: Reduce
    ) -> Tensor:
        rows, num_tokens, _ = x.shape
        heads = self.qkv(x).view(rows, num_tokens, -1, self.head_dim)
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=2)
        rotated = apply_rope(
            heads[:, :, : self.num_heads + self.num_kv_heads], rope
        )  # q and k in one go
        q, k = rotated.split([self.num_heads, self.num_kv_heads], dim=2)
        out = attend(layer, q, k, v).reshape(rows, num_tokens, -1)
        return row_parallel(out, self.output, reduce)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        super().__init__()
        first, last = shard.split(config.intermediate_size)
        self.gate_up: nn.Linear | PackedLinear = nn.Linear(
            config.hidden_size, 2 * (last - first), bias=config.mlp_bias
        )
        self.down: nn.Linear | PackedLinear = PartialLinear(
            last - first, config.hidden_size, bias=config.mlp_bias
        )

    def forward(self, x: Tensor, reduce: Reduce) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return row_parallel(F.silu(gate) * up, self.down, reduce)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, shard)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, shard)

    def forward(
        self, x: Tensor, layer: int, rope: Tensor, attend: Attend, reduce: Reduce
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), layer, rope, attend, reduce)
        return x + self.mlp(self.mlp_norm(x), reduce)


class Transformer(nn.Module):
    """Layers `layers` of the model, with the embedding if they begin it and the norm and head if
    they end it."""

    rope: Tensor

    def __init__(
        self, config: ModelConfig, shard: Shard = Shard(), layers: range | None = None
    ) -> None:
        super().__init__()
        self.config, self.shard = config, shard
        self.layers = range(config.num_layers) if layers is None else layers
        assert (
            self.layers.step == 1 and 0 <= self.layers.start < self.layers.stop <= config.num_layers
        )
        self.is_first = self.layers.start == 0
        self.is_last = self.layers.stop == config.num_layers
        if self.is_first or (self.is_last and config.tie_word_embeddings):
            self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, shard) for _ in self.layers)
        self.head_rows = shard.split(config.vocab_size)
        if self.is_last:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            if not config.tie_word_embeddings:
                self.head: nn.Linear | PackedLinear | None = nn.Linear(
                    config.hidden_size, self.head_rows[1] - self.head_rows[0], bias=False
                )
            else:
                self.head = None

    def set_positions(self, max_positions: int, device: torch.device) -> None:
        """Have the rotary table reach positions 0 .. max_positions - 1 at least."""
        if hasattr(self, "rope") and len(self.rope) >= max_positions:
            return
        self.rope = rope_table(self.config.rope, self.config.head_dim, max_positions).to(device)

    def forward(
        self, x: Tensor, positions: Tensor, attend: Attend, reduce: Reduce, last_only: bool = False
    ) -> Tensor:
        """Token ids [B,T] (or hidden states [B,T,hidden] past the first stage) -> this rank's
        logits [B,T,V], or hidden states.

        `last_only` evaluates the head on the last position alone: [B,1,V].
        """
        if self.is_first:
            x = self.embedding(x)
        rope = self.rope[positions]  # [B, T, 2, D/2]
        for layer, block in zip(self.layers, self.blocks, strict=True):
            x = block(x, layer, rope, attend, reduce)
        if not self.is_last:
            return x
        x = self.norm(x[:, -1:] if last_only else x)
        return F.linear(x, self.tied_head) if self.head is None else self.head(x)

    @property
    def tied_head(self) -> Tensor:
        """[V, hidden]: this rank's rows of the embedding, where they are the head as well."""
        return self.embedding.weight[self.head_rows[0] : self.head_rows[1]]

    def pack(self) -> None:
        """Lay the weights of all products out for `PackedLinear`. Raises ValueError unless they are
        bfloat16."""
        for module in [m for b in self.blocks for m in b.modules()]:
            for name, linear in list(module.named_children()):
                if isinstance(linear, nn.Linear):
                    adds_bias = not isinstance(linear, PartialLinear)
                    setattr(module, name, PackedLinear(linear.weight, linear.bias, adds_bias))
        if self.is_last:
            head = self.head.weight if isinstance(self.head, nn.Linear) else self.tied_head
            self.head = PackedLinear(head)


def row_parallel(x: Tensor, linear: nn.Linear | PackedLinear, reduce: Reduce) -> Tensor:
    """A `PartialLinear`, packed or not, the sum over ranks, and the bias."""
    partial: Tensor = reduce(linear(x))
    return partial if linear.bias is None else partial + linear.bias


@dataclass(frozen=True)
class Piece:
    """Rows and columns of one checkpoint tensor; `columns` is None for a vector and for all
    columns."""

    name: str
    rows: tuple[int, int]
    columns: tuple[int, int] | None
    full_shape: tuple[int, ...]


def weight_map(config: ModelConfig, shard: Shard, layers: range) -> dict[str, list[Piece]]:
    """For each parameter of `Transformer(config, shard, layers)`: the checkpoint pieces that,
    stacked by rows, make it."""
    c = config
    q_rows, kv_rows = (_scale(r, c.head_dim) for r in shard.heads(c.num_heads, c.num_kv_heads))
    ffn, head, all_hidden = (
        shard.split(c.intermediate_size),
        shard.split(c.vocab_size),
        (0, c.hidden_size),
    )
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    table: dict[str, list[Piece]] = {}

    def add(parameter: str, parts: Iterable[tuple[str, tuple[int, int], int]], bias: bool) -> None:
        """Column-parallel: each part is (checkpoint name, rows kept, rows in all)."""
        parts = list(parts)
        table[f"{parameter}.weight"] = [
            Piece(f"{n}.weight", r, None, (full, c.hidden_size)) for n, r, full in parts
        ]
        if bias:
            table[f"{parameter}.bias"] = [
                Piece(f"{n}.bias", r, None, (full,)) for n, r, full in parts
            ]

    def add_row_parallel(
        parameter: str, name: str, columns: tuple[int, int], full: int, bias: bool
    ) -> None:
        table[f"{parameter}.weight"] = [
            Piece(f"{name}.weight", all_hidden, columns, (c.hidden_size, full))
        ]
        if bias:
            table[f"{parameter}.bias"] = [Piece(f"{name}.bias", all_hidden, None, (c.hidden_size,))]

    def add_norm(parameter: str, name: str) -> None:
        table[parameter] = [Piece(name, all_hidden, None, (c.hidden_size,))]

    is_last = layers.stop == c.num_layers
    if layers.start == 0 or (is_last and c.tie_word_embeddings):
        name = "model.embed_tokens.weight"
        table["embedding.weight"] = [
            Piece(name, (0, c.vocab_size), None, (c.vocab_size, c.hidden_size))
        ]
    for index, layer in enumerate(layers):
        ours, theirs = f"blocks.{index}", f"model.layers.{layer}"
        qkv = [
            ("q_proj", q_rows, q_size),
            ("k_proj", kv_rows, kv_size),
            ("v_proj", kv_rows, kv_size),
        ]
        add_norm(f"{ours}.attention_norm.weight", f"{theirs}.input_layernorm.weight")
        add(
            f"{ours}.attention.qkv",
            [(f"{theirs}.self_attn.{n}", r, s) for n, r, s in qkv],
            c.qkv_bias,
        )
        add_row_parallel(
            f"{ours}.attention.output", f"{theirs}.self_attn.o_proj", q_rows, q_size, c.output_bias
        )
        add_norm(f"{ours}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight")
        gate_up = [
            (f"{theirs}.mlp.{n}", ffn, c.intermediate_size) for n in ("gate_proj", "up_proj")
        ]
        add(f"{ours}.mlp.gate_up", gate_up, c.mlp_bias)
        add_row_parallel(
            f"{ours}.mlp.down", f"{theirs}.mlp.down_proj", ffn, c.intermediate_size, c.mlp_bias
        )
    if is_last:
        add_norm("norm.weight", "model.norm.weight")
        if not c.tie_word_embeddings:
            add("head", [("lm_head", head, c.vocab_size)], bias=False)
    return table


def _scale(span: tuple[int, int], by: int) -> tuple[int, int]:
    return span[0] * by, span[1] * by
