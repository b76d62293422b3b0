"""Rotary position embedding, half-split (Hugging Face) convention: tables in float32, applied in
the input's dtype.

Owns the frequency formulas (plain; linear: Chen et al. 2023, position interpolation; llama3:
Llama-3.1 release).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from magicdec.model.config import RopeConfig


def rope_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Angular frequency of each of the head_dim / 2 pairs, float32 [D/2], in radians per token."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (config.theta**exponents)
    if config.rope_type == "linear":
        return frequencies / config.factor
    if config.rope_type == "llama3":
        return _llama3_frequencies(frequencies, config)
    return frequencies


def _llama3_frequencies(frequencies: Tensor, config: RopeConfig) -> Tensor:
    """Keep short wavelengths, divide long ones by `factor`, blend between the two thresholds."""
    old_length = config.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    blend = (old_length / wavelengths - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / config.factor + blend * frequencies


def rope_table(config: RopeConfig, head_dim: int, max_positions: int) -> Tensor:
    """cos and sin of every position, float32 [max_positions, 2, D/2]."""
    angles = torch.outer(torch.arange(max_positions).float(), rope_frequencies(config, head_dim))
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def apply_rope(x: Tensor, table: Tensor) -> Tensor:
    """Rotate x [B, T, H, D] by table [B, T, 2, D/2] (the rows of `rope_table` at each token's
    position)."""
    cos, sin = table.to(x.dtype).unsqueeze(3).unbind(2)  # [B, T, 1, D/2] each
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
