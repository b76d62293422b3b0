"""Linear layers: torch's own, and with weights packed for small GEMMs (`packed.cpp`): plain
numbers, or numbers in groups of inputs (`grouped.py`).

A packed call reads weights once; a row's result is bitwise independent of other rows.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from magicdec.kernels.build import SHARED_HEADERS, load_library, share_openmp, use_huge_pages
from magicdec.model.linear.fp8 import Fp8Linear
from magicdec.model.linear.grouped import (
    SCALES,
    GroupedLinear,
    GroupedNumbers,
    NumberFormat,
)

SOURCE = Path(__file__).with_name("packed.cpp")
LAYER_HEADER = SOURCE.with_name("layer.h")
HEADERS = (
    LAYER_HEADER,
    SOURCE.with_suffix(".h"),
    SOURCE.with_name("block_order.h"),
    SOURCE.with_name("packed_float32.h"),
    SOURCE.with_name("packed_amx.h"),
    SOURCE.with_name("packed_groups.h"),
    SHARED_HEADERS / "arithmetic.h",
    SHARED_HEADERS / "amx.h",
    SHARED_HEADERS / "team.h",
    SHARED_HEADERS / "bf16.h",
    SHARED_HEADERS / "wide.h",
)
WIDTH = 64  # output channels per block of packed weights
# By the dtype of the weights: a block's sizes before WIDTH by the number of inputs, its dtype, and
# the function that packs.
PACKERS: dict[torch.dtype, tuple[Callable[[int], tuple[int, ...]], torch.dtype, str]] = {
    torch.float32: (lambda width: (width,), torch.float32, "magicdec_pack_float32"),
    torch.bfloat16: (lambda width: (width // 2,), torch.int32, "magicdec_pack"),
}


class FormatFields(ctypes.Structure):
    """`groups::Format` of packed_groups.h."""

    _fields_ = [(name, ctypes.c_int64) for name in ("bits", "group", "scale", "has_min", "least")]


class GroupFields(ctypes.Structure):
    """`groups::Weights` of packed_groups.h."""

    _fields_ = [
        ("packed", ctypes.c_void_p),
        ("format", FormatFields),
        ("order", ctypes.c_void_p),
    ]


class PackedLinear(nn.Module):
    """x [..., K] -> [..., N] with packed weights: `weight` [N, K] in bfloat16 or float32, which is
    also the dtype of x, or numbers in groups, which take both. Unless `adds_bias`, the caller adds
    `bias`. `order`: as in GroupedNumbers.

    `rounds`: activations that numbers in groups are multiplied with are rounded to int8."""

    order: Tensor | None

    def __init__(
        self,
        weight: Tensor | GroupedNumbers,
        bias: Tensor | None = None,
        adds_bias: bool = True,
        rounds: bool = False,
    ) -> None:
        super().__init__()
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.adds_bias = adds_bias
        self.rounds = rounds
        self.format: NumberFormat | None = None
        self.is_odd = False
        order = None
        if isinstance(weight, GroupedNumbers):
            self.format = weight.format
            order = weight.order
            self.out_features, self.in_features = weight.numbers.shape
            packed = pack_groups(weight)
        else:
            packed = self._pack(weight)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.register_buffer("order", order)

    def _pack(self, weight: Tensor) -> Tensor:
        if weight.dtype not in PACKERS:
            raise ValueError(
                f"--linear packed needs bfloat16 or float32 weights, not {weight.dtype}"
            )
        # Padded: the kernels for bfloat16 multiply pairs of inputs.
        self.is_odd = weight.dtype != torch.float32 and weight.shape[1] % 2 == 1
        weight = (F.pad(weight, (0, 1)) if self.is_odd else weight).contiguous()
        self.out_features, self.in_features = weight.shape
        shape, dtype, pack = PACKERS[weight.dtype]
        blocks = -(-self.out_features // WIDTH)
        packed = torch.empty(blocks, *shape(self.in_features), WIDTH, dtype=dtype)
        use_huge_pages(packed)
        getattr(library(), pack)(
            weight.data_ptr(), self.out_features, self.in_features, packed.data_ptr()
        )
        return packed

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.adds_bias else None
        x = F.pad(x, (0, 1)) if self.is_odd else x
        if self.format is not None:
            groups = group_fields(self.format, self.packed, self.order)
            return packed_groups(x, groups, bias, self.out_features, self.rounds)
        return packed_linear(x, self.packed, bias, self.out_features)

    def dense(self) -> Tensor:
        """The weights [N, K]; float32 of numbers in groups."""
        if self.format is not None:
            numbers = unpack_groups(self.packed, self.format, self.out_features)
            return replace(numbers, order=self.order).dense()
        weight: Tensor = self.packed
        if weight.dtype == torch.int32:
            pairs = self.packed.view(torch.bfloat16).unflatten(2, (WIDTH, 2))
            weight = pairs.transpose(2, 3).flatten(1, 2)
        width = self.in_features - self.is_odd
        return weight.transpose(1, 2).flatten(0, 1)[: self.out_features, :width]


def group_fields(kind: NumberFormat, packed: Tensor, order: Tensor | None = None) -> GroupFields:
    """What the kernels are told. It holds the addresses of the tensors, which must outlive it."""
    order_at = None if order is None else order.data_ptr()
    return GroupFields(packed.data_ptr(), FormatFields(*format_numbers(kind)), order_at)


def format_numbers(kind: NumberFormat) -> tuple[int, ...]:
    """The fields of `groups::Format`."""
    return kind.bits, kind.group, SCALES.index(kind.scale), kind.has_minimum, kind.least


def pack_groups(numbers: GroupedNumbers) -> Tensor:
    """[blocks, K / group, bytes of a group of WIDTH channels] (packed_groups.h)."""
    kind = numbers.format
    outputs, width = numbers.numbers.shape
    num_bytes = int(kind.group * kind.bytes_per_weight) * WIDTH
    packed = torch.empty(-(-outputs // WIDTH), width // kind.group, num_bytes, dtype=torch.uint8)
    use_huge_pages(packed)
    parts = [numbers.numbers.contiguous(), numbers.scale.contiguous()]
    minimum = None if numbers.minimum is None else numbers.minimum.contiguous()
    fields = group_fields(kind, packed)
    library().magicdec_pack_groups(
        *(part.data_ptr() for part in parts),
        None if minimum is None else minimum.data_ptr(),
        outputs,
        width,
        ctypes.byref(fields.format),
        packed.data_ptr(),
    )
    return packed


def unpack_groups(packed: Tensor, kind: NumberFormat, outputs: int) -> GroupedNumbers:
    """The inverse of `pack_groups`, which does not pack the order of the columns."""
    dtype = getattr(torch, kind.scale)
    parts = []
    at = 0
    for _ in range(1 + kind.has_minimum):
        part = packed[:, :, at : at + WIDTH * dtype.itemsize].contiguous().view(dtype)
        parts.append(part.transpose(1, 2).flatten(0, 1)[:outputs])
        at += WIDTH * dtype.itemsize
    numbers = packed[:, :, at:].unflatten(2, (-1, WIDTH, 4)).transpose(2, 3)  # entry, channel, byte
    numbers = numbers.permute(0, 2, 1, 3, 4)  # block, channel, group, entry, byte
    if kind.bits == 4:
        numbers = torch.stack([numbers & 15, numbers >> 4], dim=4)
    numbers = (numbers.to(torch.int16) + kind.least).to(torch.int8)
    return GroupedNumbers(
        kind,
        numbers.flatten(2).flatten(0, 1)[:outputs],
        parts[0],
        parts[1] if kind.has_minimum else None,
    )


def packed_groups(
    x: Tensor, groups: GroupFields, bias: Tensor | None, out_features: int, rounds: bool
) -> Tensor:
    x = x.contiguous()
    width = x.shape[-1]
    out = torch.empty(*x.shape[:-1], out_features, dtype=x.dtype)
    rows = x.numel() // width
    name = "magicdec_linear_groups" + "_float32" * (x.dtype == torch.float32)
    room = torch.empty(rows * width)
    getattr(library(), name)(
        x.data_ptr(),
        rows,
        ctypes.byref(groups),
        out_features,
        width,
        rounds,
        None if bias is None else bias.data_ptr(),
        room.data_ptr(),
        out.data_ptr(),
    )
    return out


def padding_bytes(packed: Tensor, out_features: int) -> int:
    """Bytes of a packed weight [blocks, ...] without an output channel."""
    num_bytes = packed.numel() * packed.element_size()
    channels = len(packed) * WIDTH
    return num_bytes // channels * (channels - out_features)


@cache
def library(*flags: str) -> ctypes.CDLL:
    share_openmp()
    native = load_library(SOURCE, ("-fopenmp", *flags), HEADERS)
    pointer = ctypes.c_void_p
    size = ctypes.c_int64
    native.magicdec_pack_float32.argtypes = (pointer, size, size, pointer)
    native.magicdec_pack.argtypes = (pointer, size, size, pointer)
    for multiply in (native.magicdec_linear_float32, native.magicdec_linear):
        multiply.argtypes = (pointer, size, pointer, size, size, pointer, pointer, pointer)
    for multiply in (native.magicdec_linear_groups, native.magicdec_linear_groups_float32):
        multiply.argtypes = (pointer, size, pointer, size, size, size, pointer, pointer, pointer)
    native.magicdec_pack_groups.argtypes = (pointer, pointer, pointer, size, size, pointer, pointer)
    return native


def multiply_in_team(dtype: torch.dtype) -> int:
    """The address of a `MultiplyInTeam` of layer.h for activations of a dtype."""
    name = "magicdec_linear_in_team" + "_float32" * (dtype == torch.float32)
    address = ctypes.cast(getattr(library(), name), ctypes.c_void_p).value
    assert address is not None, "the library has it"
    return address


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    is_float32 = x.dtype == torch.float32
    assert is_float32 == (packed.dtype == torch.float32)
    x = x.contiguous()
    width = x.shape[-1]
    out = torch.empty(*x.shape[:-1], out_features, dtype=x.dtype)
    rows = x.numel() // width
    bias_at = None if bias is None else bias.data_ptr()
    # Scratch: the kernels widen, reorder or round the activations into it.
    room = torch.empty(rows * width)
    name = "magicdec_linear" + "_float32" * is_float32
    getattr(library(), name)(
        x.data_ptr(),
        rows,
        packed.data_ptr(),
        out_features,
        width,
        bias_at,
        room.data_ptr(),
        out.data_ptr(),
    )
    return out


Linear = nn.Linear | PackedLinear | GroupedLinear | Fp8Linear
"""x [..., K] -> [..., N]. `bias` is None or a parameter, added by `forward` or by its caller."""


Reduce = Callable[[Tensor], Tensor]
"""All-reduce: sum a partial result over the ranks of the tensor-parallel group."""


class PartialLinear(nn.Linear):
    """A linear layer with inputs sharded over ranks. The bias is added after the all-reduce."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def row_parallel(x: Tensor, linear: Linear, reduce: Reduce) -> Tensor:
    partial: Tensor = reduce(linear(x))
    return partial if linear.bias is None else partial + linear.bias


def exchange(model: nn.Module, make: Callable[[Linear], Linear]) -> None:
    """Replace linear layers of `model` by `make(layer)`. Each is freed before the next is made,
    so nothing else may refer to it."""
    places = [
        (module, name)
        for module in model.modules()
        for name, child in module.named_children()
        if isinstance(child, nn.Linear | GroupedLinear)
    ]
    for module, name in places:
        setattr(module, name, make(cast(Linear, module.get_submodule(name))))


def pack(linear: Linear, rounds: bool = False) -> Linear:
    """The layer with packed weights. Raises ValueError unless bfloat16, float32 or in groups, for
    which `rounds` is as in PackedLinear."""
    if isinstance(linear, GroupedLinear):
        return PackedLinear(linear.numbers(), linear.bias, linear.adds_bias, rounds=rounds)
    assert isinstance(linear, nn.Linear)
    return PackedLinear(linear.weight, linear.bias, not isinstance(linear, PartialLinear))


def first_outputs(linear: Linear, num_bytes: int) -> Linear:
    """The layer with as many of its first outputs as `num_bytes` hold, at least WIDTH for each
    thread. It shares their weights."""
    parameters = dict(linear.named_parameters(recurse=False))
    size = sum(p.nbytes for p in parameters.values()) // linear.out_features
    least = WIDTH * torch.get_num_threads()
    outputs = min(linear.out_features, max(num_bytes // size // least, 1) * least)
    part = copy.copy(linear)
    part._parameters = dict(linear._parameters)
    for name, whole in parameters.items():
        is_by_group = name in ("scale", "minimum") and whole.ndim == 2
        output_slice = slice(-(-outputs // WIDTH) if name == "packed" else outputs)
        values = whole[:, output_slice] if is_by_group else whole[output_slice]
        part.register_parameter(name, nn.Parameter(values, requires_grad=False))
    part.out_features = outputs
    return part
