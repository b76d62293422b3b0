"""The MLP of a block on one tensor-parallel shard, gated or not.

Owns the projections and the activation between the norm and the residual addition, with the
all-reduce over ranks. Must not know of attention nor of the block around it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.config import ModelConfig
from magicdec.model.elementwise.operators import Elementwise
from magicdec.model.linear.kinds import Linear, PartialLinear, Reduce, row_parallel

ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        super().__init__()
        first, last = shard.split(config.intermediate_size)
        self.is_gated, self.activate = config.gated_mlp, ACTIVATION_FUNCTIONS[config.activation]
        self.elementwise = Elementwise()
        width = (2 if self.is_gated else 1) * (last - first)  # gate and up, or up alone
        self.gate_up: Linear = nn.Linear(config.hidden_size, width, bias=config.mlp_bias)
        self.down: Linear = PartialLinear(last - first, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor, reduce: Reduce) -> Tensor:
        return row_parallel(self.hidden(x), self.down, reduce)

    def hidden(self, x: Tensor) -> Tensor:
        """The input of the down projection, [B, T, this rank's share of intermediate_size]."""
        both = self.gate_up(x)
        if not self.is_gated:
            return self.activate(both)
        if self.activate is F.silu:
            return self.elementwise.silu_gate(both)
        gate, up = both.chunk(2, dim=-1)
        return self.activate(gate) * up
