"""A decoding loop in the style of gpt-fast, to be compiled as one graph: static KV buffers, a mask
indexed by position, torch's `scaled_dot_product_attention` over the whole buffer with repeated KV
heads, and one fused matrix for q, k and v.

Uses the weights of transformers' Llama, so that both decode the same model.

Shapes: B rows, T new tokens, S slots of the buffers, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Layer:
    norm: Tensor
    qkv: Tensor
    output: Tensor
    ffn_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    k: Tensor  # [B, G, S, D]
    v: Tensor


class PlainLoop:
    def __init__(self, model: Any, B: int, S: int) -> None:
        config = model.config
        inner = model.model
        self.H = config.num_attention_heads
        self.G = config.num_key_value_heads
        self.D = config.hidden_size // self.H
        self.eps = config.rms_norm_eps
        self.embedding = inner.embed_tokens.weight
        self.norm = inner.norm.weight
        self.head = model.lm_head.weight
        self.rotary = inner.rotary_emb
        device = self.head.device
        dtype = self.head.dtype
        self.mask = stays(torch.ones(S, S, dtype=torch.bool, device=device).tril_())

        def buffer() -> Tensor:
            return stays(torch.zeros(B, self.G, S, self.D, dtype=dtype, device=device))

        self.layers = []
        for part in inner.layers:
            a = part.self_attn
            mlp = part.mlp
            qkv = stays(torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]))
            self.layers.append(
                Layer(
                    part.input_layernorm.weight,
                    qkv,
                    a.o_proj.weight,
                    part.post_attention_layernorm.weight,
                    mlp.gate_proj.weight,
                    mlp.up_proj.weight,
                    mlp.down_proj.weight,
                    buffer(),
                    buffer(),
                )
            )

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Greedy ids [B, 1] after ids [B, T] at `positions` [T]."""
        x = F.embedding(ids, self.embedding)
        cos, sin = self.rotary(x, positions.unsqueeze(0))  # [1, T, D]
        for layer in self.layers:
            h = F.rms_norm(x, (x.shape[-1],), layer.norm, self.eps)
            x = x + self._attend(layer, h, positions, cos.unsqueeze(1), sin.unsqueeze(1))
            h = F.rms_norm(x, (x.shape[-1],), layer.ffn_norm, self.eps)
            gated = F.silu(F.linear(h, layer.gate)) * F.linear(h, layer.up)
            x = x + F.linear(gated, layer.down)
        last = F.rms_norm(x[:, -1:], (x.shape[-1],), self.norm, self.eps)
        return F.linear(last, self.head).argmax(-1)

    def _attend(
        self, layer: Layer, h: Tensor, positions: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        B, T, _ = h.shape
        heads = F.linear(h, layer.qkv).view(B, T, -1, self.D).transpose(1, 2)
        q, k, v = heads.split([self.H, self.G, self.G], dim=1)
        q = rotate(q, cos, sin)
        k = rotate(k, cos, sin)
        keys = layer.k.index_copy_(2, positions, k)
        values = layer.v.index_copy_(2, positions, v)
        keys, values = (t.repeat_interleave(self.H // self.G, dim=1) for t in (keys, values))
        mask = self.mask[positions][None, None]
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return F.linear(out.transpose(1, 2).reshape(B, T, -1), layer.output)


def stays(tensor: Tensor) -> Tensor:
    """Mark the tensor's address as static, so that a CUDA graph uses it in place instead of copying
    it."""
    torch._dynamo.mark_static_address(tensor)
    return tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on x [B, heads, T, D], in pairs half a head apart."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
