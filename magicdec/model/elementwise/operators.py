"""The operations between a layer's GEMMs (norms, rotary embedding, gated activation, linear
attention), with torch's operators as the reference. Implementations are listed in
`names.ELEMENTWISE`. A row's result is independent of other rows.

Shapes: B rows, T new tokens, D head size, R rotated dimensions of a head, F MLP units.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.config.capabilities import Requirements
from magicdec.model.elementwise.delta import (
    DeltaTokens,
    HeldLayer,
    StatePlaces,
    convolve,
    delta_steps,
    recur_in_chunks,
)


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

    def clamped_gate(self, gate_up: Tensor, limit: float, alpha: float) -> Tensor:
        """As `silu_gate`, with a `ClampedGate`."""
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * (gate * torch.sigmoid(alpha * gate))

    def delta_convolve(self, tokens: DeltaTokens, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of new tokens of a layer with linear attention, as `delta.convolve`."""
        return convolve(tokens, before)

    def delta_chunks(
        self, state: Tensor, q: Tensor, k: Tensor, v: Tensor, tokens: DeltaTokens
    ) -> tuple[Tensor, Tensor]:
        """The outputs [B, T, H, E] of the tokens of a prompt, and the state after them, as
        `delta.recur_in_chunks`."""
        return recur_in_chunks(state, q, k, v, tokens)

    def delta_steps(
        self,
        held: HeldLayer,
        places: StatePlaces,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tokens: DeltaTokens,
    ) -> Tensor:
        """The outputs [B, T, H, E] of new tokens that may be taken back, as
        `delta.delta_steps`."""
        return delta_steps(held, places, q, k, v, tokens)

    def route(self, logits: Tensor, num_used: int, renormalises: bool) -> tuple[Tensor, Tensor]:
        """The experts with the largest `logits` [N, E], the first of equal ones: their numbers,
        int64 [N, K], and weights, float32 [N, K] rounded to the dtype of logits. These are the
        softmax over all experts; `renormalises`: over those that are used."""
        scores = logits.float()
        largest, chosen = scores.sort(dim=-1, descending=True, stable=True)
        weighed = largest[:, :num_used] if renormalises else largest
        weights = torch.softmax(weighed, dim=-1)[:, :num_used]
        return chosen[:, :num_used], weights.to(logits.dtype).float()

    def weigh(self, logits: Tensor) -> Tensor:
        """The sigmoid of `logits` [N], rounded to their dtype: float32 [N]."""
        return torch.sigmoid(logits.float()).to(logits.dtype).float()

    def add_expert(
        self, total: Tensor, tokens: Tensor, out: Tensor, bias: Tensor | None, weights: Tensor
    ) -> None:
        """Add `weights` [n] times an expert's `out` + `bias`, [n, hidden] and [hidden], to rows
        `tokens` [n] of `total`, float32 [N, hidden]; each token occurs once."""
        added = out.float() if bias is None else out.float() + bias.float()
        total.index_add_(0, tokens, added * weights[:, None])


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
