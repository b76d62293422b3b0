"""Position encodings in attention: RoPE, ALiBi, or none after learned ones. A `PositionEncoding` is
made once a forward and called by every layer.

RoPE frequencies: linear: Chen et al. 2023, position interpolation; llama3: Llama-3.1 release; yarn:
Peng et al. 2023, section 3.2. `dynamic` uses the unscaled table, because cached keys are rotated
already, and `setup.prepare` refuses longer contexts. `rotate` applies YaRN's attention temperature.

Shapes: B rows, T new tokens, H query heads and G KV heads on this rank, D head size, R rotated
dimensions of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.model.config import ALIBI_DIMS, ModelConfig, RopeConfig
from magicdec.model.elementwise.operators import Elementwise

PositionEncoding = Callable[[Tensor, int, int], tuple[Tensor, Tensor, Tensor]]
"""(heads [B,T,H+2G,D], H, G) -> q [B,T,H,D'], k and v [B,T,G,D'] with positions applied; D' is the
config's `cached_head_dim`."""

DIGIT = 256  # a position below 256^2 is stored as two digits, both exact in bfloat16


def rotate(
    rows: Tensor,
    rope: RopeConfig,
    elementwise: Elementwise | None = None,
    query_scale: float = 1.0,
) -> PositionEncoding:
    """RoPE with the table's rows [B, T, 2, R/2] at the tokens' positions, maybe in place."""
    elementwise = elementwise or Elementwise()
    # YaRN's attention factor of q and of k is applied to q alone, so that cached keys are rotated
    # and not scaled.
    scale = rope.attention_factor**2 * query_scale

    def encode(heads: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        num_rotated = num_heads + num_kv_heads  # q and k in one call
        rotated = elementwise.rotate(heads, rows, num_rotated, rope.interleaved)
        v = heads[:, :, num_rotated:]
        q, k = rotated.split([num_heads, num_kv_heads], dim=2)
        return (q if scale == 1.0 else _scale_queries(q, rows, scale)), k, v

    return encode


def _scale_queries(q: Tensor, rows: Tensor, scale: float) -> Tensor:
    """q [B,T,H,D] with rotated dimensions times `scale`."""
    size = 2 * rows.shape[-1]
    if size == q.shape[-1]:
        return q * scale
    return torch.cat([q[..., :size] * scale, q[..., size:]], dim=-1)


def split_heads(heads: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=2)
    return q, k, v


def alibi(positions: Tensor, slopes: Tensor, size: int) -> PositionEncoding:
    """ALiBi without an attention bias: `slopes` [H] of this rank, heads padded to `size` = D'.

    ALiBi adds slope * (key position - query position) to scores. The softmax cancels the query's
    term. The key's term lies in extra dimensions: k holds its position as two digits, q the
    slope times each digit's weight. Scores are divided by sqrt(D'), so q is multiplied by
    sqrt(D' / D), slopes by sqrt(D')."""

    weights = torch.stack([slopes * DIGIT, slopes], dim=1) * math.sqrt(size)  # [H, 2]
    digits = torch.stack([positions // DIGIT, positions % DIGIT], dim=-1).unsqueeze(2)

    def encode(heads: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=2)
        head_dim = q.shape[-1]
        room = (0, size - head_dim)
        q = F.pad(q * math.sqrt(size / head_dim), room)
        k = F.pad(k, room)
        v = F.pad(v, room)
        last = head_dim + ALIBI_DIMS
        q[..., head_dim:last] = weights.to(q.dtype)
        k[..., head_dim:last] = digits.to(k.dtype)
        return q, k, v

    return encode


def alibi_slopes(config: ModelConfig) -> Tensor:
    """Slopes of all n query heads, float32 [n]: 2^(-8 i / n), i = 1 .. n, for powers of two;
    else those of the next lower power, then every other of the next higher one."""
    num_heads = config.num_heads
    power = 1 << (num_heads.bit_length() - 1)
    first = [2.0 ** (-8 * i / power) for i in range(1, power + 1)]
    between = [2.0 ** (-4 * i / power) for i in range(1, 2 * (num_heads - power), 2)]
    return torch.tensor(first + between)


def rope_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Angular frequency of each pair of dimensions, float32 [R/2], in radians per token."""
    size = config.rotary_dim or head_dim
    exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    frequencies = 1.0 / (config.theta**exponents)
    if config.rope_type == "linear":
        return frequencies / config.factor
    if config.rope_type == "llama3":
        return _llama3_frequencies(frequencies, config)
    if config.rope_type == "yarn":
        return _yarn_frequencies(frequencies, config)
    return frequencies


def _llama3_frequencies(frequencies: Tensor, config: RopeConfig) -> Tensor:
    old_length = config.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    blend = (old_length / wavelengths - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / config.factor + blend * frequencies


def _yarn_frequencies(frequencies: Tensor, config: RopeConfig) -> Tensor:
    """Keep the frequency of pairs that rotate over `beta_fast` times within the trained length,
    divide it by `factor` under `beta_slow`, interpolate by index between."""
    size = 2 * len(frequencies)

    def pair_that_turns(times: float) -> float:
        wavelength = config.original_max_position_embeddings / times / (2 * math.pi)
        return size * math.log(wavelength) / (2 * math.log(config.theta))

    low = pair_that_turns(config.beta_fast)
    high = pair_that_turns(config.beta_slow)
    if config.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, size - 1)
    high += 0.001 if low == high else 0.0
    blend = ((torch.arange(len(frequencies)).float() - low) / (high - low)).clamp(0.0, 1.0)
    return blend * frequencies / config.factor + (1 - blend) * frequencies


def rope_table(config: RopeConfig, head_dim: int, max_positions: int) -> Tensor:
    """cos and sin by position and pair, float32 [max_positions, 2, R/2]."""
    angles = torch.outer(torch.arange(max_positions).float(), rope_frequencies(config, head_dim))
    return torch.stack([angles.cos(), angles.sin()], dim=1)
