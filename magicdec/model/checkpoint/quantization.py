"""Weight quantization. int8: w = int8 * scale, one scale per output channel. int4, for drafts: one
per output channel and GROUP inputs.

Matrices of layers and the head are quantised, symmetrically: int8 is -127 .. 127, and an int4
group's largest number is -8, exactly. A channel's scale comes from its whole row, also on shards.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from magicdec.model.checkpoint.finite import check_finite
from magicdec.model.checkpoint.weight_files import Index, StoredTensor, WeightSource, row_spans
from magicdec.model.checkpoint.weight_map import SCALE, find_pieces
from magicdec.model.config import ModelConfig
from magicdec.model.families.family import find_family
from magicdec.model.linear.grouped import GroupedLinear, GroupedNumbers
from magicdec.model.linear.packed import (
    GROUP,
    INT4,
    INT4_FORMAT,
    Int8Linear,
    Linear,
    PackedLinear,
    PartialLinear,
)
from magicdec.model.transformer import Transformer

LARGEST = 127


def channel_scales(rows: Tensor) -> Tensor:
    """[out, in] float32 -> scales [out] float32: largest magnitude / 127; 1 for zeros."""
    scales = torch.maximum(rows.amax(dim=1), -rows.amin(dim=1)) / LARGEST
    return torch.where(scales == 0, 1.0, scales)


def quantize(weights: Tensor, scales: Tensor) -> Tensor:
    """int8 of float32 weights / scales (broadcast), to nearest, ties to even."""
    # The quotient can exceed 127 where the scale is a subnormal number, hence the clamp.
    return (weights / scales).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)


def quantize_groups(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] float32 -> (int8 [N, K] of -8 .. 7, bfloat16 scales [N, K / GROUP])."""
    groups = rows.unflatten(1, (-1, GROUP))
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scales = (largest / -8).bfloat16()
    numbers = (groups / torch.where(scales == 0, 1, scales)).round_().clamp_(-8, 7)
    return numbers.to(torch.int8).flatten(1), scales.squeeze(2)


def low_bit_copy(model: Transformer, weights: str, is_packed: bool) -> Transformer:
    """A model that shares all but its matrices, in int8 or int4, with `model` in bfloat16 or
    float32. Raises ValueError for infinities or NaN."""
    return model.with_linears(partial(_low_bit, weights=weights, is_packed=is_packed))


def _low_bit(linear: Linear, weights: str, is_packed: bool) -> Linear:
    is_part = isinstance(linear, PartialLinear)
    adds_bias = not is_part if isinstance(linear, nn.Linear) else linear.adds_bias
    weight = linear.weight if isinstance(linear, nn.Linear | Int8Linear) else linear.dense()
    parts = []
    for span in row_spans((0, len(weight)), weight.shape[1]):
        rows = weight[slice(*span)].float()
        if weights == INT4:
            parts.append(quantize_groups(rows))
        else:
            scales = channel_scales(rows)
            parts.append((quantize(rows, scales.unsqueeze(1)), scales))
    numbers, scale = map(torch.cat, zip(*parts, strict=True))
    if not scale.isfinite().all():
        raise ValueError(f"a matrix of {tuple(weight.shape)} is not finite: it has no {weights}")
    if weights == INT4:
        grouped = GroupedNumbers(INT4_FORMAT, numbers, scale, None)
        if is_packed:
            return PackedLinear(grouped, linear.bias, adds_bias, rounds=True)
        return GroupedLinear(grouped, linear.bias, adds_bias)
    if is_packed:
        return PackedLinear(numbers, linear.bias, adds_bias, scale)
    return Int8Linear(numbers, scale, linear.bias, adds_bias)


def holds_int8(source: WeightSource) -> bool:
    """Whether `source` has weights quantised by this project, by names of scales."""
    tensors = source.tensors
    return any(t.dtype == "int8" and name + SCALE in tensors for name, t in tensors.items())


def check_range(what: str, values: Tensor) -> None:
    """Raise ValueError for int8 weights of -128, which `quantize` never produces."""
    if values.numel() and int(values.min()) < -LARGEST:
        raise ValueError(f"{what} holds -128; int8 weights are -127 .. 127")


class QuantizedWeights(WeightSource):
    """A source that quantises a floating-point checkpoint while it is read. Values do not depend
    on slices. Raises WeightsRefused for infinities or NaN."""

    def __init__(self, source: WeightSource, config: ModelConfig) -> None:
        super().__init__(source.path)
        self._source = source
        pieces = find_pieces(config, is_int8=True)
        self._scales: dict[str, Tensor] = {}  # by matrix; NaN: not computed yet
        names = find_family(config.architecture).names(config)
        tied = {f"{names.head}.weight": f"{names.embedding}.weight"}
        self._stored_as = tied if config.tie_word_embeddings else {}
        # Matrices with their stored shapes, and whether these are [in, out].
        self._matrices = {name: piece for name, piece in pieces.items() if name + SCALE in pieces}
        for name, piece in pieces.items():
            matrix = name.removesuffix(SCALE)
            stored = source.tensors[self._stored_as.get(matrix, matrix)]
            kind = "float32" if matrix != name else "int8"
            dtype = kind if matrix in self._matrices else stored.dtype
            self.tensors[name] = StoredTensor(piece.full_shape, dtype, stored.file)

    def read(self, name: str, index: Index = ()) -> Tensor:
        matrix = name.removesuffix(SCALE)
        if matrix not in self._matrices:
            return self._source.read(name, index)
        if matrix != name:
            return self._scales_of(matrix, (*index, slice(None))[0])
        first, second = (*index, slice(None), slice(None))[:2]
        if self._matrices[name].transposed:
            return self._quantized(name, second)[:, first].T
        return self._quantized(name, first)[:, second]

    def _quantized(self, name: str, outputs: slice) -> Tensor:
        """Whole rows [outputs, in], whose scales are kept."""
        is_transposed = self._matrices[name].transposed
        index = (slice(None), outputs) if is_transposed else (outputs,)
        stored = self._source.read(self._stored_as.get(name, name), index)
        rows = stored.float()
        check_finite(rows, stored, self, name, index)
        rows = rows.T if is_transposed else rows
        scales = channel_scales(rows)
        self._kept_scales(name)[outputs] = scales
        return quantize(rows, scales.unsqueeze(1))

    def _kept_scales(self, name: str) -> Tensor:
        unknown = torch.full(self.tensors[name + SCALE].shape, torch.nan)
        return self._scales.setdefault(name, unknown)

    def _scales_of(self, name: str, outputs: slice) -> Tensor:
        scales = self._kept_scales(name)
        first, last, _ = outputs.indices(len(scales))
        for span in row_spans((first, last), self._matrices[name].width):
            if scales[slice(*span)].isnan().any():
                self._quantized(name, slice(*span))
        return scales[outputs]
