"""Tiles of the Triton kernel for numbers in groups: what a program multiplies, by how many rows
there are. The first tile of a line is taken where none was measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from magicdec.model.linear.grouped import NumberFormat


@dataclass(frozen=True)
class Tile:
    """A program multiplies `rows` by the weights of `outputs` in `warps`, while those of its next
    `stages` - 1 turns are on their way."""

    rows: int
    outputs: int
    warps: int
    stages: int = 3


# By the most rows, of bfloat16 and groups of 128. An instruction of tensor cores multiplies at
# least 8 rows by 16 outputs of a warp; one of wgmma, for 4 warps, 64 outputs. Weights are converted
# once for a tile of rows. The first tiles have the fewest instructions for a weight in the machine
# code: 2.7 with 8 rows, 3.3 with 16, 5.1 with 32 (docs/log/gpu.md).
GROUPS_OF_128 = {
    8: (Tile(8, 64, 2), Tile(8, 128, 4), Tile(8, 32, 2)),
    16: (Tile(16, 64, 2), Tile(16, 32, 2)),
    32: (Tile(32, 64, 4), Tile(32, 32, 2), Tile(16, 64, 2)),
    64: (Tile(64, 64, 4), Tile(32, 64, 4)),
    160: (Tile(64, 64, 4), Tile(64, 128, 8)),
}
# More for numbers of 4 bits without a minimum: others would spill.
PLAIN = {
    32: (Tile(32, 64, 2),),
    160: (Tile(128, 128, 8, stages=2),),
}
OTHERS = {
    16: (Tile(16, 32, 2),),
    32: (Tile(32, 64, 4),),
    160: (Tile(64, 64, 4),),
}
FLOAT32 = {
    16: (Tile(16, 32, 2),),
    160: (Tile(32, 64, 4),),
}
MOST_ROWS = 160


def tiles_for(num_rows: int, numbers: NumberFormat, is_bfloat16: bool) -> tuple[Tile, ...]:
    """Tiles that may multiply so many rows by such numbers."""
    if not is_bfloat16:
        return FLOAT32[bucket(num_rows, FLOAT32)]
    if numbers.group != 128:
        return OTHERS[bucket(num_rows, OTHERS)]
    most = bucket(num_rows, GROUPS_OF_128)
    is_plain = numbers.bits == 4 and not numbers.has_minimum
    return GROUPS_OF_128[most] + (PLAIN.get(most, ()) if is_plain else ())


def bucket(num_rows: int, bounds: Iterable[int]) -> int:
    """The first bound that so many rows do not exceed, or the last one."""
    ordered = list(bounds)
    return next((most for most in ordered if num_rows <= most), ordered[-1])
