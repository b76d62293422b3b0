"""AWQ in the layout "gemm": 4 bits, packed along the outputs in an order of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from magicdec.model.checkpoint.quantized.gptq import group_size_of
from magicdec.model.checkpoint.quantized.matrix import (
    SCALE_DTYPES,
    WORD,
    IntegerMatrix,
    Parts,
    shape_of,
)
from magicdec.model.checkpoint.quantized.method import (
    QuantizationMethod,
    absent,
    check_rest,
    choose,
    is_listed,
    listed_modules,
)
from magicdec.model.families.fields import ConfigFields, size

# Which kernels its program chose, and how it was quantised.
IRRELEVANT_FIELDS = """
backend do_fuse exllama_config fuse_max_seq_len modules_to_fuse meta damp_percent
damp_auto_increment true_sequential static_groups
"""
IRRELEVANT = frozenset(IRRELEVANT_FIELDS.split())
BITS = 4
# The places in a word, counted from its lowest bits, of outputs 0 to 7.
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class Awq(QuantizationMethod):
    def __init__(self, table: ConfigFields) -> None:
        super().__init__(table)
        bits = size(table, "bits", "w_bit", default=BITS)
        if bits != BITS:
            raise ValueError(f"bits {bits} is not read; those that are: {BITS}")
        for field in ("version", "format", "checkpoint_format"):
            value = table.get(field)
            if value is not None and str(value).lower() != "gemm":
                raise ValueError(f"{field} {value!r} is not read; those that are: gemm")
        choose(table, "pack_dtype", ("int32",), "int32")
        choose(table, "zero_point", (True,), True)
        choose(table, "sym", (False,), False)
        choose(table, "desc_act", (False,), False)
        absent(table, "dynamic", "adapter", "rotation", "lm_head")
        given = [field for field in ("group_size", "q_group_size") if table.get(field) is not None]
        sizes = {group_size_of(table, field, None) for field in given} or {128}
        if len(sizes) > 1:
            raise ValueError("group_size and q_group_size contradict each other")
        self.group_size = sizes.pop()
        self.plain = listed_modules(table, "modules_to_not_convert")
        check_rest(table, IRRELEVANT)

    def is_marked(self, parts: Parts) -> bool:
        return "qweight" in parts

    def quantizes(self, module: str, is_head: bool) -> bool:
        return not is_head and not is_listed(module, self.plain)

    def leaves_out(self, module: str, is_head: bool) -> bool:
        # To AutoAWQ a name in the list is a part of those of modules.
        is_part = any(name in module for name in self.plain)
        return is_part or not self.quantizes(module, is_head)

    def matrix(self, parts: Parts, module: str) -> AwqMatrix:
        return AwqMatrix(parts, self.group_size)


class AwqMatrix(IntegerMatrix):
    scale_leaf = "scales"
    leaves = ("qweight", "qzeros", "scales")

    def __init__(self, parts: Parts, group_size: int) -> None:
        in_word = WORD // BITS
        inputs, words = shape_of(parts, "qweight")
        outputs = words * in_word
        group = inputs if group_size == -1 else group_size
        groups = -(-inputs // group)
        parts.expect("qweight", (inputs, words), ("int32",))
        parts.expect("qzeros", (groups, words), ("int32",))
        parts.expect("scales", (groups, outputs), SCALE_DTYPES)
        super().__init__(parts, (outputs, inputs), BITS, group)

    def codes(self, rows: slice, columns: slice) -> Tensor:
        return self.parts.read_packed("qweight", BITS, rows, columns, 1, PLACES).T

    def scales(self, rows: slice) -> Tensor:
        return self.parts.read("scales", slice(None), rows).T

    def zeros(self, rows: slice) -> Tensor:
        groups = slice(0, self.num_groups)
        stored = self.parts.read_packed("qzeros", BITS, rows, groups, 1, PLACES)
        return stored.T.to(torch.int16)
