"""FP8 as of DeepSeek and Qwen: `weight` in float8_e4m3fn, and `weight_scale_inv`, with which it is
multiplied, for blocks or for the whole matrix."""

from __future__ import annotations

from magicdec.model.checkpoint.quantized.matrix import Parts, ScaledMatrix, shape_of
from magicdec.model.checkpoint.quantized.method import (
    QuantizationMethod,
    absent,
    check_rest,
    choose,
    is_listed,
    listed_modules,
)
from magicdec.model.families.fields import ConfigFields, shown

SCALES = ("weight_scale_inv", "weight_scale")  # both are multiplied with
IRRELEVANT = frozenset(("dequantize",))


class Fp8(QuantizationMethod):
    def __init__(self, table: ConfigFields) -> None:
        super().__init__(table)
        choose(table, "activation_scheme", ("dynamic",), "dynamic")
        choose(table, "fmt", ("e4m3",), "e4m3")
        choose(table, "scale_fmt", ("float", "ue8m0"), "float")
        choose(table, "expert_dtype", ("fp8",), "fp8")
        absent(table, "modules_to_convert", "kv_cache_scheme", "kv_cache_quant_method")
        block = table.get("weight_block_size")
        if block is not None and not is_block(block):
            raise ValueError(f"weight_block_size {shown(block)} is not two whole numbers")
        self.block = block
        aliases = ("modules_to_not_convert", "ignored_layers")
        self.plain = [name for field in aliases for name in listed_modules(table, field)]
        check_rest(table, IRRELEVANT)

    def is_marked(self, parts: Parts) -> bool:
        return "weight" in parts and parts.dtype("weight").startswith("float8")

    def quantizes(self, module: str, is_head: bool) -> bool:
        return not is_head and not is_listed(module, self.plain)

    def matrix(self, parts: Parts, module: str) -> ScaledMatrix:
        found = [leaf for leaf in SCALES if leaf in parts]
        if len(found) != 1:
            raise parts.refusal(
                SCALES[0], f"or {SCALES[1]} is expected beside the weight, found {len(found)}"
            )
        rows, columns = shape_of(parts, "weight")
        block = (rows, columns) if self.block is None else (self.block[0], self.block[1])
        return ScaledMatrix(parts, found[0], block)


def is_block(value: object) -> bool:
    """Whether it is [outputs, inputs] of a block."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in value)
    )
