"""GPTQ: `qweight` packed along the inputs, `qzeros` along the outputs, and `g_idx`, the group of
each input. The first version of the format stores zero points less one."""

from __future__ import annotations

import torch
from torch import Tensor

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
)
from magicdec.model.families.fields import ConfigFields, shown, switch

# How it was quantised, and which kernels its program chose.
IRRELEVANT_FIELDS = """
act_group_aware backend batch_size block_name_to_quantize cache_block_outputs
damp_auto_increment damp_percent dataset disable_exllama exllama_config hyb_act
max_input_length meta model_file_base_name model_name_or_path model_seqlen
module_name_preceding_first_block mse offload_to_disk offload_to_disk_path pad_token_id
parallel_packing quantizer static_groups tokenizer true_sequential use_cuda_fp16 use_exllama
# AutoRound's, which writes this format too.
autoround_version enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input
gradient_accumulate_steps iters low_gpu_mem_usage lr minmax_lr nsamples provider scale_dtype seqlen
train_bs
"""
IRRELEVANT = frozenset(
    field
    for line in IRRELEVANT_FIELDS.splitlines()
    if not line.startswith("#")
    for field in line.split()
)
VERSIONS = ("gptq", "gptq_v2")


class Gptq(QuantizationMethod):
    def __init__(self, table: ConfigFields) -> None:
        super().__init__(table)
        choose(table, "bits", (4, 8), None)
        choose(table, "pack_dtype", ("int32",), "int32")
        choose(table, "data_type", ("int",), "int")
        for field in ("checkpoint_format", "format"):
            choose(table, field, VERSIONS, "gptq")
        versions = {
            table.get(field)
            for field in ("checkpoint_format", "format")
            if table.get(field) is not None
        }
        if len(versions) > 1:
            raise ValueError("checkpoint_format and format contradict each other")
        absent(table, "dynamic", "adapter", "rotation", "is_marlin_format")
        self.bits = int(table["bits"])
        self.is_second = versions == {"gptq_v2"}
        self.group_size = group_size_of(table, "group_size", None)
        self.is_symmetric = switch(table, "sym", True)
        switch(table, "desc_act", False)  # g_idx says it for each matrix
        self.with_head = switch(table, "lm_head", False)
        self.inner = inside_blocks(table)
        check_rest(table, IRRELEVANT)

    def is_marked(self, parts: Parts) -> bool:
        return "qweight" in parts

    def quantizes(self, module: str, is_head: bool) -> bool:
        if is_head:
            return self.with_head
        return self.inner is None or module.endswith(tuple(f".{name}" for name in self.inner))

    def matrix(self, parts: Parts, module: str) -> GptqMatrix:
        return GptqMatrix(parts, self)


class GptqMatrix(IntegerMatrix):
    scale_leaf = "scales"

    def __init__(self, parts: Parts, method: Gptq) -> None:
        in_word = WORD // method.bits
        words, outputs = shape_of(parts, "qweight")
        inputs = words * in_word
        group = inputs if method.group_size == -1 else method.group_size
        groups = -(-inputs // group)
        parts.expect("qweight", (words, outputs), ("int32",))
        parts.expect("qzeros", (groups, -(-outputs // in_word)), ("int32",))
        parts.expect("scales", (groups, outputs), SCALE_DTYPES)
        self.leaves = ("qweight", "qzeros", "scales")
        group_of = None
        if "g_idx" in parts:
            parts.expect("g_idx", (inputs,), ("int32", "int64"))
            self.leaves += ("g_idx",)
            group_of = parts.read("g_idx")
        self.method = method
        self._check_zeros(parts, groups, outputs)
        super().__init__(parts, (outputs, inputs), method.bits, group, group_of)

    def _check_zeros(self, parts: Parts, groups: int, outputs: int) -> None:
        """Refuse zero points of which programs disagree what they stand for."""
        method = self.method
        bits = method.bits
        stored = parts.read_packed("qzeros", bits, slice(0, outputs), slice(0, groups), 1)
        middle = 1 << (bits - 1)
        expected = middle if method.is_second else middle - 1
        if method.is_symmetric and bool((stored != expected).any()):
            found = int(stored[stored != expected][0])
            version = VERSIONS[method.is_second]
            raise parts.refusal(
                "qzeros",
                f"stores a zero point of {found}, but a symmetric matrix of {bits} bits in the "
                f"format {version} stores {expected}",
                f"correct checkpoint_format ({' or '.join(VERSIONS)}) or sym in config.json",
            )
        most = (1 << bits) - 1
        if not method.is_second and bool((stored == most).any()):
            raise parts.refusal(
                "qzeros",
                f"stores a zero point of {most}, which in the format gptq some programs read as "
                f"{most + 1} and others as 0",
                "choose a checkpoint in the format gptq_v2",
            )

    def codes(self, rows: slice, columns: slice) -> Tensor:
        return self.parts.read_packed("qweight", self.method.bits, columns, rows, 0)

    def scales(self, rows: slice) -> Tensor:
        return self.parts.read("scales", slice(None), rows).T

    def zeros(self, rows: slice) -> Tensor:
        groups = slice(0, self.num_groups)
        stored = self.parts.read_packed("qzeros", self.method.bits, rows, groups, 1)
        return stored.T.to(torch.int16) + (not self.method.is_second)


def group_size_of(table: ConfigFields, field: str, default: int | None) -> int:
    """Inputs in a group; -1 for all."""
    value = table.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
        raise ValueError(f"{field} {shown(value)} is neither a number of inputs nor -1 for all")
    return value


def inside_blocks(table: ConfigFields) -> set[str] | None:
    """Names in a layer of the modules that are quantised; None for all."""
    value = table.get("modules_in_block_to_quantize")
    if value is None:
        return None
    flat = [name for part in value for name in (part if isinstance(part, list) else [part])]
    if not all(isinstance(name, str) for name in flat):
        raise ValueError(f"modules_in_block_to_quantize {shown(value)} is not a list of names")
    return set(flat)
