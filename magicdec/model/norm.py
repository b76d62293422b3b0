"""The norms of a decoder: RMS (Zhang & Sennrich 2019), or layer norm with a bias. A row's result
does not depend on the rows beside it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from magicdec.model import elementwise
from magicdec.model.config import ModelConfig


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.is_packed = False  # computed by `elementwise` where that serves
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        if self.is_packed and elementwise.serves(x):
            return elementwise.rms_norm(x, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def make_norm(config: ModelConfig) -> RMSNorm | nn.LayerNorm:
    kind = RMSNorm if config.norm == "rms" else nn.LayerNorm
    return kind(config.hidden_size, config.norm_eps)
