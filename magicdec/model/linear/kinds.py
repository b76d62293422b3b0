"""Which kind of layer multiplies: torch's own, packed for a CPU, or int8 in either way.

Owns the exchange of one kind for another, and the sum over ranks after any of them. Must not know
of the model around the layers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from magicdec.model.linear.int8 import Int8Linear, PackedInt8Linear
from magicdec.model.linear.packed import PackedLinear

Linear = nn.Linear | PackedLinear | Int8Linear | PackedInt8Linear
"""x [..., K] -> [..., N]; has `bias`, None or a parameter, whether it adds it or not."""


Reduce = Callable[[Tensor], Tensor]
"""Sum a partial result over the ranks of the tensor-parallel group."""


class PartialLinear(nn.Linear):
    """A linear layer whose inputs are spread over ranks. `forward` leaves the bias out: it is added
    once, after the sum."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def row_parallel(x: Tensor, linear: Linear, reduce: Reduce) -> Tensor:
    """A `PartialLinear`, packed or not, the sum over ranks, and the bias."""
    partial: Tensor = reduce(linear(x))
    return partial if linear.bias is None else partial + linear.bias


def exchange(model: nn.Module, make: Callable[[Linear], Linear]) -> None:
    """Every layer that multiplies for what `make` makes of it, one at a time."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear | Int8Linear):
                setattr(module, name, make(child))


def to_int8(linear: Linear) -> Linear:
    """The same layer with room for int8 weights and scales, not filled."""
    assert isinstance(linear, nn.Linear)
    return Int8Linear(linear, adds_bias=not isinstance(linear, PartialLinear))


def pack(linear: Linear) -> Linear:
    """The same layer, laid out for the kernel. Raises ValueError unless its weights are bfloat16 or
    int8."""
    if isinstance(linear, Int8Linear):
        return PackedInt8Linear(linear)
    assert isinstance(linear, nn.Linear)
    return PackedLinear(linear.weight, linear.bias, not isinstance(linear, PartialLinear))
