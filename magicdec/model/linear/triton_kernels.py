"""Triton kernels: a few rows times numbers of 4 or 8 bits in groups, converted in registers, summed
in float32, whose inputs are divided by the matrix alone; and the rounding of rows to FP8. Imported
only where Triton is installed.
"""

from __future__ import annotations

import triton
import triton.language as tl


# Four bytes of a register at a time, as in triton.py: the bits 0x4B000000 | n are 2^23 + n in
# float32.
@triton.jit
def _bytes_as_bfloat16(numbers):
    """int8 numbers as bfloat16."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 u, a, b, c, d;
        .reg .f32 e, f, g, h;
        xor.b32 u, $2, 0x80808080;
        prmt.b32 a, u, 0x4B000000, 0x7650;
        prmt.b32 b, u, 0x4B000000, 0x7651;
        prmt.b32 c, u, 0x4B000000, 0x7652;
        prmt.b32 d, u, 0x4B000000, 0x7653;
        mov.b32 e, a;
        mov.b32 f, b;
        mov.b32 g, c;
        mov.b32 h, d;
        sub.f32 e, e, 0f4B000080;
        sub.f32 f, f, 0f4B000080;
        sub.f32 g, g, 0f4B000080;
        sub.f32 h, h, 0f4B000080;
        cvt.rn.bf16x2.f32 $0, f, e;
        cvt.rn.bf16x2.f32 $1, h, g;
        }""",
        "=r,=r,r",
        [numbers],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit(do_not_specialize=["num_rows"])
def multiply_groups(
    x,
    weight,
    scale,
    minimum,
    sums_of_x,
    out,
    parts,
    counters,
    num_rows,
    num_outputs,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    LEAST: tl.constexpr,
    HALVES_AS_BFLOAT16: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_FAST: tl.constexpr,
):
    """out [num_rows, num_outputs] = x [num_rows, WIDTH] times the transposed weight of a
    `GroupedLinear`. `sums_of_x` [num_rows, WIDTH / GROUP], float32, is read where there is a
    minimum. Numbers are exact in bfloat16: each group is a product of tensor cores, whose sum is
    then multiplied by the scales. STEP groups are a turn of the loop; groups are divided among
    SPLITS programs, of which the last adds up their `parts` [SPLITS, num_rows, num_outputs].
    IS_FAST: x is bfloat16 and a GPU is there; it
    then runs the assembly HALVES_AS_BFLOAT16. Grid: (tiles of rows, tiles of outputs, SPLITS), so
    that programs that read the same weights are neighbours."""
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_output = n < num_outputs
    is_row = m < num_rows
    GROUPS: tl.constexpr = WIDTH // GROUP
    SPLIT_GROUPS: tl.constexpr = ((GROUPS + STEP - 1) // STEP + SPLITS - 1) // SPLITS * STEP
    SPAN: tl.constexpr = GROUP * BITS // 8  # bytes of a group, or inputs that a byte's half has
    first = tl.program_id(2) * SPLIT_GROUPS
    last = tl.minimum(first + SPLIT_GROUPS, GROUPS)
    k = tl.arange(0, SPAN)
    numbers_at = weight + n.to(tl.int64)[:, None] * (WIDTH * BITS // 8) + k[None, :]
    x_at = x + m.to(tl.int64)[None, :] * WIDTH + k[:, None]
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    # Those of the next turn are loaded before this one's products, which would wait for them.
    scales = tl.load(scale + first * num_outputs + n, mask=is_output, other=0.0)
    for start in tl.range(first, last, STEP):
        for i in tl.static_range(STEP):
            g = start + i
            is_group = g < last
            here = is_output & (g + 1 < last)
            next_scales = tl.load(scale + (g + 1) * num_outputs + n, mask=here, other=0.0)
            mask = is_row[None, :] & is_group
            numbers = tl.load(numbers_at + g * SPAN, mask=is_output[:, None] & is_group, other=0)
            left = tl.load(x_at + g * GROUP, mask=mask, other=0.0)
            if BITS == 4:
                right = tl.load(x_at + g * GROUP + SPAN, mask=mask, other=0.0)
                if IS_FAST:
                    low, high = tl.inline_asm_elementwise(
                        HALVES_AS_BFLOAT16,
                        "=r,=r,=r,=r,r",
                        [numbers],
                        dtype=(tl.bfloat16, tl.bfloat16),
                        is_pure=True,
                        pack=4,
                    )
                else:
                    low = (numbers & 15).to(tl.float32) + LEAST
                    high = (numbers >> 4).to(tl.float32) + LEAST
                    left = left.to(tl.float32)
                    right = right.to(tl.float32)
                part = tl.dot(low, left, input_precision="ieee")
                part = tl.dot(high, right, part, input_precision="ieee")
            else:
                if IS_FAST:
                    wide = _bytes_as_bfloat16(numbers)
                else:
                    wide = numbers.to(tl.float32)
                    left = left.to(tl.float32)
                part = tl.dot(wide, left, input_precision="ieee")
            sums += part * scales.to(tl.float32)[:, None]
            scales = next_scales
            if minimum is not None:
                here = is_output & is_group
                minima = tl.load(minimum + g * num_outputs + n, mask=here, other=0.0).to(tl.float32)
                x_sums = tl.load(sums_of_x + m * GROUPS + g, mask=is_row & is_group, other=0.0)
                sums += minima[:, None] * x_sums[None, :]
    place = m.to(tl.int64)[None, :] * num_outputs + n[:, None]
    mask = is_row[None, :] & is_output[:, None]
    if SPLITS == 1:
        tl.store(out + place, sums.to(out.dtype.element_ty), mask=mask)
    else:
        size = num_rows.to(tl.int64) * num_outputs
        tl.store(parts + tl.program_id(2) * size + place, sums, mask=mask)
        tl.debug_barrier()  # every thread has stored
        counter = counters + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(counter, 1) == SPLITS - 1:
            tl.store(counter, 0)
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for i in tl.static_range(SPLITS):
                total += tl.load(
                    parts + i * size + place, mask=mask, other=0.0, cache_modifier=".cg"
                )
            tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def round_rows(rows, numbers, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """numbers [M, WIDTH], e4m3, = rows [M, WIDTH] / scale [M], to nearest; the largest number of a
    row becomes 448, the largest of e4m3. Grid: (M,)."""
    at = tl.program_id(0).to(tl.int64) * WIDTH
    k = tl.arange(0, BLOCK)
    most = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, WIDTH, BLOCK):
        x = tl.load(rows + at + start + k, mask=start + k < WIDTH, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(x), propagate_nan=tl.PropagateNan.ALL)
    row_scale = tl.div_rn(tl.max(most, 0), 448.0)
    tl.store(scale + tl.program_id(0), row_scale)
    divisor = tl.where(row_scale == 0, 1.0, row_scale)
    for start in tl.static_range(0, WIDTH, BLOCK):
        here = start + k < WIDTH
        x = tl.load(rows + at + start + k, mask=here, other=0.0).to(tl.float32)
        x = tl.minimum(tl.maximum(tl.div_rn(x, divisor), -448.0), 448.0)
        tl.store(numbers + at + start + k, x.to(tl.float8e4nv), mask=here)
