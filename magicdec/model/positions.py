"""How attention learns where tokens stand: rotation of q and k, ALiBi, or nothing where positions
were added to the embedding.

Owns what is done to q, k and v between their projection and attention. A `Place` is made once a
forward and called by every layer. It must not know of caches: whatever a key needs it carries.

Shapes: B rows, T new tokens, H query heads and G KV heads on this rank, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.model.config import ALIBI_DIMS, ModelConfig, RopeConfig
from magicdec.model.elementwise.operators import Elementwise

Place = Callable[[Tensor, int, int], tuple[Tensor, Tensor, Tensor]]
"""(heads [B,T,H+2G,D], H, G) -> q [B,T,H,D'], k and v [B,T,G,D'], as attention takes them; D' is
the config's `cached_head_dim`."""

DIGIT = 256  # positions below 256^2 are two numbers that bfloat16 holds exactly


def rotate(rows: Tensor, rope: RopeConfig, elementwise: Elementwise | None = None) -> Place:
    """Rotary, from the rows [B, T, 2, R/2] of the table at the tokens' positions, as `elementwise`
    does it: maybe in place."""
    elementwise = elementwise or Elementwise()

    def place(heads: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        num_rotated = num_heads + num_kv_heads  # q and k in one go
        rotated = elementwise.rotate(heads, rows, num_rotated, rope.interleaved)
        v = heads[:, :, num_rotated:]
        q, k = rotated.split([num_heads, num_kv_heads], dim=2)
        # On q alone, so that a cached key is a rotation of itself and nothing more.
        return (q if rope.attention_factor == 1.0 else _warm(q, rows, rope)), k, v

    return place


def _warm(q: Tensor, rows: Tensor, rope: RopeConfig) -> Tensor:
    """q [B,T,H,D] with YaRN's temperature, which is that of the rotated dimensions alone: the
    factor of q and that of k."""
    size, scale = 2 * rows.shape[-1], rope.attention_factor**2
    if size == q.shape[-1]:
        return q * scale
    return torch.cat([q[..., :size] * scale, q[..., size:]], dim=-1)


def leave(heads: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """The place of tokens whose embedding says where they stand."""
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=2)
    return q, k, v


def alibi(positions: Tensor, slopes: Tensor, size: int) -> Place:
    """ALiBi for any attention: `slopes` [H] of this rank, heads of `size` = D'.

    A score gains slope * (key's position - query's), of which the query's part is the same for all
    keys and falls out of the softmax. The key's is a product of further dimensions: k carries its
    position in two digits, q the slope times their weights. Attention divides by sqrt(D'), so q is
    multiplied by sqrt(D' / D), and the slopes by sqrt(D')."""

    def place(heads: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=2)
        head_dim = q.shape[-1]
        room = (0, size - head_dim)
        q, k, v = F.pad(q * math.sqrt(size / head_dim), room), F.pad(k, room), F.pad(v, room)
        last = head_dim + ALIBI_DIMS
        q[..., head_dim:last] = weights.to(q.dtype)
        k[..., head_dim:last] = digits.to(k.dtype)
        return q, k, v

    weights = torch.stack([slopes * DIGIT, slopes], dim=1) * math.sqrt(size)  # [H, 2]
    digits = torch.stack([positions // DIGIT, positions % DIGIT], dim=-1).unsqueeze(2)
    return place


def alibi_slopes(config: ModelConfig) -> Tensor:
    """Of all query heads, float32 [heads]: 2^(-8 i / n), for i = 1 .. n, where n is a power of two;
    otherwise those of the power below, and every other one of the power above."""
    num_heads = config.num_heads
    power = 1 << (num_heads.bit_length() - 1)
    first = [2.0 ** (-8 * i / power) for i in range(1, power + 1)]
    between = [2.0 ** (-4 * i / power) for i in range(1, 2 * (num_heads - power), 2)]
    return torch.tensor(first + between)
