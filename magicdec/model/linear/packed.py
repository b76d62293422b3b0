"""The kinds of linear layers: torch's own, with int8 weights, and with weights packed once for the
small GEMMs of decoding (`packed.cpp`).

Int8 layers have int8 weights and a float32 scale per output channel, y = (x w) * scale + bias, and
compute with torch's operators in any dtype on any device; activations are never quantised, and the
loader fills the weights (`checkpoint/quantization.py`). Packed layers have bfloat16, int8 or
float32 weights. CPUs without bfloat16 dot products widen them in registers. A call reads the
weights once for any number of rows. The result of a row is the same to the bit whatever other rows
are in the batch, so verification and decoding agree.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from magicdec.kernels.build import SHARED_HEADERS, load_library, share_openmp

SOURCE = Path(__file__).with_name("packed.cpp")
HEADERS = (
    SOURCE.with_suffix(".h"),
    SOURCE.with_name("packed_float32.h"),
    SOURCE.with_name("packed_amx.h"),
    SHARED_HEADERS / "arithmetic.h",
    SHARED_HEADERS / "amx.h",
    SHARED_HEADERS / "barrier.h",
    SHARED_HEADERS / "bf16.h",
    SHARED_HEADERS / "int8.h",
    SHARED_HEADERS / "wide.h",
)
WIDTH = 64  # output channels per block of packed weights
# By the dtype of the weights: a block's sizes before WIDTH by the number of inputs, its dtype, and
# the function that packs.
PACKERS: dict[torch.dtype, tuple[Callable[[int], tuple[int, ...]], torch.dtype, str]] = {
    torch.float32: (lambda width: (width,), torch.float32, "magicdec_pack_float32"),
    torch.bfloat16: (lambda width: (width // 2,), torch.int32, "magicdec_pack"),
    torch.int8: (lambda width: (2, width // 2), torch.uint8, "magicdec_pack_int8"),
}


class PackedLinear(nn.Module):
    """x [..., K] -> [..., N], with `weight` [N, K] in bfloat16 or float32, or in int8 with a
    float32 `scale` [N]; int8 takes x in bfloat16. Unless `adds_bias`, `bias` is stored here but
    added by the caller."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        adds_bias: bool = True,
        scale: Tensor | None = None,
    ) -> None:
        super().__init__()
        if weight.dtype not in PACKERS:
            raise ValueError(
                f"--linear packed needs bfloat16 or float32 weights, not {weight.dtype}"
            )
        # Padded: the kernels for bfloat16 and int8 multiply pairs of inputs.
        self.is_odd = weight.dtype != torch.float32 and weight.shape[1] % 2 == 1
        weight = (F.pad(weight, (0, 1)) if self.is_odd else weight).contiguous()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.scale = None if scale is None else nn.Parameter(scale, requires_grad=False)
        self.adds_bias = adds_bias
        blocks, width = -(-self.out_features // WIDTH), self.in_features
        shape, dtype, pack = PACKERS[weight.dtype]
        packed = torch.empty(blocks, *shape(width), WIDTH, dtype=dtype)
        self.packed = nn.Parameter(packed, requires_grad=False)
        getattr(library(), pack)(weight.data_ptr(), self.out_features, width, packed.data_ptr())

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.adds_bias else None
        x = F.pad(x, (0, 1)) if self.is_odd else x
        return packed_linear(x, self.packed, self.scale, bias, self.out_features)


def padding_bytes(packed: Tensor, out_features: int) -> int:
    """The bytes of a packed weight [blocks, ...] that belong to no output channel."""
    num_bytes, channels = packed.numel() * packed.element_size(), len(packed) * WIDTH
    return num_bytes // channels * (channels - out_features)


@cache
def library(*flags: str) -> ctypes.CDLL:
    """The library of `packed.cpp`, compiled with `flags` in addition to the usual ones."""
    share_openmp()
    native = load_library(SOURCE, ("-fopenmp", *flags), HEADERS)
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    native.magicdec_pack_float32.argtypes = (pointer, size, size, pointer)
    native.magicdec_pack.argtypes = (pointer, size, size, pointer)
    for multiply in (native.magicdec_linear_float32, native.magicdec_linear):
        multiply.argtypes = (pointer, size, pointer, size, size, pointer, pointer, pointer)
    native.magicdec_pack_int8.argtypes = (pointer, size, size, pointer)
    native.magicdec_linear_int8.argtypes = (
        pointer, size, pointer, pointer, size, size, pointer, pointer, pointer,
    )  # fmt: skip
    return native


def packed_linear(
    x: Tensor, packed: Tensor, scale: Tensor | None, bias: Tensor | None, out_features: int
) -> Tensor:
    """The result of a row is the same to the bit whatever other rows are in the batch."""
    assert x.dtype == (torch.float32 if packed.dtype == torch.float32 else torch.bfloat16)
    x = x.contiguous()
    width = x.shape[-1]
    out = torch.empty(*x.shape[:-1], out_features, dtype=x.dtype)
    rows, bias_at = x.numel() // width, None if bias is None else bias.data_ptr()
    room = torch.empty(x.numel())  # scratch: the kernels widen or reorder the activations into it
    if scale is not None:
        library().magicdec_linear_int8(
            x.data_ptr(), rows, packed.data_ptr(), scale.data_ptr(), out_features, width, bias_at,
            room.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out
    is_pairs = packed.dtype == torch.int32
    multiply = library().magicdec_linear if is_pairs else library().magicdec_linear_float32
    multiply(
        x.data_ptr(), rows, packed.data_ptr(), out_features, width, bias_at, room.data_ptr(),
        out.data_ptr(),
    )  # fmt: skip
    return out


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


Linear = nn.Linear | PackedLinear | Int8Linear
"""x [..., K] -> [..., N]. `bias` is None or a parameter, added by `forward` or by its caller."""


Reduce = Callable[[Tensor], Tensor]
"""All-reduce: sum a partial result over the ranks of the tensor-parallel group."""


class PartialLinear(nn.Linear):
    """A linear layer whose input features are sharded over ranks. `forward` leaves out the bias,
    which is added once, after the all-reduce."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def row_parallel(x: Tensor, linear: Linear, reduce: Reduce) -> Tensor:
    """A row-parallel layer: a `PartialLinear` of any kind, the all-reduce, and the bias."""
    partial: Tensor = reduce(linear(x))
    return partial if linear.bias is None else partial + linear.bias


def exchange(model: nn.Module, make: Callable[[Linear], Linear]) -> None:
    """Replace every linear layer of `model` by `make(layer)`, one at a time to save memory."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear | Int8Linear):
                setattr(module, name, make(child))


def to_int8(linear: Linear) -> Linear:
    """An int8 layer of the same size, with empty weights and scales."""
    assert isinstance(linear, nn.Linear)
    return Int8Linear(linear, adds_bias=not isinstance(linear, PartialLinear))


def pack(linear: Linear) -> Linear:
    """The same layer with packed weights. Raises ValueError unless they are bfloat16 or int8."""
    if isinstance(linear, Int8Linear):
        return PackedLinear(linear.weight, linear.bias, linear.adds_bias, linear.scale)
    assert isinstance(linear, nn.Linear)
    return PackedLinear(linear.weight, linear.bias, not isinstance(linear, PartialLinear))
