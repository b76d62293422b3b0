"""A Triton kernel for a few rows times int8 or int4 weights, converted in registers, summed in
float32. Imported only where Triton is installed. Inputs are divided by the matrix alone, so a row
has the same bits in any batch.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _int4_numbers(
    weight,
    scale,
    n,
    is_output,
    first,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Weights [BLOCK_N, BLOCK_K] of outputs n for inputs from `first` on, float32. A byte has
    two inputs, the even one in its lower half, as number + 8; past the last group are zeros."""
    g = first // GROUP + tl.arange(0, BLOCK_K // GROUP)
    i = tl.arange(0, GROUP // 2)
    is_there = is_output[:, None] & (g < WIDTH // GROUP)[None, :]
    scales = tl.load(scale + n[:, None] * (WIDTH // GROUP) + g[None, :], mask=is_there, other=0.0)
    groups = weight + (n[:, None] * (WIDTH // GROUP) + g[None, :])[:, :, None] * (GROUP // 2)
    both = tl.load(groups + i[None, None, :], mask=is_there[:, :, None], other=0)
    numbers = tl.join(both & 15, both >> 4).to(tl.float32) - 8.0
    return tl.reshape(numbers * scales.to(tl.float32)[:, :, None, None], (BLOCK_N, BLOCK_K))


@triton.jit(do_not_specialize=["num_rows"])
def multiply_rows(
    x,
    weight,
    scale,
    out,
    num_rows,
    num_outputs,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """out [num_rows, num_outputs] = x [num_rows, WIDTH] times the transposed weight: with GROUP
    inputs to a scale int4, [num_outputs, WIDTH / 2] bytes and scale [num_outputs, WIDTH /
    GROUP]; with GROUP 0 int8, [num_outputs, WIDTH] and scale [num_outputs]. All contiguous.
    Grid: (tiles of outputs, tiles of rows)."""
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_output = n < num_outputs
    is_row = m < num_rows
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, WIDTH, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        mask = is_row[:, None] & (k < WIDTH)[None, :]
        left = tl.load(x + m[:, None] * WIDTH + k[None, :], mask=mask, other=0.0)
        if GROUP:
            right = _int4_numbers(
                weight, scale, n, is_output, first, WIDTH, GROUP, BLOCK_N, BLOCK_K
            )
        else:
            mask = is_output[:, None] & (k < WIDTH)[None, :]
            right = tl.load(weight + n[:, None] * WIDTH + k[None, :], mask=mask, other=0)
        if INTERPRETED:  # the interpreter multiplies the bits of bfloat16 as integers
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        sums += tl.dot(left, tl.trans(right.to(left.dtype)), input_precision="ieee")
    if GROUP == 0:
        sums *= tl.load(scale + n, mask=is_output, other=0.0)[None, :]
    place = out + m[:, None] * num_outputs + n[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])
