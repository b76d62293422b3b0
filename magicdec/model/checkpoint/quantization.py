"""int8 weight quantization: w = int8 * scale, with one scale per output channel of a matrix.

Owns the arithmetic of quantization, the choice of tensors (the matrices of all layers and the head,
but no embedding, norm or bias) and the detection of int8 checkpoints. Quantization is symmetric,
-127 .. 127, so a GEMM needs no zero-point correction. A channel's scale is computed from its whole
row, even if the row is sharded over ranks. `linear/packed.py` has the modules.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from magicdec.model.checkpoint.weight_files import StoredTensor, WeightSource
from magicdec.model.checkpoint.weight_map import SCALE, Piece, expected_shapes, find_pieces
from magicdec.model.config import ModelConfig
from magicdec.model.families.family import find_family

LARGEST = 127
READ_ELEMENTS = 1 << 24  # elements read at a time to compute scales


def channel_scales(rows: Tensor) -> Tensor:
    """[out, in] float32 -> scales [out] float32: the largest magnitude of a row / 127; 1 for a row
    of zeros."""
    scales = torch.maximum(rows.amax(dim=1), -rows.amin(dim=1)) / LARGEST
    return torch.where(scales == 0, 1.0, scales)


def quantize(weights: Tensor, scales: Tensor) -> Tensor:
    """int8 of float32 weights / scales, which broadcast; rounded to nearest, ties to even."""
    # The quotient can exceed 127 where the scale is a subnormal number, hence the clamp.
    return (weights / scales).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)


def holds_int8(source: WeightSource) -> bool:
    """Whether `source` has weights quantised by this project, recognised by its names of scales."""
    tensors = source.tensors
    return any(t.dtype == "int8" and name + SCALE in tensors for name, t in tensors.items())


def check_range(what: str, values: Tensor) -> None:
    """Raises ValueError for stored int8 weights of -128, which `quantize` never produces."""
    if values.numel() and int(values.min()) < -LARGEST:
        raise ValueError(f"{what} holds -128; int8 weights are -127 .. 127")


class QuantizedWeights(WeightSource):
    """A `WeightSource` that quantises a floating-point checkpoint while it is read. The values do
    not depend on how the tensors are divided into pieces.

    Raises ValueError on reading a matrix that holds infinities or NaN.
    """

    def __init__(self, source: WeightSource, config: ModelConfig) -> None:
        super().__init__(source.path)
        self._source, shapes = source, expected_shapes(config, is_int8=True)
        self._scales: dict[str, Tensor] = {}  # by matrix; NaN: not computed yet
        self._kept: tuple[str, tuple[int, int], Tensor] | None = None  # the rows read last
        names = find_family(config.architecture).names(config)
        tied = {f"{names.head}.weight": f"{names.embedding}.weight"}
        self._stored_as = tied if config.tie_word_embeddings else {}
        # The piece that covers all of a matrix as [out, in], by name.
        self._matrices = {
            name: replace(piece, rows=(0, shapes[name + SCALE][0]), columns=None)
            for name, piece in find_pieces(config, is_int8=True).items()
            if name + SCALE in shapes
        }
        for name, shape in shapes.items():
            matrix = name.removesuffix(SCALE)
            stored = source.tensors[self._stored_as.get(matrix, matrix)]
            kind = "float32" if matrix != name else "int8"
            dtype = kind if matrix in self._matrices else stored.dtype
            self.tensors[name] = StoredTensor(shape, dtype, stored.file)

    def read(self, piece: Piece) -> Tensor:
        matrix = self._matrices.get(piece.name.removesuffix(SCALE))
        if matrix is None:
            return self._source.read(piece)
        if piece.name.endswith(SCALE):
            return self._scales_of(matrix, piece.rows)
        if matrix.transposed and not piece.transposed:  # read as stored: [in, out]
            return quantize(self._read(piece), self._scales_of(matrix, matrix.rows))
        scales = self._scales_of(matrix, piece.rows)
        rows = self._rows(replace(matrix, rows=piece.rows))
        if piece.columns is not None:
            rows = rows[:, slice(*piece.columns)]
        return quantize(rows, scales.unsqueeze(1))

    def _scales_of(self, matrix: Piece, span: tuple[int, int]) -> Tensor:
        """The scales of the rows `span`, each computed from its whole row; cached."""
        unknown = torch.full((matrix.rows[1],), torch.nan)
        of_matrix = self._scales.setdefault(matrix.name, unknown)
        step = max(READ_ELEMENTS // matrix.width, 1)
        for first in range(*span, step):
            last = min(first + step, span[1])
            if of_matrix[first:last].isnan().any():
                scales = channel_scales(self._rows(replace(matrix, rows=(first, last))))
                if not scales.isfinite().all():
                    raise ValueError(
                        f"{self.where(matrix.name) or ''}: tensor {matrix.name} holds a value that "
                        "is not a finite number and cannot be quantised"
                    )
                of_matrix[first:last] = scales
        return of_matrix[slice(*span)]

    def _rows(self, piece: Piece) -> Tensor:
        """Whole rows in float32. The last result is cached, because the scales and the weights of
        the same rows are read one after the other."""
        if self._kept is None or self._kept[:2] != (piece.name, piece.rows):
            self._kept = None  # frees the old rows before new ones are read
            self._kept = piece.name, piece.rows, self._read(piece)
        return self._kept[2]

    def _read(self, piece: Piece) -> Tensor:
        name = self._stored_as.get(piece.name, piece.name)
        return self._source.read(replace(piece, name=name)).float()
