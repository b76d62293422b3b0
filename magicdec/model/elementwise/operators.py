"""What lies between a layer's matrix products: norms, rotation, gated activation.

Owns the contract, and torch's operators as its reference: any dtype, any device. A faster way is a
file beside this one and a line in `names.ELEMENTWISE`. Whatever computes them, a row's result does
not depend on the rows beside it, and nothing here knows of the model around it.

Shapes: B rows, T new tokens, D head size, R of its dimensions rotated, F units of the MLP.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.config.capabilities import Requirements


class Elementwise:
    """By torch's operators. A subclass replaces what it computes in another way."""

    requirements: ClassVar[Requirements] = Requirements("torch")

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., W] / sqrt(mean of squares + eps) * weight [W]."""
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(
        self, x: Tensor, y: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """x + y, both [..., W], rounded to their dtype, and the `rms_norm` of that sum."""
        total = x + y
        return total, self.rms_norm(total, weight, eps)

    def rotate(self, heads: Tensor, table: Tensor, num_rotated: int, interleaved: bool) -> Tensor:
        """The first `num_rotated` of heads [B, T, N, D] with their first R dimensions turned by
        table [B, T, 2, R/2] float32: [B, T, num_rotated, D]. May be done in place: these heads
        are not to be read afterwards, the others are left as they are."""
        return apply_rope(heads[:, :, :num_rotated], table, interleaved)

    def silu_gate(self, gate_up: Tensor) -> Tensor:
        """silu of the first half of gate_up [..., 2F] times the second: [..., F]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


def apply_rope(x: Tensor, table: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first R dimensions of x [B, T, H, D] by table [B, T, 2, R/2] (the rows of
    `rope_table` at each token's position)."""
    cos, sin = table.to(x.dtype).unsqueeze(3).unbind(2)  # [B, T, 1, R/2] each
    size = 2 * cos.shape[-1]
    if size < x.shape[-1]:
        rotated = apply_rope(x[..., :size], table, interleaved)
        return torch.cat([rotated, x[..., size:]], dim=-1)
    if interleaved:
        first, second = x[..., ::2], x[..., 1::2]
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return turned.flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
