"""Linear layers with weights packed once for the small GEMMs of decoding (`packed.cpp`): bfloat16
on CPUs with bfloat16 dot products, float32 on every CPU.

Owns the packed layouts. A call reads the weights once for any number of rows. The result of a row
is the same to the bit whatever other rows are in the batch, so verification and decoding agree.
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
HEADERS = (
    SOURCE.with_suffix(".h"),
    SOURCE.with_name("packed_float32.h"),
    SOURCE.with_name("packed_amx.h"),
    SHARED_HEADERS / "amx.h",
    SHARED_HEADERS / "bf16.h",
    SHARED_HEADERS / "int8.h",
)
WIDTH = 64  # output channels per block of packed weights


class PackedLinear(nn.Module):
    """x [..., K] -> [..., N]. Unless `adds_bias`, `bias` is stored here but added by the caller."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, adds_bias: bool = True) -> None:
        super().__init__()
        is_pairs = weight.dtype == torch.bfloat16
        if not is_pairs and weight.dtype != torch.float32:
            raise ValueError(
                f"--linear packed needs bfloat16 or float32 weights, not {weight.dtype}"
            )
        # Padded: the kernel for bfloat16 multiplies pairs of inputs.
        self.is_odd = is_pairs and weight.shape[1] % 2 == 1
        weight = F.pad(weight, (0, 1)) if self.is_odd else weight
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.adds_bias = adds_bias
        blocks = -(-self.out_features // WIDTH)
        if is_pairs:
            packed = torch.empty(blocks, self.in_features // 2, WIDTH, dtype=torch.int32)
        else:
            packed = torch.empty(blocks, self.in_features, WIDTH)
        self.packed = nn.Parameter(packed, requires_grad=False)
        rows = weight.contiguous()
        pack = library().magicdec_pack if is_pairs else library().magicdec_pack_float32
        pack(rows.data_ptr(), self.out_features, self.in_features, packed.data_ptr())

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.adds_bias else None
        x = F.pad(x, (0, 1)) if self.is_odd else x
        if torch.compiler.is_compiling():
            out: Tensor = torch.ops.magicdec.packed_linear(x, self.packed, bias, self.out_features)
            return out
        # Called directly: torch's dispatcher would take about as long as the kernel.
        return packed_linear(x, self.packed, bias, self.out_features)


def padding_bytes(packed: Tensor, out_features: int) -> int:
    """The bytes of a packed weight [blocks, ...] that belong to no output channel."""
    num_bytes, channels = packed.numel() * packed.element_size(), len(packed) * WIDTH
    return num_bytes // channels * (channels - out_features)


@cache
def library(*flags: str) -> ctypes.CDLL:
    """The library of `packed.cpp`, compiled with `flags` in addition to the usual ones."""
    share_openmp()
    found = load_library(SOURCE, ("-fopenmp", *flags), HEADERS)
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    found.magicdec_pack_float32.argtypes = (pointer, size, size, pointer)
    found.magicdec_linear_float32.argtypes = (pointer, size, pointer, size, size, pointer, pointer)
    if not hasattr(found, "magicdec_linear"):
        return found  # a CPU without bfloat16 dot products
    found.magicdec_pack.argtypes = (pointer, size, size, pointer)
    found.magicdec_linear.argtypes = (pointer, size, pointer, size, size, pointer, pointer)
    found.magicdec_pack_int8.argtypes = (pointer, size, size, pointer)
    found.magicdec_linear_int8.argtypes = (
        pointer, size, pointer, pointer, size, size, pointer, pointer, pointer,
    )  # fmt: skip
    return found


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    is_pairs = packed.dtype == torch.int32
    assert x.dtype == (torch.bfloat16 if is_pairs else torch.float32)
    x = x.contiguous()
    width = x.shape[-1]
    out = torch.empty(*x.shape[:-1], out_features, dtype=x.dtype)
    multiply = library().magicdec_linear if is_pairs else library().magicdec_linear_float32
    multiply(
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
