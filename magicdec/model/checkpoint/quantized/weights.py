"""PrequantizedWeights: a checkpoint that another program quantised, as one with a `weight` for each
module."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from magicdec.model.checkpoint.quantized.matrix import Parts, QuantizedMatrix
from magicdec.model.checkpoint.quantized.stated import StatedMethod
from magicdec.model.checkpoint.weight_files import Index, StoredTensor, WeightSource
from magicdec.model.checkpoint.weight_map import matrix_pieces, untie_head
from magicdec.model.config import ModelConfig
from magicdec.model.families.config_keys import WAY_OUT
from magicdec.model.families.family import find_family
from magicdec.model.linear.grouped import GroupedNumbers

PLAIN = ("float16", "bfloat16", "float32", "float64")


class PrequantizedWeights(WeightSource):
    """Reads `X.weight` of the modules that are quantised from the tensors that it is stored in, and
    all others as they are."""

    def __init__(self, source: WeightSource, matrices: dict[str, QuantizedMatrix]) -> None:
        super().__init__(source.path)
        self._source = source
        self._matrices = {f"{module}.weight": matrix for module, matrix in matrices.items()}
        taken = {
            f"{module}.{leaf}"
            for module, quantized in matrices.items()
            for leaf in quantized.leaves
        }
        self.tensors = {name: t for name, t in source.tensors.items() if name not in taken}
        for module, matrix in matrices.items():
            file = source.where(f"{module}.{matrix.leaves[0]}")
            shape = matrix.shape[::-1] if matrix.is_transposed else matrix.shape
            self.tensors[f"{module}.weight"] = StoredTensor(shape, "float32", file, matrix.format)

    def read(self, name: str, index: Index = ()) -> Tensor:
        if name not in self._matrices:
            return self._source.read(name, index)
        matrix = self._matrices[name]
        first, second = _bounded(index, self.tensors[name].shape)
        return (
            matrix.dense(second, first).T if matrix.is_transposed else matrix.dense(first, second)
        )

    def read_numbers(self, name: str, index: Index = ()) -> GroupedNumbers:
        matrix = self._matrices[name]
        return matrix.numbers(*_bounded(index, matrix.shape))

    def input_order(self, name: str) -> Tensor | None:
        return self._matrices[name].order if name in self._matrices else None


def _bounded(index: Index, shape: tuple[int, ...]) -> tuple[slice, slice]:
    rows, columns = (*index, slice(None), slice(None))[:2]
    return slice(*rows.indices(shape[0])[:2]), slice(*columns.indices(shape[1])[:2])


def dequantized(source: WeightSource, stated: StatedMethod, config: ModelConfig) -> WeightSource:
    """The source with the weights of its quantised modules. Raises ValueError if its tensors are
    not what is stated."""
    names = find_family(config.architecture).names(config)
    method = stated.method
    if names.transposed:
        raise ValueError(
            f"{stated.path}: {config.architecture} stores its matrices transposed, which is not "
            f"read quantised; {WAY_OUT}"
        )
    matrices = {}
    for module in linear_modules(config):
        parts = Parts(source, module)
        is_quantized = method.is_marked(parts)
        if not is_quantized and "weight" not in parts:
            continue  # of a tied head; others are missing, which is checked later
        is_head = module == names.head
        if not is_quantized and not method.leaves_out(module, is_head):
            raise parts.refusal(
                "weight",
                f"is stored as {parts.dtype('weight')}, though {stated.by} says that it is "
                "quantised",
                f"name it there among the modules that are not, or remove {stated.by} if no module "
                "is",
            )
        if not is_quantized:
            continue
        if not method.quantizes(module, is_head):
            raise ValueError(
                f"{source.path}: {module} is quantised, though {stated.by} leaves it out; correct "
                "the one or the other"
            )
        matrices[module] = method.matrix(parts, module)
        _check_leaves(parts, matrices[module].leaves)
    return PrequantizedWeights(source, matrices)


def linear_modules(config: ModelConfig) -> list[str]:
    """The modules of all linear layers, the head included, by Hugging Face names."""
    pieces = matrix_pieces(untie_head(config))
    return list(dict.fromkeys(piece.name.removesuffix(".weight") for piece in pieces))


def _check_leaves(parts: Parts, leaves: Collection[str]) -> None:
    """Raise ValueError for a tensor of a quantised module that nobody reads, as a static scale of
    its activations."""
    prefix = f"{parts.module}."
    for name in parts.source.tensors:
        leaf = name.removeprefix(prefix)
        if name.startswith(prefix) and leaf not in leaves and leaf != "bias":
            raise parts.refusal(leaf, "is not read, and might change the result", WAY_OUT)
