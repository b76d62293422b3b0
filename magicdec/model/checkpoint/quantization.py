"""Weight quantization by this project (`QUANTIZERS`): of the matrices of layers and of the head,
while they are read, or as a copy that drafts."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from magicdec.model.checkpoint.finite import check_finite
from magicdec.model.checkpoint.weight_files import (
    Index,
    RenamedWeights,
    StoredTensor,
    WeightSource,
    row_spans,
)
from magicdec.model.checkpoint.weight_map import expected_shapes, matrix_pieces, untie_head
from magicdec.model.config import ModelConfig
from magicdec.model.families.family import find_family
from magicdec.model.linear.fp8 import Fp8Linear
from magicdec.model.linear.grouped import GroupedLinear, GroupedNumbers, stack_rows
from magicdec.model.linear.packed import Linear, PackedLinear, PartialLinear
from magicdec.model.linear.quantizers import Quantizer
from magicdec.model.transformer import Transformer
from magicdec.names import FP8, QUANTIZERS, load_named


def quantized(weight: Tensor, quantizer: Quantizer) -> GroupedNumbers:
    """Of [N, K] in any dtype, in bounded parts. Scales are not finite where weights are not."""
    spans = row_spans((0, len(weight)), weight.shape[1])
    return stack_rows([quantizer(weight[slice(*span)].float()) for span in spans])


def low_bit_copy(model: Transformer, weights: str, is_packed: bool) -> Transformer:
    """A model that shares all but its matrices, one of DRAFT_WEIGHTS, with `model` in bfloat16 or
    float32. Packed ones round activations. Raises ValueError for infinities or NaN."""
    return model.with_linears(partial(_low_bit, weights=weights, is_packed=is_packed))


def _low_bit(linear: Linear, weights: str, is_packed: bool) -> Linear:
    is_part = isinstance(linear, PartialLinear)
    adds_bias = not is_part if isinstance(linear, nn.Linear) else linear.adds_bias
    weight = linear.weight if isinstance(linear, nn.Linear) else linear.dense()
    if weights == FP8:
        in_fp8 = Fp8Linear(weight, linear.bias, adds_bias)
        _check_scales(in_fp8.scale, weight, weights)
        return in_fp8
    numbers = quantized(weight, load_named(QUANTIZERS, weights))
    _check_scales(numbers.scale, weight, weights)
    if is_packed:
        return PackedLinear(numbers, linear.bias, adds_bias, rounds=True)
    return GroupedLinear(numbers, linear.bias, adds_bias)


def _check_scales(scale: Tensor, weight: Tensor, weights: str) -> None:
    if not scale.isfinite().all():
        raise ValueError(f"a matrix of {tuple(weight.shape)} is not finite: it has no {weights}")


def with_head(source: WeightSource, config: ModelConfig) -> WeightSource:
    """The weights with a head of its own, where it is tied to the embedding."""
    names = find_family(config.architecture).names(config)
    head = f"{names.head}.weight"
    if head in source.tensors:
        return source
    return RenamedWeights(source, {head: f"{names.embedding}.weight"})


class QuantizedWeights(WeightSource):
    """A source that quantises matrices while it is read, also those of a head for multi-token
    prediction with the config `mtp_head`. Values do not depend on slices. Raises WeightsRefused for
    infinities or NaN."""

    def __init__(
        self,
        source: WeightSource,
        config: ModelConfig,
        quantizer: Quantizer,
        mtp_head: ModelConfig | None = None,
    ) -> None:
        super().__init__(source.path)
        self._source = with_head(source, config)
        self._quantizer = quantizer
        configs = [untie_head(config), *([] if mtp_head is None else [mtp_head])]
        names = [name for part in configs for name in expected_shapes(part)]
        self.tensors = {name: self._source.tensors[name] for name in names}
        # Matrices with their stored shapes, and whether these are [in, out].
        self._matrices = {piece.name: piece for part in configs for piece in matrix_pieces(part)}
        for name, piece in self._matrices.items():
            kind = quantizer.format(piece.width)
            file = self._source.tensors[name].file
            self.tensors[name] = StoredTensor(piece.full_shape, "float32", file, kind)

    def read(self, name: str, index: Index = ()) -> Tensor:
        assert name not in self._matrices, "a matrix is read as its numbers"
        return self._source.read(name, index)

    def read_numbers(self, name: str, index: Index = ()) -> GroupedNumbers:
        if name not in self._matrices:
            return self._source.read_numbers(name, index)
        piece = self._matrices[name]
        rows, columns = (*index, slice(None), slice(None))[:2]
        first, last, _ = rows.indices(self.tensors[name].shape[1 if piece.transposed else 0])
        parts = []
        for span in row_spans((first, last), piece.width):
            at = (columns, slice(*span)) if piece.transposed else (slice(*span), columns)
            stored = self._source.read(name, at)
            weights = stored.float()
            check_finite(weights, stored, self, name, at)
            kind = self.tensors[name].numbers
            parts.append(self._quantizer(weights.T if piece.transposed else weights, kind))
        return stack_rows(parts)
