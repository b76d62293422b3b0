"""PrequantizedWeights: a checkpoint that another program quantised, as one with a `weight` for each
module."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from torch import Tensor

from magicdec.model.checkpoint.quantized.matrix import Parts, QuantizedMatrix
from magicdec.model.checkpoint.quantized.method import QuantizationMethod
from magicdec.model.checkpoint.weight_files import Index, StoredTensor, WeightSource
from magicdec.model.checkpoint.weight_map import matrix_pieces, untie_head
from magicdec.model.config import ModelConfig
from magicdec.model.families.config_keys import FOREIGN, WAY_OUT
from magicdec.model.families.family import find_family
from magicdec.model.families.fields import ConfigFields
from magicdec.model.linear.grouped import GroupedNumbers
from magicdec.names import QUANTIZATIONS, load_named
from magicdec.output.files import load_object

PLAIN = ("float16", "bfloat16", "float32", "float64")


class PrequantizedWeights(WeightSource):
    """Reads `X.weight` of the modules that are quantised from the tensors that it is stored in, and
    all others as they are."""

    def __init__(self, source: WeightSource, matrices: dict[str, QuantizedMatrix]) -> None:
        super().__init__(source.path)
        self._source = source
        self._matrices = {f"{module}.weight": matrix for module, matrix in matrices.items()}
        taken = {f"{module}.{leaf}" for module, each in matrices.items() for leaf in each.leaves}
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


def read_method(directory: Path) -> QuantizationMethod | None:
    """What `quantization_config` says, None without one. Raises ValueError, which names the file
    and the key, for anything that would be computed otherwise."""
    path = directory / "config.json"
    table = load_object(path).get(FOREIGN)
    if not table:
        return None
    read = ConfigFields(table)
    try:
        method: QuantizationMethod = load_named(QUANTIZATIONS, table["quant_method"])(read)
    except KeyError as error:
        raise ValueError(f"{path}: {FOREIGN}: field {error} is missing; {WAY_OUT}") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {FOREIGN}: {error}; {WAY_OUT}") from None
    return method


def dequantized(
    source: WeightSource, method: QuantizationMethod, config: ModelConfig, config_path: Path
) -> WeightSource:
    """The source with the weights of its quantised modules. Raises ValueError if its tensors are
    not what the config says."""
    names = find_family(config.architecture).names(config)
    if names.transposed:
        raise ValueError(
            f"{config_path}: {FOREIGN}: {config.architecture} stores its matrices transposed, "
            f"which is not read quantised; {WAY_OUT}"
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
                f"is stored as {parts.dtype('weight')}, though the {FOREIGN} of {config_path} says "
                "that it is quantised",
                "name it there among the modules that are not, or remove the "
                f"{FOREIGN} if no module is",
            )
        if not is_quantized:
            continue
        if not method.quantizes(module, is_head):
            raise ValueError(
                f"{source.path}: {module} is quantised, though the {FOREIGN} of {config_path} "
                "leaves it out; correct the one or the other"
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
