"""Random weights for benchmarks without a checkpoint.

Owns the rule that a weight's value depends only on the tensor's name and the position in it, so
that ranks hold shards of the same model for any number of ranks. Values are reproducible on one
kind of CPU; another kind may differ in the last bits.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from magicdec.model.checkpoint.weight_files import StoredTensor, WeightSource
from magicdec.model.checkpoint.weight_map import Piece

STANDARD_DEVIATION = 0.02
NORM = re.compile(r"(norm|\.ln_\w+)\.weight$")
# Each tile has its own seed, so that a rank generates only the tiles that its slice overlaps.
TILE_ROWS, TILE_COLUMNS = 256, 1024


class RandomWeights(WeightSource):
    """Normally distributed weights and biases, and norm weights of one, all float32.

    `shapes` has the full shape of every tensor (`weight_map.expected_shapes(config)`).
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.tensors = {name: StoredTensor(shape, "float32") for name, shape in shapes.items()}

    def read(self, piece: Piece) -> Tensor:
        """The slice `piece`, float32. A weight's value does not depend on the slice."""
        count = piece.rows[1] - piece.rows[0]
        if NORM.search(piece.name):
            return torch.ones(count)
        if len(piece.full_shape) == 1:  # a vector is a matrix of one row
            return self._read(piece.name, (1, *piece.full_shape), (0, 1), piece.rows)[0]
        height, width = piece.full_shape
        columns = piece.columns or (0, piece.width)
        if piece.transposed:
            return self._read(piece.name, (height, width), columns, piece.rows).T
        return self._read(piece.name, (height, width), piece.rows, columns)

    def _read(
        self, name: str, shape: tuple[int, int], rows: tuple[int, int], columns: tuple[int, int]
    ) -> Tensor:
        out = torch.empty(rows[1] - rows[0], columns[1] - columns[0])

        def fill(corner: tuple[int, int]) -> None:
            top, left = corner
            tile = self._tile(name, shape, top, left)
            first, last = max(top, rows[0]), min(top + TILE_ROWS, rows[1])
            start, stop = max(left, columns[0]), min(left + TILE_COLUMNS, columns[1])
            target = out[first - rows[0] : last - rows[0], start - columns[0] : stop - columns[0]]
            target.copy_(tile[first - top : last - top, start - left : stop - left])

        corners = [
            (top, left)
            for top in _tile_starts(rows, TILE_ROWS)
            for left in _tile_starts(columns, TILE_COLUMNS)
        ]
        # One generator makes about 0.2 billion values per second, so tiles use several threads.
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(fill, corners))
        return out

    def _tile(self, name: str, shape: tuple[int, int], top: int, left: int) -> Tensor:
        """The tile whose first element is [top, left]; smaller at the tensor's edge."""
        digest = hashlib.blake2b(f"{name}/{top}/{left}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        tile = torch.empty(min(TILE_ROWS, shape[0] - top), min(TILE_COLUMNS, shape[1] - left))
        return tile.normal_(0.0, STANDARD_DEVIATION, generator=generator)


def _tile_starts(span: tuple[int, int], size: int) -> range:
    return range(span[0] // size * size, span[1], size)
