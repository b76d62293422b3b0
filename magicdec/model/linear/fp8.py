"""Fp8Linear: a linear layer that multiplies in FP8 (e4m3, Micikevicius et al., arXiv 2209.05433),
with a float32 scale for each output of the weights and for each row of the activations, which are
rounded at each call (W8A8). On a GPU that is `torch._scaled_mm`, whose tensor cores add up exact
products in float32; on a CPU the same numbers are multiplied in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from magicdec.model.linear import triton

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
MULTIPLE = 16  # of inputs and of outputs, which `torch._scaled_mm` asks for
# Weights that are rounded or widened at a time, which stay in a core's cache.
WIDENED = 1 << 17


def rounded_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers in e4m3 of [M, K], to nearest, and their scales, float32 [M, 1]: the largest number
    of a row becomes LARGEST. Scales are not finite where a row is not."""
    wide = rows.float()
    scale = wide.abs().amax(1, keepdim=True) / LARGEST
    quotients = wide / torch.where(scale == 0, 1.0, scale)
    return quotients.clamp_(-LARGEST, LARGEST).to(E4M3), scale


def widened(numbers: Tensor) -> Tensor:
    """The same in float32. torch converts a number in 7 ns of a core (Zen 3), this takes 1.3: sign,
    exponent and fraction are those of a bfloat16 that is 2^120 times smaller."""
    bits = numbers.view(torch.int8).to(torch.int16) << 4  # the sign is in all upper bits
    return (bits & ~0x7800).view(torch.bfloat16).float().mul_(2.0**120)


class Fp8Linear(nn.Module):
    """x [..., K] -> [..., N] in x's dtype. `weight` is [N, K] in e4m3, N filled up to a MULTIPLE,
    `scale` [N]. Unless `adds_bias`, the caller adds `bias`. Outputs are rounded to bfloat16 on a
    GPU, also where x is float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None, adds_bias: bool = True) -> None:
        """Of [N, K] in any dtype."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        assert self.in_features % MULTIPLE == 0, "it is checked"
        self.adds_bias = adds_bias
        self.bias = bias
        outputs = self.out_features + -self.out_features % MULTIPLE
        numbers = torch.zeros(outputs, self.in_features, dtype=torch.uint8, device=weight.device)
        numbers = numbers.view(E4M3)
        scale = torch.zeros(outputs, device=weight.device)
        step = max(1, WIDENED // self.in_features)
        for first in range(0, self.out_features, step):
            part = slice(first, min(first + step, self.out_features))
            numbers[part], scales = rounded_rows(weight[part])
            scale[part] = scales.squeeze(1)
        self.weight = nn.Parameter(numbers, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        multiply = self._on_gpu if x.device.type == "cuda" else self._on_cpu
        out = multiply(rows)[:, : self.out_features].unflatten(0, x.shape[:-1])
        return out + self.bias if self.adds_bias and self.bias is not None else out

    def _on_gpu(self, rows: Tensor) -> Tensor:
        numbers, scale = triton.round_rows(rows)
        out = torch._scaled_mm(
            numbers,
            self.weight.T,
            scale_a=scale,
            scale_b=self.scale.unsqueeze(0),
            out_dtype=torch.bfloat16,
        )
        return out.to(rows.dtype)

    def _on_cpu(self, rows: Tensor) -> Tensor:
        numbers, scale = rounded_rows(rows)
        wide = widened(numbers)
        out = wide.new_empty(len(rows), len(self.weight))
        step = max(1, WIDENED // self.in_features)
        for first in range(0, len(self.weight), step):
            part = slice(first, first + step)
            out[:, part] = F.linear(wide, widened(self.weight[part]))
        return (out * scale * self.scale).to(rows.dtype)

    def dense(self) -> Tensor:
        """The weights, float32 [N, K]."""
        dense = widened(self.weight) * self.scale.unsqueeze(1)
        return dense[: self.out_features]
