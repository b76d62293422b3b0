"""Linear layers with bfloat16 weights packed once for the small GEMMs of decoding (`packed.cpp`),
on CPUs with bfloat16 dot products.

Owns the packed layout. A call reads the weights once for any number of rows. The result of a row is
the same to the bit whatever other rows are in the batch, so verification and decoding agree.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from magicdec.kernels.build import SHARED_HEADERS, load_library, share_openmp

SOURCE = Path(__file__).with_name("packed.cpp")
HEADERS = (SOURCE.with_suffix(".h"), SHARED_HEADERS / "bf16.h", SHARED_HEADERS / "int8.h")
WIDTH = 64  # output channels per block of packed weights


class PackedLinear(nn.Module):
    """x [..., K] -> [..., N]. Unless `adds_bias`, `bias` is stored here but added by the caller."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, adds_bias: bool = True) -> None:
        super().__init__()
        if weight.dtype != torch.bfloat16:
            raise ValueError(f"--linear packed needs bfloat16 weights, not {weight.dtype}")
        self.is_odd = weight.shape[1] % 2 == 1  # padded: the kernel multiplies pairs of inputs
        weight = F.pad(weight, (0, 1)) if self.is_odd else weight
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.adds_bias = adds_bias
        blocks = -(-self.out_features // WIDTH)
        packed = torch.empty(blocks, self.in_features // 2, WIDTH, dtype=torch.int32)
        self.packed = nn.Parameter(packed, requires_grad=False)
        rows = weight.contiguous()
        library().magicdec_pack(
            rows.data_ptr(), self.out_features, self.in_features, packed.data_ptr()
        )

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.adds_bias else None
        x = F.pad(x, (0, 1)) if self.is_odd else x
        if torch.compiler.is_compiling():
            out: Tensor = torch.ops.magicdec.packed_linear(x, self.packed, bias, self.out_features)
            return out
        # Called directly: torch's dispatcher would take about as long as the kernel.
        return packed_linear(x, self.packed, bias, self.out_features)


@cache
def library(*flags: str) -> ctypes.CDLL:
    """The library of `packed.cpp`, compiled with `flags` in addition to the usual ones."""
    share_openmp()
    found = load_library(SOURCE, ("-fopenmp", *flags), HEADERS)
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    found.magicdec_pack.argtypes = (pointer, size, size, pointer)
    found.magicdec_linear.argtypes = (pointer, size, pointer, size, size, pointer, pointer)
    found.magicdec_pack_int8.argtypes = (pointer, size, size, pointer)
    found.magicdec_linear_int8.argtypes = (
        pointer, size, pointer, pointer, size, size, pointer, pointer, pointer,
    )  # fmt: skip
    return found


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    assert x.dtype == torch.bfloat16
    x = x.contiguous()
    width = x.shape[-1]
    out = torch.empty(*x.shape[:-1], out_features, dtype=torch.bfloat16)
    library().magicdec_linear(
        x.data_ptr(), x.numel() // width, packed.data_ptr(), out_features, width,
        None if bias is None else bias.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    return out


_library = torch.library.Library("magicdec", "FRAGMENT")
_library.define("packed_linear(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor")
_library.impl("packed_linear", packed_linear, "CPU")


@torch.library.register_fake("magicdec::packed_linear")
def _fake(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)
