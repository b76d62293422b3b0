"""EagleHead: a head that drafts from hidden states of its target (EAGLE-3: Li et al., arXiv
2503.01840, section 3; EAGLE-3.1, arXiv 2605.09992).

Its states are those after some of the target's layers, concatenated and multiplied by `fc`. Shapes
are those of `draft_head.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.block import Attend, Block, RMSNorm, add_norm, make_norm
from magicdec.model.config import ModelConfig
from magicdec.model.draft_head import DraftHead
from magicdec.model.gated_delta import Remember
from magicdec.model.linear.packed import Linear, Reduce
from magicdec.model.positions import PositionEncoding
from magicdec.model.transformer import Embedding, Transformer


class FirstBlock(Block):
    """The first layer of a head: attention takes the normed embedding and the normed state."""

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        super().__init__(config, shard)
        assert config.eagle is not None, "a layer of a head"
        attention = self.self_attention
        qkv = attention.qkv
        inputs = 2 * config.hidden_size
        attention.qkv = nn.Linear(inputs, qkv.out_features, bias=qkv.bias is not None)
        self.hidden_norm = make_norm(config)
        self.norm_before_residual = config.eagle.norm_before_residual

    def forward(
        self,
        x: Tensor,
        y: Tensor | None,
        layer: int,
        encode: PositionEncoding,
        attend: Attend,
        reduce: Reduce,
        remember: Remember | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The layer of embedding and state [B, T, 2 H]; the result as `Block`'s."""
        embedding, state = (part.contiguous() for part in x.chunk(2, dim=-1))
        normed = self.hidden_norm(state)
        both = torch.cat([self.attention_norm(embedding), normed], dim=-1)
        x = normed if self.norm_before_residual else state
        y = self.self_attention(both, layer, encode, attend, reduce)
        assert self.mlp_norm is not None, "the residuals of a head are sequential"
        x, normed = add_norm(self.mlp_norm, x, y)
        return x, self.mlp(normed, reduce)


class EagleHead(DraftHead):
    """A head from [embedding, state] [B, T, 2 H]. `embedding` may be the target's."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard = Shard(),
        layers: range | None = None,
        has_ends: bool | None = None,
    ) -> None:
        eagle = config.eagle
        assert eagle is not None, "the config of a head"
        super().__init__(config, shard, layers, has_ends)
        width = eagle.num_states * eagle.state_size
        if eagle.has_embedding:
            self.embedding = Embedding(eagle.target_vocab_size, config.hidden_size)
        self.input_norm = RMSNorm(width, config.norm_eps) if eagle.norm_before_fc else None
        count = eagle.num_states if eagle.fc_norm else 0
        self.fc_norm = nn.ModuleList(
            RMSNorm(eagle.state_size, config.norm_eps) for _ in range(count)
        )
        self.fc: Linear = nn.Linear(width, config.hidden_size, bias=False)
        rest = (Block(config, shard) for _ in self.layers[1:])
        self.blocks = nn.ModuleList([FirstBlock(config, shard), *rest])
        first, last = self.head_rows
        self.head: Linear = nn.Linear(config.hidden_size, last - first, bias=False)
        self.norm_output = eagle.norm_output

    def share(self, target: Transformer) -> None:
        assert self.config.eagle is not None, "the config of a head"
        if not self.config.eagle.has_embedding:
            self.embedding = target.embedding

    def pair(self, token_ids: Tensor, state: Tensor) -> Tensor:
        return torch.cat([self.embedding(token_ids), state], dim=-1)

    def reduced(self, states: Tensor) -> Tensor:
        if len(self.fc_norm):
            parts = zip(self.fc_norm, states.unbind(2), strict=True)
            states = torch.stack([norm(part.contiguous()) for norm, part in parts], dim=2)
        flat = states.flatten(2)
        if self.input_norm is not None:
            flat = self.input_norm(flat)
        reduced: Tensor = self.fc(flat)
        return reduced

    def read_out(self, output: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.norm(output)
        logits: Tensor = self.head(normed)
        return logits, normed if self.norm_output else output
