"""What lies between a layer's matrix products, for bfloat16 on CPUs (`elementwise.cpp`): norm,
rotation, gated activation.

Owns the calling of that library. Used by a model that was packed (`Transformer.pack`); any other
takes torch's operators, which do the same in ten times the calls.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from magicdec.build import FAST_MATH, load_library, share_openmp

SOURCE = Path(__file__).with_name("elementwise.cpp")
HEADERS = (SOURCE.parents[1] / "arithmetic.h",)
_POINTER, _SIZE, _FLOAT, _FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int


@cache
def library() -> ctypes.CDLL:
    share_openmp()
    found = load_library(SOURCE, (*FAST_MATH, "-fopenmp"), HEADERS)
    found.magicdec_rms_norm.argtypes = (
        _POINTER, _SIZE, _POINTER, _FLOAT, _SIZE, _SIZE, _POINTER,
    )  # fmt: skip
    found.magicdec_rotate.argtypes = (
        _POINTER, _POINTER, _SIZE, _SIZE, _SIZE, _SIZE, _SIZE, _FLAG,
    )  # fmt: skip
    found.magicdec_silu_gate.argtypes = (_POINTER, _SIZE, _SIZE, _POINTER)
    return found


def serves(x: Tensor) -> bool:
    """Whether `x` is what the library takes; tracing wants torch's operators."""
    return (
        x.dtype == torch.bfloat16 and x.device.type == "cpu" and not torch.compiler.is_compiling()
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., W] / sqrt(mean of squares + eps) * weight [W]."""
    x = x.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    library().magicdec_rms_norm(
        x.data_ptr(), width, weight.data_ptr(), eps, x.numel() // width, width, out.data_ptr()
    )
    return out


def rotate(heads: Tensor, table: Tensor, num_rotated: int, interleaved: bool) -> None:
    """Turn the first `num_rotated` of heads [B, T, N, D] in place, by table [B, T, 2, R/2]
    float32: the first R of their dimensions."""
    assert heads.is_contiguous() and table.is_contiguous() and table.dtype == torch.float32
    rows, num_tokens, num_heads, size = heads.shape
    library().magicdec_rotate(
        heads.data_ptr(), table.data_ptr(), rows * num_tokens, num_heads, size, num_rotated,
        table.shape[-1], interleaved,
    )  # fmt: skip


def silu_gate(gate_up: Tensor) -> Tensor:
    """silu of the first half of gate_up [..., 2F] times the second: [..., F]."""
    width = gate_up.shape[-1] // 2
    gate_up = gate_up.contiguous()
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    library().magicdec_silu_gate(gate_up.data_ptr(), out.numel() // width, width, out.data_ptr())
    return out
