"""The operations between a layer's GEMMs (norms, rotary embedding, gated activation), with torch's
operators as the reference. Implementations are listed in `names.ELEMENTWISE`. A row's result is
independent of other rows.

Shapes: B rows, T new tokens, D head size, R rotated dimensions of a head, F MLP units.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.config.capabilities import Requirements


class Elementwise:
    """The reference with torch's operators. Subclasses override those that they speed up."""

    requirements: ClassVar[Requirements] = Requirements("torch")
    has_views: ClassVar[bool] = False
    """One Triton kernel computes the view of a forward too (`kv.kernel_view`)."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., W] / sqrt(mean of squares + eps) * weight [W]."""
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(
        self, x: Tensor, y: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """x + y, both [..., W], rounded to their dtype, and the sum's `rms_norm`."""
        total = x + y
        return total, self.rms_norm(total, weight, eps)

    def rotate(self, heads: Tensor, table: Tensor, num_rotated: int, interleaved: bool) -> Tensor:
        """The first `num_rotated` heads of [B, T, N, D], their first R dimensions rotated by
        `table` [B, T, 2, R/2] float32: [B, T, num_rotated, D]. May overwrite these heads."""
        return apply_rope(heads[:, :, :num_rotated], table, interleaved)

    def silu_gate(self, gate_up: Tensor) -> Tensor:
        """silu of the first half of gate_up [..., 2F] times the second: [..., F]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gelu_gate(self, gate_up: Tensor) -> Tensor:
        """As `silu_gate`, with the approximation of GELU by tanh."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up


def apply_rope(x: Tensor, table: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first R dimensions of x [B, T, H, D] by table [B, T, 2, R/2] (rows of
    `rope_table`)."""
    cos, sin = table.to(x.dtype).unsqueeze(3).unbind(2)  # [B, T, 1, R/2] each
    size = 2 * cos.shape[-1]
    if size < x.shape[-1]:
        rotated = apply_rope(x[..., :size], table, interleaved)
        return torch.cat([rotated, x[..., size:]], dim=-1)
    if interleaved:
        first = x[..., ::2]
        second = x[..., 1::2]
        rotated = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return rotated.flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
