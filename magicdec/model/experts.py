"""Experts: a mixture of experts in place of a layer's MLP (Shazeer et al., arXiv 1701.06538; Jiang
et al., arXiv 2401.04088). A router gives each token to `num_used` of the experts, whose
outputs are added with its weights.

Each expert that any token of a forward goes to is read once for all of them. A token's result does
not depend on others: experts are added in the order of their numbers, in float32.

Shapes: B rows, T new tokens, N = B * T tokens, E experts, K experts of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.config import ModelConfig
from magicdec.model.elementwise.operators import Elementwise
from magicdec.model.linear.packed import Linear, PartialLinear, Reduce


class Experts(nn.Module):
    """This rank's share of the width of every expert, and of the MLP that all tokens go to (the
    shared expert of DeepSeekMoE, arXiv 2401.06066, section 3.2), which is added last. The first
    rank adds the biases of experts' outputs. `num_read`: experts that forwards have read so far,
    each once a forward."""

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        super().__init__()
        experts = config.experts
        assert experts is not None and config.gated_mlp and config.activation == "silu"
        self.num_used = experts.num_used
        self.renormalises = experts.renormalises
        self.gate = experts.gate
        self.is_first = shard.rank == 0
        self.elementwise = Elementwise()
        self.num_read = 0
        first, last = shard.mlp_units(experts.width)
        size = config.hidden_size
        has_bias = experts.has_bias
        self.router: Linear = nn.Linear(size, experts.num_experts, bias=has_bias)
        self.gate_up = nn.ModuleList(
            nn.Linear(size, 2 * (last - first), bias=has_bias) for _ in range(experts.num_experts)
        )
        self.down = nn.ModuleList(
            PartialLinear(last - first, size, bias=has_bias) for _ in range(experts.num_experts)
        )

        first, last = shard.mlp_units(experts.shared_width)
        self.shared_gate_up: Linear | None = None
        self.shared_down: Linear | None = None
        self.shared_gate: Linear | None = None
        if experts.shared_width:
            self.shared_gate_up = nn.Linear(size, 2 * (last - first), bias=False)
            self.shared_down = PartialLinear(last - first, size, bias=False)
        if experts.has_shared_gate:
            self.shared_gate = nn.Linear(size, 1, bias=False)

    def forward(self, x: Tensor, reduce: Reduce) -> Tensor:
        tokens = x.flatten(0, -2)  # [N, hidden]
        chosen, weights = self.route(tokens)
        out = torch.zeros(tokens.shape, dtype=torch.float32, device=x.device)
        touched = chosen.unique().tolist()
        self.num_read += len(touched)
        for number in touched:
            token, place = torch.where(chosen == number)
            hidden = self.activate(self.gate_up[number](tokens[token]))
            down = self.down[number]
            bias = down.bias if self.is_first else None
            self.elementwise.add_expert(out, token, down(hidden), bias, weights[token, place])
        if self.shared_gate_up is not None and self.shared_down is not None:
            every = torch.arange(len(tokens), device=x.device)
            shared = self.shared_down(self.activate(self.shared_gate_up(tokens)))
            weights = out.new_ones(len(tokens))
            if self.shared_gate is not None:
                weights = self.elementwise.weigh(self.shared_gate(tokens)[:, 0])
            self.elementwise.add_expert(out, every, shared, None, weights)
        return reduce(out.to(x.dtype).view_as(x))

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of tokens [N, hidden], and their weights: see `Elementwise.route`."""
        return self.elementwise.route(self.router(tokens), self.num_used, self.renormalises)

    def activate(self, gate_up: Tensor) -> Tensor:
        """[n, 2 * width] -> [n, width]."""
        if self.gate is None:
            return self.elementwise.silu_gate(gate_up)
        return self.elementwise.clamped_gate(gate_up, self.gate.limit, self.gate.alpha)
