"""Elementwise operations in Triton for GPUs: a launch replaces up to eight torch operators.
Interpreted on a CPU, for tests.

Grids, tiles, strides and allocations follow from shapes, so that a CUDA graph can capture a call
after a warm-up.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from magicdec.config.capabilities import Requirements
from magicdec.kernels.build import load_kernels, next_power
from magicdec.model.elementwise.delta import (
    CHUNK,
    NORM_EPS,
    DeltaTokens,
    HeldLayer,
    StatePlaces,
    keep_shared,
    kernel_tensors,
)
from magicdec.model.elementwise.operators import Elementwise

STORAGE = (torch.float32, torch.bfloat16)
WARP = 32  # threads
ALIGNED = 16  # elements; with strides in multiples of this Triton emits vectorized loads
VECTOR = 8  # elements per thread: 16 bytes of bfloat16
PAIRS = 256  # pairs of elements that a program rotates at most
GATED = 512  # MLP units per program at most
COLUMNS = 32  # of a state of linear attention per program at most
PART = 16  # of a product's columns, or terms, at a time: operands and sums fit into registers
FEW_TOKENS = 16  # of a forward, each of which has programs of its own
TOKENS = 8  # of a prompt per program
PRECISION = "tf32x3"  # of products in float32: three on tensor cores, some 2^-22 of a number


@cache
def kernels(device: str) -> ModuleType:
    module = "magicdec.model.elementwise.triton_kernels"
    return load_kernels(module, "--elementwise triton", device)


def is_interpreted(x: Tensor) -> bool:
    return x.device.type == "cpu"


class TritonElementwise(Elementwise):
    """Elementwise operations on float32 or bfloat16, computed in float32. Rotates in place. Only
    the last dimension must be contiguous."""

    requirements = Requirements("triton", is_interpreted_on_cpu=True)
    has_views = True

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = x.new_empty(x.shape)
        _launch_norm(x, None, weight, eps, out, out)
        return out

    def add_rms_norm(
        self, x: Tensor, y: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        assert x.shape == y.shape and x.dtype == y.dtype
        total = x.new_empty(x.shape)
        out = x.new_empty(x.shape)
        _launch_norm(x, y, weight, eps, total, out)
        return total, out

    def rotate(self, heads: Tensor, table: Tensor, num_rotated: int, interleaved: bool) -> Tensor:
        assert heads.dtype in STORAGE and heads.stride(3) == 1
        assert table.is_contiguous() and table.dtype == torch.float32
        rows, num_tokens = heads.shape[:2]
        pairs = table.shape[-1]
        block_h, block_p, num_warps = choose_tile(num_rotated, pairs)
        kernels(heads.device.type).rotate_heads[(rows * num_tokens, -(-num_rotated // block_h))](
            heads,
            table,
            num_tokens,
            *heads.stride()[:3],
            HEADS=num_rotated,
            PAIRS=pairs,
            STEP=2 if interleaved else 1,
            APART=1 if interleaved else pairs,
            BLOCK_H=block_h,
            BLOCK_P=block_p,
            INTERPRETED=is_interpreted(heads),
            num_warps=num_warps,
        )
        return heads[:, :, :num_rotated]

    def silu_gate(self, gate_up: Tensor) -> Tensor:
        assert gate_up.dtype in STORAGE
        width = gate_up.shape[-1] // 2
        x = _adjacent(gate_up.reshape(-1, 2 * width))
        out = gate_up.new_empty(*gate_up.shape[:-1], width)
        block = min(GATED, next_power(width))
        kernels(x.device.type).gate_rows[(len(x), -(-width // block))](
            x,
            out,
            x.stride(0),
            WIDTH=width,
            BLOCK=block,
            INTERPRETED=is_interpreted(x),
            num_warps=_warps(block),
        )
        return out

    def delta_convolve(self, tokens: DeltaTokens, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        num_keys, num_values, key_dim, value_dim = tokens.sizes
        num_rows, num_new = tokens.channels.shape[:2]
        q = before.new_empty(num_rows, num_new, num_keys, key_dim)
        k = before.new_empty(q.shape)
        v = before.new_empty(num_rows, num_new, num_values, value_dim)
        weight = tokens.weight.contiguous()
        block = next_power(max(key_dim, value_dim))
        num_tokens = 1 if num_new <= FEW_TOKENS else TOKENS
        grid = (num_rows * -(-num_new // num_tokens), 2 * num_keys + num_values)
        kernels(before.device.type).convolve_rows[grid](
            tokens.channels.contiguous(),
            before.contiguous(),
            weight,
            q,
            k,
            v,
            num_new,
            LENGTH=weight.shape[1],
            KEY_HEADS=num_keys,
            HEADS=num_values,
            KEY_SIZE=key_dim,
            SIZE=value_dim,
            BLOCK=block,
            TOKENS=num_tokens,
            SCALE=key_dim**-0.5,
            EPS=NORM_EPS,
            num_warps=_warps(block),
        )
        return q, k, v

    def delta_chunks(
        self, state: Tensor, q: Tensor, k: Tensor, v: Tensor, tokens: DeltaTokens
    ) -> tuple[Tensor, Tensor]:
        num_keys, num_values, key_dim, value_dim = tokens.sizes
        num_rows, num_new = v.shape[:2]
        heads = num_rows * num_values
        num_chunks = -(-num_new // CHUNK)
        q, k, v, decay, rate = (x.contiguous() for x in (q, k, v, tokens.decay, tokens.rate))
        after = state.clone(memory_format=torch.contiguous_format)
        out = v.new_empty(v.shape)
        solutions = v.new_empty(heads, num_chunks, CHUNK, CHUNK)
        scores = v.new_empty(solutions.shape)
        module = kernels(v.device.type)
        module.chunk_products[(heads, num_chunks)](
            q,
            k,
            decay,
            rate,
            solutions,
            scores,
            num_new,
            KEY_HEADS=num_keys,
            HEADS=num_values,
            KEY_SIZE=key_dim,
            CHUNK=CHUNK,
            DEPTH=PART,
            PRECISION=PRECISION,
            num_warps=4,
        )
        module.chunk_solutions[(heads, num_chunks)](
            solutions, rate, num_new, HEADS=num_values, CHUNK=CHUNK, num_warps=2
        )
        module.chunk_rows[(heads, -(-value_dim // PART))](
            after,
            q,
            k,
            v,
            decay,
            solutions,
            scores,
            out,
            num_new,
            KEY_HEADS=num_keys,
            HEADS=num_values,
            KEY_SIZE=key_dim,
            SIZE=value_dim,
            BLOCK_V=PART,
            CHUNK=CHUNK,
            DEPTH=PART,
            PRECISION=PRECISION,
            num_warps=4,
            num_stages=1,
        )
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
        num_keys, num_values, key_dim, value_dim = tokens.sizes
        num_rows, num_new = v.shape[:2]
        out = v.new_empty(num_rows, num_new, num_values, value_dim)
        block_k = next_power(key_dim)
        block_v = min(COLUMNS, next_power(value_dim))
        kernels(v.device.type).delta_rows[(num_rows * num_values, -(-value_dim // block_v))](
            *kernel_tensors(held, places, q, k, v, tokens),
            out,
            num_new,
            SLOTS=held.keys.shape[1],
            KEY_HEADS=num_keys,
            HEADS=num_values,
            KEY_SIZE=key_dim,
            SIZE=value_dim,
            BLOCK_K=block_k,
            BLOCK_V=block_v,
            num_warps=_warps(block_k * block_v),
            # No products within sums: a state that is computed again has the same bits.
            enable_fp_fusion=False,
        )
        keep_shared(held, places, k, tokens)
        return out


def choose_tile(num_heads: int, pairs: int) -> tuple[int, int, int]:
    """(heads, pairs of a head, warps) of a `rotate_heads` program: powers of two, at least as
    many pairs as threads."""
    block_p = next_power(pairs)
    least = max(1, WARP // block_p)
    most = max(1, PAIRS // block_p)
    block_h = max(least, min(most, next_power(num_heads)))
    return block_h, block_p, _warps(block_h * block_p)


def _launch_norm(
    x: Tensor, y: Tensor | None, weight: Tensor, eps: float, total: Tensor, out: Tensor
) -> None:
    """x and y [..., N, W]. `total`, written if there is a `y`, and `out` are contiguous."""
    assert x.dtype in STORAGE and weight.is_contiguous()
    inner, width = x.shape[-2:]
    block = next_power(width)
    adds = y is not None
    unit = ALIGNED if width % ALIGNED == 0 else 1  # aligned rows allow vectorized loads
    x = _adjacent(x.reshape(-1, inner, width), unit)
    y = x if y is None else _adjacent(y.reshape(x.shape), unit)
    strides = [stride // unit for t in (x, y) for stride in t.stride()[:2]]
    kernels(x.device.type).norm_rows[(x.shape[0] * inner,)](
        x,
        y,
        weight,
        total,
        out,
        eps,
        inner,
        *strides,
        WIDTH=width,
        UNIT=unit,
        BLOCK=block,
        ADDS=adds,
        INTERPRETED=is_interpreted(x),
        num_warps=_warps(block),
    )


def _warps(numbers: int) -> int:
    return max(1, min(16, numbers // (WARP * VECTOR)))


def _adjacent(x: Tensor, unit: int = 1) -> Tensor:
    """x, maybe copied: contiguous last dimension, rows at multiples of `unit` elements."""
    begins = (x.storage_offset(), *x.stride()[:-1])
    fits = x.stride(-1) == 1 and all(begin % unit == 0 for begin in begins)
    return x if fits else x.clone(memory_format=torch.contiguous_format)
