"""EmulatedModel: a stand-in for a model, or a part of one, on a machine that is not there. A
forward sleeps, and token p + 1 follows position p, through any system that serves a `Transformer`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from magicdec.distributed.channels.message import DUE
from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.block import Attend
from magicdec.model.config import ModelConfig
from magicdec.model.elementwise.operators import Elementwise
from magicdec.model.linear.packed import Reduce
from magicdec.model.transformer import BeforeLayer, KeepState, Transformer

DIGITS = 3  # of a position in a hidden state
BASE = 256  # integers up to it are exact in bfloat16


class EmulatedModel(Transformer):
    """A model whose forward takes `seconds` at any size, in equal shares by layer, counted from
    when its message, or the end of the last forward, was due (`Due`). Its last layer puts out a
    token's position."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        layers: range | None,
        has_ends: bool | None,
        seconds: float,
        like: Tensor,
    ) -> None:
        """`like` has the dtype and device of the missing weights."""
        nn.Module.__init__(self)
        self.set_part(config, shard, layers, has_ends)
        self.elementwise = Elementwise()
        self.seconds = seconds
        self.weight = nn.Parameter(like.new_zeros(1), requires_grad=False)
        self.blocks = nn.ModuleList()  # it has neither sinks nor experts

    def set_positions(self, max_positions: int, device: torch.device) -> None:
        """There is no position encoding."""

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        attend: Attend,
        reduce: Reduce,
        num_outputs: int | None = None,
        before_layer: BeforeLayer = lambda layer: None,
        keep: KeepState | None = None,
    ) -> Tensor:
        DUE.begin()
        for layer in self.layers:
            before_layer(layer)
            DUE.sleep(self.seconds / len(self.layers))
        if not self.is_last:
            return self.weight.new_zeros(*positions.shape, self.config.hidden_size)
        if num_outputs is not None:
            positions = positions[:, positions.shape[1] - num_outputs :]
        digits = torch.stack([positions // BASE**i % BASE for i in range(DIGITS)], dim=-1)
        hidden = self.weight.new_zeros(*positions.shape, self.config.hidden_size)
        hidden[..., :DIGITS] = digits.to(hidden.dtype)
        return self.logits(hidden) if self.has_head else hidden

    def logits(self, x: Tensor) -> Tensor:
        """This rank's logits [B, T, V]: 1 for the following token, else 0."""
        places = torch.tensor([BASE**i for i in range(DIGITS)], device=x.device)
        positions = (x[..., :DIGITS].long() * places).sum(dim=-1)
        first, last = self.head_rows
        ids = torch.arange(first, last, device=x.device)
        following = (positions + 1) % self.config.vocab_size
        return (ids == following.unsqueeze(-1)).to(x.dtype)


def following_tokens(prompt_len: int, count: int, vocab_size: int) -> list[int]:
    return [(prompt_len + i) % vocab_size for i in range(count)]
