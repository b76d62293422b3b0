"""Numbers in groups times a few rows in Triton: a launch reads stored weights once. Interpreted on
a CPU, for tests. Grid and tiles follow from shapes, so that a CUDA graph can capture a call after a
warm-up.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from magicdec.kernels.build import load_kernels, next_power
from magicdec.model.linear.choices import choices_on, median_seconds
from magicdec.model.linear.tiles import GROUPS_OF_128, MOST_ROWS, Tile, bucket, tiles_for

if TYPE_CHECKING:
    from magicdec.model.linear.grouped import NumberFormat

STORAGE = (torch.float32, torch.bfloat16)
# Of products in groups (an H200, docs/log/gpu.md): programs of FEWEST_OUTPUTS outputs, below which
# groups are divided.
PROGRAMS = 2048
MOST_SPLITS = 4
FEWEST_OUTPUTS = 32
MOST_TILES = 1 << 16
MOST_INPUTS = 4096  # of a row that are rounded to FP8 at a time

# Of four bytes of a register at a time: the bits 0x4300 | n are 128 + n in bfloat16, n below 128.
HALVES = """{
    .reg .b32 a, b, c, d, one, zero;
    mov.b32 one, 0x3F803F80;
    mov.b32 zero, ZERO;
    prmt.b32 a, $4, 0, 0x4140;
    prmt.b32 b, $4, 0, 0x4342;
    shr.u32 c, a, 4;
    shr.u32 d, b, 4;
    lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 b, b, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 c, c, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 d, d, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, a, one, zero;
    fma.rn.bf16x2 $1, b, one, zero;
    fma.rn.bf16x2 $2, c, one, zero;
    fma.rn.bf16x2 $3, d, one, zero;
}"""


def added_to_halves(least: int) -> int:
    """The bits of bfloat16 -(128 - least), for `least` 0 to -127."""
    return 0xC300 - least


def halves_as_bfloat16(least: int) -> str:
    """Assembly that makes the numbers in the lower and in the upper halves of bytes, plus `least`,
    bfloat16."""
    zero = added_to_halves(least)
    return HALVES.replace("ZERO", f"0x{zero:04X}{zero:04X}")


@cache
def is_installed() -> bool:
    return find_spec("triton") is not None


@cache
def kernels(device: str) -> ModuleType:
    return load_kernels("magicdec.model.linear.triton_kernels", "--draft_weights", device)


def serves(device: str, num_rows: int, dtype: torch.dtype) -> bool:
    """Whether `multiply_groups` is meant for `num_rows` rows. With more, weights are converted once
    and multiplied by torch, and so are all without Triton."""
    return device == "cuda" and num_rows <= MOST_ROWS and dtype in STORAGE and is_installed()


def multiply_groups(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    minimum: Tensor | None,
    numbers: NumberFormat,
    tile: Tile | None = None,
) -> Tensor:
    """x [..., K] -> [..., N] in x's dtype, without bias, with the tensors of a `GroupedLinear`.
    `tile`: one of `tiles_for` its rows."""
    assert x.dtype in STORAGE and weight.is_contiguous() and scale.is_contiguous()
    x = x.contiguous()
    num_outputs = len(weight)
    width = x.shape[-1]
    num_rows = x.numel() // width
    out = x.new_empty(*x.shape[:-1], num_outputs)
    if tile is None:
        tile = chosen_tile(x, weight, scale, minimum, numbers)
    tiles = -(-num_outputs // tile.outputs)
    row_tiles = -(-num_rows // tile.rows)
    # By the matrix alone: a row has the same sums whatever the number of rows.
    splits = min(MOST_SPLITS, next_power(-(-PROGRAMS * FEWEST_OUTPUTS // num_outputs)))
    sums_of_x = None
    if minimum is not None:
        sums_of_x = x.view(num_rows, -1, numbers.group).sum(2, dtype=torch.float32)
    parts = None
    counters = None
    if splits > 1:
        parts = x.new_empty(splits, num_rows, num_outputs, dtype=torch.float32)
        counters = counters_on(x.device, tiles * row_tiles)
    kernels(x.device.type).multiply_groups[row_tiles, tiles, splits](
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
        WIDTH=width,
        GROUP=numbers.group,
        BITS=numbers.bits,
        LEAST=numbers.least,
        HALVES_AS_BFLOAT16=halves_as_bfloat16(numbers.least),
        BLOCK_M=tile.rows,
        BLOCK_N=tile.outputs,
        STEP=1 if x.dtype == torch.float32 else min(4, max(1, 128 // numbers.group)),
        SPLITS=splits,
        IS_FAST=x.device.type != "cpu" and x.dtype == torch.bfloat16,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def chosen_tile(
    x: Tensor, weight: Tensor, scale: Tensor, minimum: Tensor | None, numbers: NumberFormat
) -> Tile:
    """The tile for these rows: the first of the table, or on a GPU the one that was the fastest. A
    call that is captured measures nothing."""
    width = x.shape[-1]
    num_rows = x.numel() // width
    tiles = tiles_for(num_rows, numbers, x.dtype == torch.bfloat16)
    if len(tiles) == 1 or x.device.type != "cuda":
        return tiles[0]
    bits = f"{numbers.bits} bits{' with a minimum' if minimum is not None else ''}"
    kind = f"{len(weight)}x{width}, {bits}, {bucket(num_rows, GROUPS_OF_128)} rows"

    def seconds_of(tile: Tile) -> float:
        return median_seconds(lambda: multiply_groups(x, weight, scale, minimum, numbers, tile))

    can_measure = not torch.cuda.is_current_stream_capturing()
    return choices_on(x.device).choose(kind, tiles, seconds_of if can_measure else None)


def round_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """`fp8.rounded_rows` in one launch: [M, K] in e4m3, and scales, float32 [M, 1]."""
    rows = rows.contiguous()
    num_rows, width = rows.shape
    numbers = rows.new_empty(num_rows, width, dtype=torch.float8_e4m3fn)
    scale = rows.new_empty(num_rows, 1, dtype=torch.float32)
    block = min(MOST_INPUTS, next_power(width))
    warps = max(1, min(8, block // 256))
    kernels(rows.device.type).round_rows[(num_rows,)](
        rows, numbers, scale, WIDTH=width, BLOCK=block, num_warps=warps
    )
    return numbers, scale


@cache
def _counters(device: torch.device) -> Tensor:
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


def counters_on(device: torch.device, count: int) -> Tensor:
    """Counters of programs, zeros, which the last program of a tile resets. Kept, since a captured
    call goes on reading them."""
    assert count <= MOST_TILES, "split products have few tiles"
    return _counters(device)
