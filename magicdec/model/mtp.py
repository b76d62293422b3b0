"""MtpHead: the head for multi-token prediction that a model was trained with (DeepSeek-V3, arXiv
2412.19437, section 2.2; that of Qwen3.5, Qwen3-Next and MiMo).

A slot's state is the target's, after its final norm, or the head's own output, after the norm of
the head. State and embedding are normed, and a projection of both, the embedding first (in MiMo the
state), is what one layer of the model's kind takes. Embedding and `head` are the target's. Shapes
are those of `draft_head.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.block import make_norm
from magicdec.model.config import ModelConfig
from magicdec.model.draft_head import DraftHead
from magicdec.model.linear.packed import Linear
from magicdec.model.transformer import Transformer, make_block


class MtpHead(DraftHead):
    """A head from projections [B, T, H]."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard = Shard(),
        layers: range | None = None,
        has_ends: bool | None = None,
    ) -> None:
        assert config.is_mtp, "the config of a head"
        super().__init__(config, shard, layers, has_ends)
        self.token_norm = make_norm(config)
        self.state_norm = make_norm(config)
        width = config.hidden_size
        self.projection: Linear = nn.Linear(2 * width, width, bias=False)
        self.blocks = nn.ModuleList(make_block(config, shard, kind) for kind in config.kinds)
        self.head: Linear | None = None
        self.is_sharing = False

    def share(self, target: Transformer) -> None:
        assert self.shard == target.shard, "each rank has its rows of the target's head"
        self.embedding = target.embedding
        self.target_norm = target.norm
        self.head = target.head  # None: the embedding
        self.is_sharing = True

    @property
    def has_tied_head(self) -> bool:
        return self.is_sharing and self.head is None

    def reduced(self, states: Tensor) -> Tensor:
        normed: Tensor = self.target_norm(states[:, :, 0].contiguous())
        return normed

    def pair(self, token_ids: Tensor, state: Tensor) -> Tensor:
        both = [self.token_norm(self.embedding(token_ids)), self.state_norm(state)]
        if self.config.mtp_state_first:
            both.reverse()
        projected: Tensor = self.projection(torch.cat(both, dim=-1))
        return projected

    def read_out(self, output: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.norm(output)
        return self.multiply_head(normed), normed
