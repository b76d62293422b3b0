"""Random weights for benchmarks without a checkpoint.

A value depends only on tensor name and position, so that any number of ranks holds the same model.
Weights are drawn on their device; other kinds of devices draw other numbers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import torch
from torch import Tensor

from magicdec.model.checkpoint.weight_files import TILE_ROWS, Index, StoredTensor, WeightSource

STANDARD_DEVIATION = 0.02
NORM = re.compile(r"(norm|_norm_(embedding|hidden)|\.ln_\w+)\.weight$")
# Each tile has its own seed, so that a rank generates only the tiles that its slice overlaps.
TILE_COLUMNS = 1024


class RandomWeights(WeightSource):
    """Normal weights and biases, and norm weights of one, float32, of full `shapes`
    (`weight_map.expected_shapes`)."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], device: torch.device = torch.device("cpu")
    ) -> None:
        super().__init__()
        self.device = device
        self.tensors = {name: StoredTensor(shape, "float32") for name, shape in shapes.items()}

    def on(self, device: torch.device) -> RandomWeights:
        shapes = {name: stored.shape for name, stored in self.tensors.items()}
        return RandomWeights(shapes, device)

    def read(self, name: str, index: Index = ()) -> Tensor:
        """float32, on the device. A value does not depend on the slice."""
        shape = self.tensors[name].shape
        whole = [slice(None)] * (len(shape) - len(index))
        parts = zip(shape, (*index, *whole), strict=True)
        rows, *columns = (slice(*part.indices(size)) for size, part in parts)
        if NORM.search(name):
            return torch.ones(rows.stop - rows.start, device=self.device)
        if len(columns) == 2:  # of a convolution, a matrix with a dimension of one
            return self._read(name, (shape[0], shape[2]), rows, columns[1]).unsqueeze(1)
        if not columns:  # a vector is a matrix of one row
            return self._read(name, (1, *shape), slice(0, 1), rows)[0]
        return self._read(name, shape, rows, columns[0])

    def _read(self, name: str, shape: tuple[int, ...], rows: slice, columns: slice) -> Tensor:
        size = rows.stop - rows.start, columns.stop - columns.start
        out = torch.empty(size, device=self.device)

        def fill(corner: tuple[int, int]) -> None:
            top, left = corner
            tile = self._tile(name, shape, top, left)
            first = max(top, rows.start)
            last = min(top + TILE_ROWS, rows.stop)
            start = max(left, columns.start)
            stop = min(left + TILE_COLUMNS, columns.stop)
            ours = slice(first - rows.start, last - rows.start)
            target = out[ours, start - columns.start : stop - columns.start]
            target.copy_(tile[first - top : last - top, start - left : stop - left])

        corners = product(_tile_starts(rows, TILE_ROWS), _tile_starts(columns, TILE_COLUMNS))
        if self.device.type != "cpu":
            for corner in corners:
                fill(corner)
            return out
        # A CPU makes about 0.2 billion values per second and thread, so tiles use several threads.
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(fill, corners))
        return out

    def _tile(self, name: str, shape: tuple[int, ...], top: int, left: int) -> Tensor:
        digest = hashlib.blake2b(f"{name}/{top}/{left}".encode(), digest_size=8).digest()
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(digest, "little"))
        size = min(TILE_ROWS, shape[0] - top), min(TILE_COLUMNS, shape[1] - left)
        tile = torch.empty(size, device=self.device)
        return tile.normal_(0.0, STANDARD_DEVIATION, generator=generator)


def _tile_starts(span: slice, size: int) -> range:
    return range(span.start // size * size, span.stop, size)
