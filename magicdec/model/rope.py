"""Rotary position embedding: float32 tables of cos and sin, applied by
`elementwise.operators.apply_rope`.

Owns the frequency formulas (default: no scaling; linear: Chen et al. 2023, position interpolation;
llama3: Llama-3.1 release; yarn: Peng et al. 2023, section 3.2). `dynamic` would change the
frequencies once the context exceeds the trained length, but cached keys are rotated already.
`dynamic` therefore uses the unscaled table, and `setup.prepare` refuses longer contexts before the
run. YaRN's attention temperature is not part of the table: `positions` applies it.

R is the number of rotated dimensions: the head size D, or less.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from magicdec.model.config import RopeConfig


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
    """Keep high frequencies, divide low ones by `factor`, interpolate between the thresholds."""
    old_length = config.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    blend = (old_length / wavelengths - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / config.factor + blend * frequencies


def _yarn_frequencies(frequencies: Tensor, config: RopeConfig) -> Tensor:
    """Keep the frequency of pairs that rotate more than `beta_fast` times within the trained
    length, divide it by `factor` for pairs that rotate fewer than `beta_slow` times, and
    interpolate by the pair's index in between."""
    size = 2 * len(frequencies)

    def pair_that_turns(times: float) -> float:
        wavelength = config.original_max_position_embeddings / times / (2 * math.pi)
        return size * math.log(wavelength) / (2 * math.log(config.theta))

    low, high = pair_that_turns(config.beta_fast), pair_that_turns(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    high += 0.001 if low == high else 0.0
    blend = ((torch.arange(len(frequencies)).float() - low) / (high - low)).clamp(0.0, 1.0)
    return blend * frequencies / config.factor + (1 - blend) * frequencies


def rope_table(config: RopeConfig, head_dim: int, max_positions: int) -> Tensor:
    """cos and sin of every position and pair, float32 [max_positions, 2, R/2]."""
    angles = torch.outer(torch.arange(max_positions).float(), rope_frequencies(config, head_dim))
    return torch.stack([angles.cos(), angles.sin()], dim=1)
