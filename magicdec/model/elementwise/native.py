"""Elementwise operations in C++ for bfloat16 and float32 on CPUs (`native.cpp`): a call replaces up
to ten torch operators.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from magicdec.config.capabilities import Requirements
from magicdec.kernels.build import SHARED_HEADERS, load_library, share_openmp
from magicdec.model.elementwise.delta import (
    DeltaTokens,
    HeldLayer,
    StatePlaces,
    keep_shared,
    kernel_tensors,
)
from magicdec.model.elementwise.operators import Elementwise

SOURCE = Path(__file__).with_name("native.cpp")
HEADERS = (SOURCE.with_name("rows.h"), SHARED_HEADERS / "arithmetic.h")
STORAGE = (torch.bfloat16, torch.float32)
_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_int64
_FLOAT = ctypes.c_float
_FLAG = ctypes.c_int
SILU, GELU, CLAMPED = range(3)  # `Gate` of rows.h


@cache
def library() -> ctypes.CDLL:
    share_openmp()
    native = load_library(SOURCE, ("-fopenmp",), HEADERS)
    native.magicdec_rms_norm.argtypes = (
        _FLAG,
        _POINTER,
        _SIZE,
        _POINTER,
        _FLOAT,
        _SIZE,
        _SIZE,
        _POINTER,
    )
    native.magicdec_rotate.argtypes = (
        _FLAG,
        _POINTER,
        _POINTER,
        _SIZE,
        _SIZE,
        _SIZE,
        _SIZE,
        _SIZE,
        _FLAG,
    )
    native.magicdec_gate.argtypes = (
        _FLAG,
        _SIZE,
        _FLOAT,
        _FLOAT,
        _POINTER,
        _SIZE,
        _SIZE,
        _POINTER,
    )
    native.magicdec_route.argtypes = (
        _FLAG,
        _POINTER,
        _SIZE,
        _SIZE,
        _SIZE,
        _FLAG,
        _POINTER,
        _POINTER,
    )
    native.magicdec_weigh.argtypes = (_FLAG, _POINTER, _SIZE, _POINTER)
    native.magicdec_add_expert.argtypes = (
        _FLAG,
        _POINTER,
        _POINTER,
        _POINTER,
        _POINTER,
        _SIZE,
        _SIZE,
        _POINTER,
    )
    return native


@cache
def delta_library(name: str) -> ctypes.CDLL:
    """That of `name`.cpp, a part of linear attention."""
    share_openmp()
    headers = tuple(SHARED_HEADERS / header for header in ("wide.h", "arithmetic.h"))
    return load_library(SOURCE.with_name(f"{name}.cpp"), ("-fopenmp",), headers)


def call_delta(name: str, sizes: Sequence[int], tensors: Sequence[Tensor]) -> None:
    """Call the function of `delta_library(name)`, whose arguments are sizes and tensors."""
    assert all(x.is_contiguous() for x in tensors), "addresses follow from the sizes"
    function = delta_library(name)[f"magicdec_{name}"]
    pointers = [_POINTER(x.data_ptr()) for x in tensors]
    function((_SIZE * len(sizes))(*sizes), *pointers)


def check(x: Tensor) -> None:
    assert x.dtype in STORAGE and x.device.type == "cpu", "refused before the run"


class NativeElementwise(Elementwise):
    """Elementwise operations on a CPU, in float32 with one rounding. Rotates in place."""

    requirements = Requirements(
        "native", devices=("cpu",), dtypes=("bfloat16", "float32"), needs_compiler=True
    )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        check(x)
        x = x.contiguous()
        out = torch.empty_like(x)
        width = x.shape[-1]
        library().magicdec_rms_norm(
            x.dtype == torch.float32,
            x.data_ptr(),
            width,
            weight.data_ptr(),
            eps,
            x.numel() // width,
            width,
            out.data_ptr(),
        )
        return out

    def rotate(self, heads: Tensor, table: Tensor, num_rotated: int, interleaved: bool) -> Tensor:
        check(heads)
        assert heads.is_contiguous() and table.is_contiguous() and table.dtype == torch.float32
        rows, num_tokens, num_heads, size = heads.shape
        library().magicdec_rotate(
            heads.dtype == torch.float32,
            heads.data_ptr(),
            table.data_ptr(),
            rows * num_tokens,
            num_heads,
            size,
            num_rotated,
            table.shape[-1],
            interleaved,
        )
        return heads[:, :, :num_rotated]

    def silu_gate(self, gate_up: Tensor) -> Tensor:
        return self._gate(gate_up, SILU)

    def gelu_gate(self, gate_up: Tensor) -> Tensor:
        return self._gate(gate_up, GELU)

    def clamped_gate(self, gate_up: Tensor, limit: float, alpha: float) -> Tensor:
        return self._gate(gate_up, CLAMPED, limit, alpha)

    def delta_convolve(self, tokens: DeltaTokens, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        check(tokens.weight)
        num_keys, num_values, key_dim, value_dim = tokens.sizes
        num_rows, num_new = tokens.channels.shape[:2]
        q = torch.empty(num_rows, num_new, num_keys, key_dim)
        k = torch.empty_like(q)
        v = torch.empty(num_rows, num_new, num_values, value_dim)
        weight = tokens.weight.contiguous()
        is_float32 = weight.dtype == torch.float32
        sizes = (num_rows, num_new, *tokens.sizes, weight.shape[1], is_float32)
        given = (tokens.channels.contiguous(), before.contiguous(), weight)
        call_delta("delta_convolve", sizes, (*given, q, k, v))
        return q, k, v

    def delta_chunks(
        self, state: Tensor, q: Tensor, k: Tensor, v: Tensor, tokens: DeltaTokens
    ) -> tuple[Tensor, Tensor]:
        after = state.clone(memory_format=torch.contiguous_format)
        out = torch.empty(v.shape)
        given = [x.contiguous() for x in (q, k, v, tokens.decay, tokens.rate)]
        assert all(x.dtype == torch.float32 for x in (after, *given)), "as states are kept"
        call_delta("delta_chunks", (*v.shape[:2], *tokens.sizes), (after, *given, out))
        return out, after

    def delta_steps(
        self,
        held: HeldLayer,
        places: StatePlaces,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tokens: DeltaTokens,
    ) -> Tensor:
        out = torch.empty(v.shape)
        sizes = (*v.shape[:2], *tokens.sizes, held.keys.shape[1])
        call_delta("delta_steps", sizes, (*kernel_tensors(held, places, q, k, v, tokens), out))
        keep_shared(held, places, k, tokens)
        return out

    def route(self, logits: Tensor, num_used: int, renormalises: bool) -> tuple[Tensor, Tensor]:
        check(logits)
        logits = logits.contiguous()
        rows, num_experts = logits.shape
        chosen = torch.empty(rows, num_used, dtype=torch.int64)
        weights = torch.empty(rows, num_used)
        library().magicdec_route(
            logits.dtype == torch.float32,
            logits.data_ptr(),
            rows,
            num_experts,
            num_used,
            renormalises,
            chosen.data_ptr(),
            weights.data_ptr(),
        )
        return chosen, weights

    def weigh(self, logits: Tensor) -> Tensor:
        check(logits)
        logits = logits.contiguous()
        weights = torch.empty(logits.shape)
        is_float32 = logits.dtype == torch.float32
        library().magicdec_weigh(is_float32, logits.data_ptr(), len(logits), weights.data_ptr())
        return weights

    def add_expert(
        self, total: Tensor, tokens: Tensor, out: Tensor, bias: Tensor | None, weights: Tensor
    ) -> None:
        check(out)
        assert out.is_contiguous() and tokens.is_contiguous() and total.is_contiguous()
        weights = weights.contiguous()
        library().magicdec_add_expert(
            out.dtype == torch.float32,
            out.data_ptr(),
            None if bias is None else bias.data_ptr(),
            tokens.data_ptr(),
            weights.data_ptr(),
            *out.shape,
            total.data_ptr(),
        )

    def _gate(self, gate_up: Tensor, kind: int, limit: float = 0.0, alpha: float = 0.0) -> Tensor:
        check(gate_up)
        width = gate_up.shape[-1] // 2
        gate_up = gate_up.contiguous()
        out = gate_up.new_empty(*gate_up.shape[:-1], width)
        library().magicdec_gate(
            gate_up.dtype == torch.float32,
            kind,
            limit,
            alpha,
            gate_up.data_ptr(),
            out.numel() // width,
            width,
            out.data_ptr(),
        )
        return out
