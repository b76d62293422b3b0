"""Block: a decoder layer of attention and an MLP, each behind a norm, on a tensor-parallel shard. A
row's result does not depend on other rows. RMS norm: Zhang & Sennrich 2019.

Shapes: B rows, T new tokens, H query heads and G KV heads on this rank, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.config import ModelConfig
from magicdec.model.elementwise.operators import Elementwise
from magicdec.model.experts import Experts
from magicdec.model.gated_delta import GatedDeltaNet, Remember
from magicdec.model.linear.packed import Linear, PartialLinear, Reduce, row_parallel
from magicdec.model.mixers import LinearAttention
from magicdec.model.positions import PositionEncoding, split_heads

ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        super().__init__()
        first, last = shard.mlp_units(config.intermediate_size)
        self.is_gated = config.gated_mlp
        self.activation = config.activation
        self.activate = ACTIVATION_FUNCTIONS[config.activation]
        self.elementwise = Elementwise()
        width = (2 if self.is_gated else 1) * (last - first)  # gate and up, or up alone
        self.gate_up: Linear = nn.Linear(config.hidden_size, width, bias=config.mlp_bias)
        self.down: Linear = PartialLinear(last - first, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor, reduce: Reduce) -> Tensor:
        return row_parallel(self.hidden(x), self.down, reduce)

    def hidden(self, x: Tensor) -> Tensor:
        """The down projection's input, [B, T, this rank's share of intermediate_size]."""
        both = self.gate_up(x)
        if not self.is_gated:
            return self.activate(both)
        if self.activation == "silu":
            return self.elementwise.silu_gate(both)
        if self.activation == "gelu_tanh":
            return self.elementwise.gelu_gate(both)
        gate, up = both.chunk(2, dim=-1)
        return self.activate(gate) * up


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.elementwise = Elementwise()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.elementwise.rms_norm(x, self.weight, self.eps)


def make_norm(config: ModelConfig) -> RMSNorm | nn.LayerNorm:
    kind = RMSNorm if config.norm == "rms" else nn.LayerNorm
    return kind(config.hidden_size, config.norm_eps)


def add_norm(norm: RMSNorm | nn.LayerNorm, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(norm, RMSNorm):
        return norm.elementwise.add_rms_norm(x, y, norm.weight, norm.eps)
    total = x + y
    return total, norm(total)


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [B,T,H,D], k [B,T,G,D], v [B,T,G,D]) -> [B,T,H,D]. The position encoding is already
applied to q and k; D is the config's `cached_head_dim`."""


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        super().__init__()
        (q_first, q_last), (kv_first, kv_last) = shard.heads(config.num_heads, config.num_kv_heads)
        self.head_dim = config.head_dim
        self.num_heads = q_last - q_first
        self.num_kv_heads = kv_last - kv_first
        self.num_gates = self.num_heads * config.gated_attention
        num_heads = self.num_heads + 2 * self.num_kv_heads + self.num_gates
        self.qkv: Linear = nn.Linear(
            config.hidden_size, num_heads * self.head_dim, bias=config.qkv_bias
        )
        self.output: Linear = PartialLinear(
            self.num_heads * self.head_dim, config.hidden_size, bias=config.output_bias
        )
        self.sinks: nn.Parameter | None = None
        if config.sink_logits:
            self.sinks = nn.Parameter(torch.zeros(self.num_heads))
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(self.head_dim, config.norm_eps) for _ in "qk")

    def forward(
        self, x: Tensor, layer: int, encode: PositionEncoding, attend: Attend, reduce: Reduce
    ) -> Tensor:
        return row_parallel(self.mix(x, layer, encode, attend), self.output, reduce)

    def mix(self, x: Tensor, layer: int, encode: PositionEncoding, attend: Attend) -> Tensor:
        """The output projection's input, [B, T, H * D]."""
        rows, num_tokens, _ = x.shape
        heads = self.qkv(x).view(rows, num_tokens, -1, self.head_dim)
        gates = heads[:, :, heads.shape[2] - self.num_gates :]  # [B, T, H, D], or none
        heads = heads[:, :, : heads.shape[2] - self.num_gates]
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = split_heads(heads, self.num_heads, self.num_kv_heads)
            heads = torch.cat([self.q_norm(q), self.k_norm(k), v], dim=2)
        out = attend(layer, *encode(heads, self.num_heads, self.num_kv_heads))
        if out.shape[-1] > self.head_dim:  # ALiBi's extra dimensions, zeros
            out = out[..., : self.head_dim]
        if self.num_gates:
            out = out * gates.sigmoid()
        return out.reshape(rows, num_tokens, -1)


class Block(nn.Module):
    """`has_experts`: a mixture of experts in place of the MLP. `mixer`: in place of attention."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        has_experts: bool = False,
        mixer: LinearAttention | None = None,
    ) -> None:
        super().__init__()
        self.is_parallel = config.residual != "sequential"
        self.attention_norm = make_norm(config)
        self.attention: Attention | GatedDeltaNet
        if mixer is None:
            self.attention = Attention(config, shard)
        else:
            assert not self.is_parallel, "its MLP follows"
            self.attention = GatedDeltaNet(config, mixer, shard)
        self.mlp_norm: RMSNorm | nn.LayerNorm | None = None
        if config.residual != "parallel_shared_norm":
            self.mlp_norm = make_norm(config)
        self.post_attention_norm: RMSNorm | nn.LayerNorm | None = None
        self.post_mlp_norm: RMSNorm | nn.LayerNorm | None = None
        if config.post_norms:
            self.post_attention_norm = make_norm(config)
            self.post_mlp_norm = make_norm(config)
        self.mlp: MLP | Experts = Experts(config, shard) if has_experts else MLP(config, shard)
        assert not (has_experts and self.is_parallel), "experts follow attention"

    @property
    def self_attention(self) -> Attention:
        """Of a layer without linear attention."""
        assert isinstance(self.attention, Attention), "asked of a layer with keys and values"
        return self.attention

    def forward(
        self,
        x: Tensor,
        y: Tensor | None,
        layer: int,
        encode: PositionEncoding,
        attend: Attend,
        reduce: Reduce,
        remember: Remember | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The layer of hidden states x + y, or x, [B, T, hidden]. It returns two summands too:
        the next norm adds them, which saves a pass."""
        if y is None:
            normed = self.attention_norm(x)
        else:
            x, normed = add_norm(self.attention_norm, x, y)
        if not self.is_parallel:
            assert self.mlp_norm is not None, "the MLP of a sequential block has a norm"
            if isinstance(self.attention, GatedDeltaNet):
                assert remember is not None, "the model has such layers"
                y = self.attention(normed, layer, remember, reduce)
            else:
                y = self.self_attention(normed, layer, encode, attend, reduce)
            y = y if self.post_attention_norm is None else self.post_attention_norm(y)
            x, normed = add_norm(self.mlp_norm, x, y)
            del y  # frees memory before the MLP: y is large for a long prefill chunk
            added = self.mlp(normed, reduce)
            return x, added if self.post_mlp_norm is None else self.post_mlp_norm(added)
        attention = self.self_attention
        mlp = self.mlp
        assert isinstance(mlp, MLP), "experts follow attention"
        hidden = mlp.hidden(normed if self.mlp_norm is None else self.mlp_norm(x))
        mixed = attention.mix(normed, layer, encode, attend)
        total = reduce(attention.output(mixed) + mlp.down(hidden))  # one all-reduce for both
        for bias in (attention.output.bias, mlp.down.bias):
            total = total if bias is None else total + bias
        return x, total
