"""The kinds of linear layers: torch's own, packed for a CPU kernel, and int8 in both forms.

Owns the replacement of one kind by another, and the row-parallel layer with its all-reduce. Must
not know of the model around the layers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from magicdec.model.linear.int8 import Int8Linear, PackedInt8Linear
from magicdec.model.linear.packed import PackedLinear

Linear = nn.Linear | PackedLinear | Int8Linear | PackedInt8Linear
"""x [..., K] -> [..., N]. `bias` is None or a parameter, added by `forward` or by its caller."""


Reduce = Callable[[Tensor], Tensor]
"""All-reduce: sum a partial result over the ranks of the tensor-parallel group."""


class PartialLinear(nn.Linear):
    """A linear layer whose input features are sharded over ranks. `forward` leaves out the bias,
    which is added once, after the all-reduce."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def row_parallel(x: Tensor, linear: Linear, reduce: Reduce) -> Tensor:
    """A row-parallel layer: a `PartialLinear` of any kind, the all-reduce, and the bias."""
    partial: Tensor = reduce(linear(x))
    return partial if linear.bias is None else partial + linear.bias


def exchange(model: nn.Module, make: Callable[[Linear], Linear]) -> None:
    """Replace every linear layer of `model` by `make(layer)`, one at a time to save memory."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear | Int8Linear):
                setattr(module, name, make(child))


def to_int8(linear: Linear) -> Linear:
    """An int8 layer of the same size, with empty weights and scales."""
    assert isinstance(linear, nn.Linear)
    return Int8Linear(linear, adds_bias=not isinstance(linear, PartialLinear))


def pack(linear: Linear) -> Linear:
    """The same layer with packed weights. Raises ValueError unless they are bfloat16 or int8."""
    if isinstance(linear, Int8Linear):
        return PackedInt8Linear(linear)
    assert isinstance(linear, nn.Linear)
    return PackedLinear(linear.weight, linear.bias, not isinstance(linear, PartialLinear))
