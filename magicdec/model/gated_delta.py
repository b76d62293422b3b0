"""Gated DeltaNet (Yang et al., arXiv 2412.06464): a layer that keeps a state of fixed size in place
of keys and values. The caller keeps it: `remember(layer, tokens) -> output`.

A token decays the state, S <- e^g S, writes the correction delta = beta (v - S^T k) to its key,
S <- S + k delta^T, and reads o = S^T q. Before that, a causal convolution over the newest tokens
mixes q, k and v. All of it is computed in float32, or in float64 of a model in float64.

Shapes: B rows, T new tokens, H value heads and G key heads on this rank, D and E the sizes of a key
and of a value, C = 2 G D + H E channels of the convolution, K its length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.config import ModelConfig
from magicdec.model.linear.packed import Linear, PartialLinear, Reduce, row_parallel
from magicdec.model.mixers import LinearAttention

CHUNK = 64  # tokens of a prompt that are computed together
NORM_EPS = 1e-6  # of the lengths of q and k


@dataclass(frozen=True)
class DeltaTokens:
    """What new tokens bring to a layer: `channels` [B, T, C] of q, k and v before the convolution,
    whose `weight` is [C, K]; `decay` g and `rate` beta, [B, T, H]."""

    channels: Tensor
    weight: Tensor
    decay: Tensor
    rate: Tensor
    sizes: tuple[int, int, int, int]  # G, H, D, E

    def part(self, span: slice) -> DeltaTokens:
        """Some of the tokens."""
        parts = (x[:, span] for x in (self.channels, self.decay, self.rate))
        channels, decay, rate = parts
        return replace(self, channels=channels, decay=decay, rate=rate)


@dataclass(frozen=True)
class Written:
    """What tokens write: keys [B, T, G, D], corrections [B, T, H, E] and decays g [B, T, H]."""

    keys: Tensor
    corrections: Tensor
    decays: Tensor


Remember = Callable[[int, DeltaTokens], Tensor]
"""(layer, tokens) -> outputs [B, T, H, E] of rows whose states the caller keeps."""


def widened(x: Tensor) -> Tensor:
    """In float32, or in its own dtype if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def convolve(tokens: DeltaTokens, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and k, of length one and q divided by the root of D, [B, T, G, D], and v [B, T, H, E],
    after the channels [B, K - 1, C] of the tokens `before`."""
    G, H, D, E = tokens.sizes
    length = tokens.weight.shape[1]
    num_new = tokens.channels.shape[1]
    # Sums in a fixed order: the same bits for a token alone and among others.
    channels = torch.cat([before, tokens.channels], dim=1)
    weight = widened(tokens.weight)
    mixed = channels[:, :num_new] * weight[:, 0]
    for place in range(1, length):
        mixed = mixed + channels[:, place : place + num_new] * weight[:, place]
    q, k, v = F.silu(mixed).split([G * D, G * D, H * E], dim=-1)
    q = _normed(q.unflatten(-1, (G, D))) * D**-0.5
    return q, _normed(k.unflatten(-1, (G, D))), v.unflatten(-1, (H, E))


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def write(state: Tensor, keys: Tensor, corrections: Tensor, decays: Tensor) -> Tensor:
    """The states [B, H, D, E] after one token, of which `recur` has computed keys [B, G, D] and
    corrections [B, H, E]: the same bits as there."""
    repeated = _for_values(keys, corrections.shape[1])
    return state * decays.exp()[..., None, None] + repeated[..., None] * corrections[..., None, :]


def recur(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, tokens: DeltaTokens
) -> tuple[Tensor, Written]:
    """The outputs [B, T, H, E] of tokens one by one, and what they write."""
    outputs = []
    corrections = []
    num_values = v.shape[2]
    for t in range(v.shape[1]):
        key = _for_values(k[:, t], num_values)[..., None]  # [B, H, D, 1]
        decayed = state * tokens.decay[:, t].exp()[..., None, None]
        read = (decayed * key).sum(-2)
        corrections.append(tokens.rate[:, t, :, None] * (v[:, t] - read))
        state = write(state, k[:, t], corrections[-1], tokens.decay[:, t])
        outputs.append((state * _for_values(q[:, t], num_values)[..., None]).sum(-2))
    written = Written(k, torch.stack(corrections, dim=1), tokens.decay)
    return torch.stack(outputs, dim=1), written


def recur_in_chunks(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, tokens: DeltaTokens
) -> tuple[Tensor, Tensor]:
    """The outputs [B, T, H, E] of many tokens, and the state after them: what `recur` computes, by
    products of matrices (arXiv 2412.06464, section 3.3)."""
    num_new, num_values = v.shape[1:3]
    filling = -num_new % CHUNK

    def chunks(x: Tensor) -> Tensor:
        """[B, T, H, ...] as [B, H, chunks, CHUNK, ...]; tokens that fill up are zeros, which leave
        the state as it is."""
        filled = F.pad(x, (*(0, 0) * (x.ndim - 2), 0, filling))
        return filled.unflatten(1, (-1, CHUNK)).movedim(3, 1)

    q, k = (chunks(_for_values(x, num_values, dim=2)) for x in (q, k))
    v = chunks(v)
    rate = chunks(tokens.rate)[..., None]
    decayed = chunks(tokens.decay).cumsum(-1)  # since the begin of the chunk
    ratio = (decayed[..., :, None] - decayed[..., None, :]).tril().exp().tril()
    mixing = ((k * rate) @ k.transpose(-1, -2) * ratio).tril(-1)
    known = torch.cat([v * rate, k * rate * decayed[..., None].exp()], dim=-1)
    unit = torch.eye(CHUNK, device=v.device) + mixing
    solved = torch.linalg.solve_triangular(unit, known, upper=False, unitriangular=True)
    values, reads = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores = q @ k.transpose(-1, -2) * ratio
    outputs = []
    for at in range(v.shape[2]):
        total = decayed[:, :, at, -1, None]
        corrections = values[:, :, at] - reads[:, :, at] @ state
        seen = q[:, :, at] * decayed[:, :, at, :, None].exp()
        outputs.append(seen @ state + scores[:, :, at] @ corrections)
        kept = k[:, :, at] * (total - decayed[:, :, at])[..., None].exp()
        state = state * total[..., None].exp() + kept.transpose(-1, -2) @ corrections
    together = torch.stack(outputs, dim=2).movedim(1, 3).flatten(1, 2)
    return together[:, :num_new], state


def _for_values(x: Tensor, num_values: int, dim: int = 1) -> Tensor:
    """What key heads have, for each of the value heads that they serve."""
    return x.repeat_interleave(num_values // x.shape[dim], dim=dim)


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
        steps = F.softplus(widened(step) + widened(self.step_bias))
        tokens = DeltaTokens(
            channels=widened(channels),
            weight=self.convolution[:, 0],
            decay=-widened(self.log_decay).exp() * steps,
            rate=widened(rate).sigmoid(),
            sizes=self.sizes,
        )
        out = remember(layer, tokens)
        scale = torch.rsqrt(out.square().mean(-1, keepdim=True) + self.norm_eps)
        normed = widened(self.norm * (out * scale).to(x.dtype))
        gated = normed * F.silu(widened(gate)).unflatten(-1, out.shape[-2:])
        return row_parallel(gated.to(x.dtype).flatten(2), self.output, reduce)
