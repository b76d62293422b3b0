"""The norms of a decoder: RMS norm (Zhang & Sennrich 2019), or layer norm with a bias. The result
for a row does not depend on the other rows of the batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from magicdec.model.config import ModelConfig
from magicdec.model.elementwise.operators import Elementwise


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
    """(x + y, norm(x + y))."""
    if isinstance(norm, RMSNorm):
        return norm.elementwise.add_rms_norm(x, y, norm.weight, norm.eps)
    total = x + y
    return total, norm(total)
