"""Linear layers: torch's own, with int8 or int4 weights, and with weights packed for small GEMMs
(`packed.cpp`).

Int8 layers have a float32 scale per output channel, y = (x w) * scale + bias; int4 layers a
bfloat16 scale per output channel and GROUP inputs. Packed int8 and int4 round activations, to 16
and 8 bits, with a scale for each row and group of inputs. A packed call reads weights once; a
row's result is bitwise independent of other rows.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from magicdec.kernels.build import SHARED_HEADERS, load_library, share_openmp, use_huge_pages
from magicdec.model.linear import triton
from magicdec.model.linear.grouped import (
    SCALES,
    GroupedLinear,
    GroupedNumbers,
    NumberFormat,
)

SOURCE = Path(__file__).with_name("packed.cpp")
HEADERS = (
    SOURCE.with_suffix(".h"),
    SOURCE.with_name("packed_float32.h"),
    SOURCE.with_name("packed_amx.h"),
    SOURCE.with_name("packed_groups.h"),
    SOURCE.with_name("packed_int8.h"),
    SHARED_HEADERS / "arithmetic.h",
    SHARED_HEADERS / "amx.h",
    SHARED_HEADERS / "team.h",
    SHARED_HEADERS / "bf16.h",
    SHARED_HEADERS / "wide.h",
)
WIDTH = 64  # output channels per block of packed weights
TILE = 64  # the inputs of an int8 layer are filled up to a multiple of it
GROUP = 32  # inputs that share a scale of an int4 layer
INT4 = "int4"  # has no dtype of its own
# The numbers of an int4 draft: a bfloat16 scale for a group.
INT4_FORMAT = NumberFormat(4, GROUP, "bfloat16", False, -8)
# By the dtype of the weights: a block's sizes before WIDTH by the number of inputs, its dtype, and
# the function that packs.
PACKERS: dict[torch.dtype, tuple[Callable[[int], tuple[int, ...]], torch.dtype, str]] = {
    torch.float32: (lambda width: (width,), torch.float32, "magicdec_pack_float32"),
    torch.bfloat16: (lambda width: (width // 2,), torch.int32, "magicdec_pack"),
    torch.int8: (lambda width: (-(-width // TILE) * TILE,), torch.uint8, "magicdec_pack_int8"),
}


class FormatFields(ctypes.Structure):
    """`groups::Format` of packed_groups.h."""

    _fields_ = [(name, ctypes.c_int64) for name in ("bits", "group", "scale", "has_min", "least")]


class GroupFields(ctypes.Structure):
    """`groups::Weights` of packed_groups.h."""

    _fields_ = [("packed", ctypes.c_void_p), ("format", FormatFields)]


class PackedLinear(nn.Module):
    """x [..., K] -> [..., N] with packed weights: `weight` [N, K] in bfloat16 or float32, or
    int8 with float32 `scale` [N], or numbers in groups. int8 takes x in bfloat16, groups take both.
    Unless `adds_bias`, the caller adds `bias`.

    `rounds`: activations that numbers in groups are multiplied with are rounded to int8."""

    def __init__(
        self,
        weight: Tensor | GroupedNumbers,
        bias: Tensor | None = None,
        adds_bias: bool = True,
        scale: Tensor | None = None,
        rounds: bool = False,
    ) -> None:
        super().__init__()
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.adds_bias = adds_bias
        self.rounds = rounds
        self.format: NumberFormat | None = None
        self.is_odd = False
        self.scale = None if scale is None else nn.Parameter(scale, requires_grad=False)
        if isinstance(weight, GroupedNumbers):
            self.format = weight.format
            self.out_features, self.in_features = weight.numbers.shape
            packed = pack_groups(weight)
        else:
            packed = self._pack(weight)
        self.packed = nn.Parameter(packed, requires_grad=False)

    def _pack(self, weight: Tensor) -> Tensor:
        if weight.dtype not in PACKERS:
            raise ValueError(
                f"--linear packed needs bfloat16 or float32 weights, not {weight.dtype}"
            )
        # Padded: the kernels for bfloat16 and int8 multiply pairs of inputs.
        self.is_odd = weight.dtype != torch.float32 and weight.shape[1] % 2 == 1
        weight = (F.pad(weight, (0, 1)) if self.is_odd else weight).contiguous()
        self.out_features, self.in_features = weight.shape
        shape, dtype, pack = PACKERS[weight.dtype]
        blocks = -(-self.out_features // WIDTH)
        packed = torch.empty(blocks, *shape(self.in_features), WIDTH, dtype=dtype)
        use_huge_pages(packed)
        sizes = self.out_features, self.in_features
        getattr(library(), pack)(weight.data_ptr(), *sizes, packed.data_ptr())
        return packed

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.adds_bias else None
        x = F.pad(x, (0, 1)) if self.is_odd else x
        if self.format is not None:
            groups = group_fields(self.format, self.packed)
            return packed_groups(x, groups, bias, self.out_features, self.rounds)
        return packed_linear(x, self.packed, self.scale, bias, self.out_features)

    def dense(self) -> Tensor:
        """The weights [N, K]; float32 of numbers in groups."""
        if self.format is not None:
            return unpack_groups(self.packed, self.format, self.out_features).dense()
        weight: Tensor = self.packed
        if weight.dtype == torch.int32:
            pairs = self.packed.view(torch.bfloat16).unflatten(2, (WIDTH, 2))
            weight = pairs.transpose(2, 3).flatten(1, 2)
        width = self.in_features - self.is_odd
        return weight.transpose(1, 2).flatten(0, 1)[: self.out_features, :width]


def group_fields(kind: NumberFormat, packed: Tensor) -> GroupFields:
    """What the kernels are told. It holds the address of `packed`, which must outlive it."""
    return GroupFields(packed.data_ptr(), FormatFields(*format_numbers(kind)))


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
    """The inverse of `pack_groups`."""
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
    room = torch.empty(rows * (width + TILE))
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
    native.magicdec_pack_int8.argtypes = (pointer, size, size, pointer)
    native.magicdec_pack_groups.argtypes = (pointer, pointer, pointer, size, size, pointer, pointer)
    native.magicdec_linear_int8.argtypes = (
        pointer,
        size,
        pointer,
        pointer,
        size,
        size,
        pointer,
        pointer,
        pointer,
    )
    return native


def packed_linear(
    x: Tensor, packed: Tensor, scale: Tensor | None, bias: Tensor | None, out_features: int
) -> Tensor:
    is_float32 = x.dtype == torch.float32
    assert is_float32 == (packed.dtype == torch.float32)
    x = x.contiguous()
    width = x.shape[-1]
    out = torch.empty(*x.shape[:-1], out_features, dtype=x.dtype)
    rows = x.numel() // width
    bias_at = None if bias is None else bias.data_ptr()
    # Scratch: the kernels widen, reorder or round the activations into it.
    room = torch.empty(rows * (width + TILE))
    if scale is not None:
        library().magicdec_linear_int8(
            x.data_ptr(),
            rows,
            packed.data_ptr(),
            scale.data_ptr(),
            out_features,
            width,
            bias_at,
            room.data_ptr(),
            out.data_ptr(),
        )
        return out
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


# int8 weights converted to the activations' dtype at a time. It bounds the extra memory, and should
# be small enough for the converted weights to stay in a core's cache until they are multiplied.
CONVERTED = 1 << 19
# A GPU launches few kernels rather than small ones: on an H200 parts of a CPU's size took 40 to 85
# times as long as the product in bfloat16.
CONVERTED_ON_GPU = 1 << 26


class Int8Linear(nn.Module):
    """x [..., K] -> [..., N] with `weight` [N, K] int8, `scale` [N] float32. Unless `adds_bias`,
    the caller adds `bias`."""

    def __init__(
        self, weight: Tensor, scale: Tensor, bias: Tensor | None, adds_bias: bool = True
    ) -> None:
        super().__init__()
        self.adds_bias = adds_bias
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        num_outputs = len(self.weight)
        width = x.shape[-1]
        if triton.serves(x.device.type, x.numel() // width, x.dtype):
            out = triton.multiply(x, self.weight, self.scale)
        else:
            out = x.new_empty(*x.shape[:-1], num_outputs)
            most = CONVERTED_ON_GPU if x.device.type == "cuda" else CONVERTED
            step = max(1, most // width)
            for first in range(0, num_outputs, step):
                part = slice(first, first + step)
                out[..., part] = self.multiply(x, part)
        return out + self.bias if self.adds_bias and self.bias is not None else out

    def multiply(self, x: Tensor, part: slice) -> Tensor:
        """The outputs `part`. Every dtype of x represents int8 exactly; sums are scaled in
        float32 or wider."""
        return F.linear(x, self.weight[part].to(x.dtype)) * self.scale[part]


Linear = nn.Linear | PackedLinear | Int8Linear | GroupedLinear
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
        if isinstance(child, nn.Linear | Int8Linear | GroupedLinear)
    ]
    for module, name in places:
        setattr(module, name, make(cast(Linear, module.get_submodule(name))))


def to_int8(linear: Linear) -> Linear:
    """An int8 layer of the same size, empty, for the loader to fill."""
    assert isinstance(linear, nn.Linear)
    weight = torch.empty_like(linear.weight, dtype=torch.int8)
    scale = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    return Int8Linear(weight, scale, linear.bias, not isinstance(linear, PartialLinear))


def pack(linear: Linear, rounds: bool = False) -> Linear:
    """The layer with packed weights. Raises ValueError unless bfloat16, float32, int8 or in
    groups, for which `rounds` is as in PackedLinear."""
    if isinstance(linear, GroupedLinear):
        return PackedLinear(linear.numbers(), linear.bias, linear.adds_bias, rounds=rounds)
    if isinstance(linear, Int8Linear):
        return PackedLinear(linear.weight, linear.bias, linear.adds_bias, linear.scale)
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
        of_outputs = slice(-(-outputs // WIDTH) if name == "packed" else outputs)
        values = whole[:, of_outputs] if is_by_group else whole[of_outputs]
        part.register_parameter(name, nn.Parameter(values, requires_grad=False))
    part.out_features = outputs
    return part
