"""compressed-tensors: integers of 4 or 8 bits, packed into words or not, and FP8. Its groups of
settings belong to modules by name, by pattern, or to all linear layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from magicdec.model.checkpoint.quantized.gptq import group_size_of
from magicdec.model.checkpoint.quantized.matrix import (
    SCALE_DTYPES,
    WORD,
    IntegerMatrix,
    Parts,
    QuantizedMatrix,
    ScaledMatrix,
    shape_of,
)
from magicdec.model.checkpoint.quantized.method import (
    QuantizationMethod,
    absent,
    check_rest,
    choose,
    compiled,
    names_of,
)
from magicdec.model.families.fields import ConfigFields, shown, switch

FORMATS = ("pack-quantized", "int-quantized", "float-quantized")
PATTERN = "re:"
CORRECT = "correct config.json, so that it belongs to one of them"
ZERO_POINT = "weight_zero_point"
EVERY = "Linear"  # the target that all linear layers are
# What it was made by; observers chose the scales that are stored.
IRRELEVANT = frozenset(("global_compression_ratio", "version"))
IRRELEVANT_OF_WEIGHTS = frozenset(("observer", "observer_kwargs", "scale_dtype", "zp_dtype"))


class CompressedTensors(QuantizationMethod):
    def __init__(self, table: ConfigFields) -> None:
        super().__init__(table)
        choose(table, "quantization_status", ("compressed",), "compressed")
        absent(table, "kv_cache_scheme", "transform_config", "moe_sparsity_config")
        check_sparsity(table.get("sparsity_config"))
        form = table.get("format")
        groups = table["config_groups"]
        if not isinstance(groups, dict) or not groups:
            raise ValueError(f"config_groups {shown(groups)} is not a table of groups")
        self.schemes = [inside(name, raw, form) for name, raw in groups.items()]
        self.plain = names_of(table, "ignore")
        check_patterns(self.plain)
        check_rest(table, IRRELEVANT)

    def is_marked(self, parts: Parts) -> bool:
        return "weight_packed" in parts or (
            "weight" in parts and parts.dtype("weight") in ("int8", "float8_e4m3fn")
        )

    def quantizes(self, module: str, is_head: bool) -> bool:
        is_plain = any(rank_of(module, name) is not None for name in self.plain)
        return not is_plain and bool(self._best(module))

    def _best(self, module: str) -> list[Scheme]:
        """The groups whose target fits best: a name, then a pattern, then all linear layers."""
        ranked = [
            (rank, scheme)
            for scheme in self.schemes
            for target in scheme.targets
            if (rank := rank_of(module, target)) is not None
        ]
        best = min((rank for rank, _ in ranked), default=None)
        return list(dict.fromkeys(scheme for rank, scheme in ranked if rank == best))

    def matrix(self, parts: Parts, module: str) -> QuantizedMatrix:
        found = self._best(module)
        if len(found) > 1:
            names = " and ".join(group.name for group in found)
            raise parts.refusal("weight", f"belongs to {names} of config_groups alike", CORRECT)
        scheme = found[0]
        if scheme.form == "pack-quantized":
            return PackedIntegers(parts, scheme)
        if scheme.form == "int-quantized":
            matrix: QuantizedMatrix = PlainIntegers(parts, scheme)
        else:
            matrix = ScaledMatrix(parts, "weight_scale", scheme.block(parts))
        if scheme.is_symmetric and has_zeros_alone(parts):
            matrix.leaves += (ZERO_POINT,)
        return matrix


class Scheme:
    """One of `config_groups`: how the weights of its targets are stored."""

    def __init__(self, name: str, raw: ConfigFields, form: object) -> None:
        self.name = name
        self.targets = names_of(raw, "targets")
        check_patterns(self.targets)
        self.form = form if raw.get("format") is None else raw["format"]
        if self.form not in FORMATS:
            raise ValueError(
                f"format {shown(self.form)} is not read; those that are: {', '.join(FORMATS)}"
            )
        weights = raw["weights"]
        if not isinstance(weights, dict):
            raise ValueError(f"weights {shown(weights)} is not a table")
        self._read_weights(ConfigFields(weights))
        absent(raw, "output_activations")
        check_activations(raw.get("input_activations"), self.form)
        check_rest(raw, ())

    def _read_weights(self, table: ConfigFields) -> None:
        is_float = self.form == "float-quantized"
        choose(table, "type", ("float",) if is_float else ("int",), "int")
        choose(table, "num_bits", (8,) if self.form != "pack-quantized" else (4, 8), 8)
        choose(table, "dynamic", (False,), False)
        choose(table, "actorder", (None, False, True, "weight", "static", "group", "dynamic"), None)
        self.bits = int(table.get("num_bits") or 8)
        self.is_symmetric = switch(table, "symmetric", True)
        if is_float and not self.is_symmetric:
            raise ValueError("symmetric False is not read beside type float; choose True")
        known = ("tensor", "channel", "block") if is_float else ("channel", "group")
        size = table.get("group_size")
        strategy = table.get("strategy") or ("group" if size not in (None, -1) else "channel")
        if strategy not in known:
            raise ValueError(
                f"strategy {shown(strategy)} is not read in the format {self.form}; those that "
                f"are: {', '.join(known)}"
            )
        self.strategy = strategy
        self.group_size = -1
        if strategy == "group":
            self.group_size = group_size_of(table, "group_size", None)
        elif size not in (None, -1):
            raise ValueError(f"group_size {shown(size)} contradicts strategy {strategy}")
        block = table.get("block_structure")
        self._block = block
        is_valid = (
            isinstance(block, list)
            and len(block) == 2
            and all(type(edge) is int and edge > 0 for edge in block)
        )
        if (strategy == "block") != is_valid:
            raise ValueError(f"block_structure {shown(block)} contradicts strategy {strategy}")
        check_rest(table, IRRELEVANT_OF_WEIGHTS)

    def block(self, parts: Parts) -> tuple[int, int]:
        if "weight" not in parts:
            raise parts.refusal("weight", "is missing")
        rows, columns = shape_of(parts, "weight")
        if self.strategy == "block":
            return self._block[0], self._block[1]
        return (1 if self.strategy == "channel" else rows), columns


class CompressedIntegers(IntegerMatrix):
    """Signed numbers and zero points of a module, which are stored with 2 ** (bits - 1) added where
    they are packed."""

    scale_leaf = "weight_scale"

    def __init__(self, parts: Parts, scheme: Scheme, shape: tuple[int, int]) -> None:
        outputs, inputs = shape
        self.scheme = scheme
        self.middle = 1 << (scheme.bits - 1)
        group = inputs if scheme.group_size == -1 else scheme.group_size
        groups = -(-inputs // group)
        parts.expect("weight_scale", (outputs, groups), SCALE_DTYPES)
        self.leaves += ("weight_scale",)
        if not scheme.is_symmetric:
            parts.expect(ZERO_POINT, *self.zero_tensor(outputs, groups))
            self.leaves += (ZERO_POINT,)
        group_of = None
        if "weight_g_idx" in parts:
            parts.expect("weight_g_idx", (inputs,), ("int32", "int64"))
            self.leaves += ("weight_g_idx",)
            group_of = parts.read("weight_g_idx")
        super().__init__(parts, shape, scheme.bits, group, group_of)

    def zero_tensor(self, outputs: int, groups: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Its shape and dtypes."""
        raise NotImplementedError

    def stored_zeros(self, rows: slice) -> Tensor:
        raise NotImplementedError

    def scales(self, rows: slice) -> Tensor:
        return self.parts.read("weight_scale", rows)

    def zeros(self, rows: slice) -> Tensor:
        if self.scheme.is_symmetric:
            shape = rows.stop - rows.start, self.num_groups
            return torch.full(shape, self.middle, dtype=torch.int16)
        return self.stored_zeros(rows)


class PackedIntegers(CompressedIntegers):
    """`weight_packed`, along the inputs, and `weight_zero_point`, along the outputs."""

    def __init__(self, parts: Parts, scheme: Scheme) -> None:
        for leaf, shape in (("weight_packed", None), ("weight_shape", (2,))):
            if leaf not in parts:
                raise parts.refusal(leaf, "is missing")
            parts.expect(leaf, shape or shape_of(parts, leaf), ("int32", "int64"))
        outputs, inputs = parts.read("weight_shape").tolist()
        words = -(-inputs * scheme.bits // WORD)
        parts.expect("weight_packed", (outputs, words), ("int32",))
        self.leaves = ("weight_packed", "weight_shape")
        super().__init__(parts, scheme, (outputs, inputs))

    def zero_tensor(self, outputs: int, groups: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
        return (-(-outputs * self.scheme.bits // WORD), groups), ("int32",)

    def stored_zeros(self, rows: slice) -> Tensor:
        groups = slice(0, self.num_groups)
        stored = self.parts.read_packed(ZERO_POINT, self.scheme.bits, rows, groups, 0)
        return stored.T.to(torch.int16)

    def codes(self, rows: slice, columns: slice) -> Tensor:
        return self.parts.read_packed("weight_packed", self.scheme.bits, columns, rows, 1)


class PlainIntegers(CompressedIntegers):
    """`weight` in int8, and its zero points in int8."""

    def __init__(self, parts: Parts, scheme: Scheme) -> None:
        if "weight" not in parts:
            raise parts.refusal("weight", "is missing")
        shape = shape_of(parts, "weight")
        parts.expect("weight", shape, ("int8",))
        self.leaves = ("weight",)
        super().__init__(parts, scheme, shape)

    def zero_tensor(self, outputs: int, groups: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
        return (outputs, groups), ("int8",)

    def stored_zeros(self, rows: slice) -> Tensor:
        return self.parts.read(ZERO_POINT, rows).to(torch.int16) + self.middle

    def codes(self, rows: slice, columns: slice) -> Tensor:
        stored = self.parts.read("weight", rows, columns)
        return (stored.to(torch.int16) + self.middle).to(torch.uint8)


def has_zeros_alone(parts: Parts) -> bool:
    """Whether zero points are stored that are none, as first versions did for symmetric weights."""
    return ZERO_POINT in parts and not parts.read(ZERO_POINT).float().any()


def inside(name: str, raw: Any, form: object) -> Scheme:
    """A group of `config_groups`, which messages name."""
    try:
        if not isinstance(raw, dict):
            raise ValueError(f"{shown(raw)} is not a table")
        return Scheme(name, ConfigFields(raw), form)
    except KeyError as error:
        raise ValueError(f"config_groups: {name}: field {error} is missing") from None
    except ValueError as error:
        raise ValueError(f"config_groups: {name}: {error}") from None


def check_activations(value: Any, form: object) -> None:
    """Raise ValueError for activations that are quantised, except by dynamic FP8."""
    if not value:
        return
    is_dynamic = isinstance(value, dict) and value.get("dynamic") is True
    is_float = is_dynamic and value.get("type") == "float" and value.get("num_bits") == 8
    if form != "float-quantized" or not is_float:
        raise ValueError(
            f"input_activations {shown(value)} is not read in the format {form}; only its absence "
            "is, and dynamic FP8 in float-quantized"
        )


def check_sparsity(value: Any) -> None:
    if value and (not isinstance(value, dict) or value.get("format") != "dense"):
        raise ValueError(f"sparsity_config {shown(value)} is not read; only its absence is")


def check_patterns(names: list[str]) -> None:
    for name in names:
        if name.startswith(PATTERN):
            compiled(name.removeprefix(PATTERN))


def rank_of(module: str, target: str) -> int | None:
    """How well a target fits: 0 a name, 1 a pattern, 2 all linear layers; None if it does not."""
    if target.startswith(PATTERN):
        return 1 if compiled(target.removeprefix(PATTERN)).match(module) else None
    if target == module:
        return 0
    return 2 if target == EVERY else None
