"""DraftHead: a model that drafts for another one from hidden states of this target. What a drafter
needs of it is the same for every kind (`speculation/head_drafter.py`).

Slot i takes the target's states of token i and the embedding of token i + 1, and predicts token
i + 2. Where a draft has no states of the target, it takes what the head made of the slot before.

Shapes: B rows, T slots, N states of the target, S numbers of a state, H hidden size.
"""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, nn

from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.block import make_norm
from magicdec.model.config import ModelConfig
from magicdec.model.elementwise.operators import Elementwise
from magicdec.model.transformer import Transformer


class DraftHead(Transformer):
    """A head, as a model from slots (`pair`) to its output. `target_ids` [draft vocabulary] are
    the target's ids of what it predicts. Its embedding, norm and head are no ends of `forward`."""

    target_ids: Tensor

    def __init__(
        self, config: ModelConfig, shard: Shard, layers: range | None, has_ends: bool | None
    ) -> None:
        """Without layers, which a kind adds; `has_ends` is that of a `Transformer`, and a head has
        none."""
        nn.Module.__init__(self)
        self.set_part(config, shard, layers, has_ends=False)
        self.elementwise = Elementwise()
        self.norm = make_norm(config)  # the first parameter, whose dtype is that of activations

    @abstractmethod
    def share(self, target: Transformer) -> None:
        """Take from the target, on the same ranks, what the head has not of its own."""

    @abstractmethod
    def reduced(self, states: Tensor) -> Tensor:
        """[B, T, H] from the target's states [B, T, N, S]: what the first slots of a draft take."""

    @abstractmethod
    def pair(self, token_ids: Tensor, state: Tensor) -> Tensor:
        """The input of slots from token ids [B, T] and `state` [B, T, H], which is `reduced` or
        comes from `read_out`."""

    @abstractmethod
    def read_out(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's logits [B, T, its draft vocabulary] of an output [B, T, H], and the state
        that the next draft takes."""
