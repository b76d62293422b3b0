"""Gated DeltaNet (Yang et al., arXiv 2412.06464): a layer that keeps a state of fixed size in place
of keys and values. The caller keeps it: `remember(layer, tokens) -> output`
(`elementwise/delta.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.config import ModelConfig
from magicdec.model.elementwise.delta import DeltaTokens, in_vectors, widened
from magicdec.model.linear.packed import Linear, PartialLinear, Reduce, row_parallel
from magicdec.model.mixers import LinearAttention

Remember = Callable[[int, DeltaTokens], Tensor]
"""(layer, tokens) -> outputs [B, T, H, E] of rows whose states the caller keeps."""


class GatedDeltaNet(nn.Module):
    """The layer. One product makes the channels of q, k and v, the output's gate z, and what beta
    and g are made of; each output head has an RMS norm, times silu(z)."""

    def __init__(self, config: ModelConfig, mixer: LinearAttention, shard: Shard) -> None:
        super().__init__()
        (first, last), (key_first, key_last) = shard.heads(
            mixer.num_value_heads, mixer.num_key_heads
        )
        self.num_values = last - first
        self.num_keys = key_last - key_first
        self.sizes = (self.num_keys, self.num_values, mixer.key_dim, mixer.value_dim)
        self.norm_eps = config.norm_eps
        width = self.num_values * mixer.value_dim
        num_channels = 2 * self.num_keys * mixer.key_dim + width
        self.parts = (num_channels, width, self.num_values, self.num_values)
        self.inputs: Linear = nn.Linear(config.hidden_size, sum(self.parts), bias=False)
        self.convolution = nn.Parameter(torch.zeros(num_channels, 1, mixer.kernel))
        self.step_bias = nn.Parameter(torch.zeros(self.num_values))
        self.log_decay = nn.Parameter(torch.zeros(self.num_values))
        self.norm = nn.Parameter(torch.ones(mixer.value_dim))
        self.output: Linear = PartialLinear(width, config.hidden_size, bias=False)

    def forward(self, x: Tensor, layer: int, remember: Remember, reduce: Reduce) -> Tensor:
        channels, gate, rate, step = self.inputs(x).split(self.parts, dim=-1)
        steps = in_vectors(F.softplus, widened(step) + widened(self.step_bias))
        tokens = DeltaTokens(
            channels=widened(channels),
            weight=self.convolution[:, 0],
            decay=-widened(self.log_decay).exp() * steps,
            rate=in_vectors(torch.sigmoid, widened(rate)),
            sizes=self.sizes,
        )
        out = remember(layer, tokens)
        scale = torch.rsqrt(out.square().mean(-1, keepdim=True) + self.norm_eps)
        normed = widened(self.norm * (out * scale).to(x.dtype))
        gated = normed * in_vectors(F.silu, widened(gate)).unflatten(-1, out.shape[-2:])
        return row_parallel(gated.to(x.dtype).flatten(2), self.output, reduce)
