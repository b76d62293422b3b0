"""Linear layers with int8 weights and a float32 scale per output channel: y = (x w) * scale + bias.

Owns their computation: with torch's operators in any dtype on any device, or in bfloat16 with the
kernel of `packed.cpp`. Activations are never quantised. Must not know where weights and scales come
from (`checkpoint/quantization.py`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from magicdec.model.linear.packed import WIDTH, library

# int8 weights converted to the activations' dtype at a time. It bounds the extra memory, and should
# be small enough for the converted weights to stay in a core's cache until they are multiplied.
CONVERTED = 1 << 19


class Int8Linear(nn.Module):
    """x [..., K] -> [..., N], with `weight` [N, K] int8 and `scale` [N] float32, which the loader
    fills. Unless `adds_bias`, `bias` is stored here but added by the caller."""

    def __init__(self, like: nn.Linear, adds_bias: bool = True) -> None:
        super().__init__()
        self.adds_bias, device = adds_bias, like.weight.device
        weight = torch.empty(like.weight.shape, dtype=torch.int8, device=device)
        scale = torch.empty(len(weight), dtype=torch.float32, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = like.bias

    def forward(self, x: Tensor) -> Tensor:
        num_outputs, width = self.weight.shape
        out = x.new_empty(*x.shape[:-1], num_outputs)
        step = max(1, CONVERTED // width)
        for first in range(0, num_outputs, step):  # every dtype of x represents int8 exactly
            part = slice(first, first + step)
            sums = F.linear(x, self.weight[part].to(x.dtype))
            out[..., part] = sums * self.scale[part]  # in float32 or wider, then rounded once
        return out + self.bias if self.adds_bias and self.bias is not None else out


class PackedInt8Linear(nn.Module):
    """An `Int8Linear` with weights packed for the kernel; x must be bfloat16. The result of a row
    is the same to the bit whatever other rows are in the batch."""

    def __init__(self, linear: Int8Linear) -> None:
        super().__init__()
        weight = linear.weight.data
        self.is_odd = weight.shape[1] % 2 == 1
        weight = (F.pad(weight, (0, 1)) if self.is_odd else weight).contiguous()
        self.out_features, self.in_features = weight.shape
        self.scale, self.bias, self.adds_bias = linear.scale, linear.bias, linear.adds_bias
        blocks = -(-self.out_features // WIDTH)
        packed = torch.empty(blocks, 2, self.in_features // 2, WIDTH, dtype=torch.uint8)
        self.packed = nn.Parameter(packed, requires_grad=False)
        library().magicdec_pack_int8(
            weight.data_ptr(), self.out_features, self.in_features, packed.data_ptr()
        )

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.adds_bias else None
        x = F.pad(x, (0, 1)) if self.is_odd else x
        arguments = (x, self.packed, self.scale, bias, self.out_features)
        if torch.compiler.is_compiling():
            out: Tensor = torch.ops.magicdec.packed_int8_linear(*arguments)
            return out
        return packed_int8_linear(*arguments)


def packed_int8_linear(
    x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, out_features: int
) -> Tensor:
    assert x.dtype == torch.bfloat16
    x = x.contiguous()
    width = x.shape[-1]
    out = torch.empty(*x.shape[:-1], out_features, dtype=torch.bfloat16)
    room = torch.empty_like(x)  # scratch: the kernel reorders the activations into it
    library().magicdec_linear_int8(
        x.data_ptr(), x.numel() // width, packed.data_ptr(), scale.data_ptr(), out_features, width,
        None if bias is None else bias.data_ptr(), room.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    return out


_library = torch.library.Library("magicdec", "FRAGMENT")
_library.define(
    "packed_int8_linear(Tensor x, Tensor packed, Tensor scale, Tensor? bias, int out_features) "
    "-> Tensor"
)
_library.impl("packed_int8_linear", packed_int8_linear, "CPU")


@torch.library.register_fake("magicdec::packed_int8_linear")
def _fake(
    x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, out_features: int
) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)
