"""int8 weights: one matrix, one scale for each of its outputs, w = int8 * scale.

Owns the arithmetic of quantising, which tensors it is done to (every matrix that a forward
multiplies with: those of all layers and the head) and how a checkpoint that holds such weights is
told from others. Symmetric, so that nothing has to be added to a product: -127 .. 127. An output's
scale is that of its whole row, on whatever rank a part of the row lies. Must not know of modules
(`int8_linear`) nor how files are read.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.checkpoint.weight_map import SCALE, Piece, weight_map
from magicdec.model.checkpoint.weight_source import WeightSource
from magicdec.model.config import ModelConfig
from magicdec.model.families.family import find_family

LARGEST = 127
READ_ELEMENTS = 1 << 24  # of a matrix whose scales are looked for


def channel_scales(rows: Tensor) -> Tensor:
    """[out, in] float32 -> [out] float32: what the largest weight of a row is divided by; 1 for a
    row of zeros."""
    scales = torch.maximum(rows.amax(dim=1), -rows.amin(dim=1)) / LARGEST
    return torch.where(scales == 0, 1.0, scales)


def quantize(weights: Tensor, scales: Tensor) -> Tensor:
    """float32 weights over scales that broadcast with them, to the nearest, ties to even: int8."""
    # A scale below what float32 can resolve could carry the quotient past the end.
    return (weights / scales).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)


def own_head(config: ModelConfig) -> ModelConfig:
    """The model with int8 weights: a head that was the embedding is a matrix of its own, since an
    embedding stays as it is."""
    if not config.tie_word_embeddings:
        return config
    return replace(config, tie_word_embeddings=False, head_bias=False)


def int8_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of an int8 checkpoint of this model. A matrix is int8 where a tensor of its name
    and `SCALE` stands beside it; the others are floating-point."""
    table = weight_map(own_head(config), Shard(), range(config.num_layers), with_scales=True)
    return {piece.name: piece.full_shape for pieces in table.values() for piece in pieces}


def holds_int8(source: WeightSource) -> bool:
    """Whether these are weights quantised as here; others in int8 have no scales of that name."""
    dtypes = source.dtypes()
    return any(d == "int8" and name + SCALE in dtypes for name, d in dtypes.items())


def check_range(what: str, values: Tensor) -> None:
    """Raises ValueError for stored int8 weights that no quantisation here makes."""
    if values.numel() and int(values.min()) < -LARGEST:
        raise ValueError(f"{what} holds -128; int8 weights are -127 .. 127")


class QuantizedWeights:
    """A checkpoint of floating-point weights as if it had been stored in int8: a `WeightSource`
    that quantises what is read of it. Its answers do not depend on how it is cut.

    Raises ValueError on reading a matrix that holds infinities or NaN.
    """

    def __init__(self, source: WeightSource, config: ModelConfig) -> None:
        self._source, self._shapes = source, int8_shapes(config)
        self._scales: dict[str, Tensor] = {}  # NaN where nobody asked yet
        self._kept: tuple[str, tuple[int, int], Tensor] | None = None  # the rows read last
        names = find_family(config.architecture).names(config)
        tied = {f"{names.head}.weight": f"{names.embedding}.weight"}
        self._stored_as = tied if config.tie_word_embeddings else {}
        table = weight_map(own_head(config), Shard(), range(config.num_layers))
        # Each matrix whole, as [out, in].
        self._matrices = {
            piece.name: replace(piece, rows=(0, self._shapes[piece.name + SCALE][0]), columns=None)
            for pieces in table.values()
            for piece in pieces
            if piece.name + SCALE in self._shapes
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Full shape of every tensor, the scales included."""
        return self._shapes

    def dtypes(self) -> dict[str, str]:
        """torch's name of every tensor's type."""
        stored = self._source.dtypes()
        kinds = dict.fromkeys(self._matrices, "int8")
        kinds |= {name + SCALE: "float32" for name in self._matrices}
        return {name: kinds.get(name) or stored[name] for name in self._shapes}

    def where(self, name: str) -> Path | None:
        """The file that is read for `name`."""
        name = name.removesuffix(SCALE)
        return self._source.where(self._stored_as.get(name, name))

    def read(self, piece: Piece) -> Tensor:
        """The slice `piece` in the type that `dtypes` says."""
        matrix = self._matrices.get(piece.name.removesuffix(SCALE))
        if matrix is None:
            return self._source.read(piece)
        if piece.name.endswith(SCALE):
            return self._scales_of(matrix, piece.rows)
        if matrix.transposed and not piece.transposed:  # [in, out], as it lies in the file
            return quantize(self._read(piece), self._scales_of(matrix, matrix.rows))
        scales = self._scales_of(matrix, piece.rows)
        rows = self._rows(replace(matrix, rows=piece.rows))
        if piece.columns is not None:
            rows = rows[:, slice(*piece.columns)]
        return quantize(rows, scales.unsqueeze(1))

    def _scales_of(self, matrix: Piece, span: tuple[int, int]) -> Tensor:
        """Of these rows, from the whole of each."""
        unknown = torch.full((matrix.rows[1],), torch.nan)
        known = self._scales.setdefault(matrix.name, unknown)
        step = max(READ_ELEMENTS // matrix.width, 1)
        for first in range(*span, step):
            last = min(first + step, span[1])
            if known[first:last].isnan().any():
                scales = channel_scales(self._rows(replace(matrix, rows=(first, last))))
                if not scales.isfinite().all():
                    raise ValueError(
                        f"{self.where(matrix.name) or ''}: tensor {matrix.name} holds a value that "
                        "is not a finite number and cannot be quantised"
                    )
                known[first:last] = scales
        return known[slice(*span)]

    def _rows(self, piece: Piece) -> Tensor:
        """Whole rows in float32; kept until others are asked for, since scales and weights are
        asked for one after the other."""
        if self._kept is None or self._kept[:2] != (piece.name, piece.rows):
            self._kept = None  # before its successor is made
            self._kept = piece.name, piece.rows, self._read(piece)
        return self._kept[2]

    def _read(self, piece: Piece) -> Tensor:
        name = self._stored_as.get(piece.name, piece.name)
        return self._source.read(replace(piece, name=name)).float()
