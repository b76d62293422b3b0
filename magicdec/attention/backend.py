"""AttentionBackend: the interface that every attention kernel implements. Prefill, decoding and
verification all go through it; they differ only in T.

Owns the protocol and the code that all backends share, such as the causal mask over a view and its
sliding window. Must not know of KV policies or models. Each backend also declares what it supports
and how much memory it allocates, so that no other code has to branch on its name.

Shapes: B rows, T new tokens, H query heads, G KV heads (H a multiple of G), D head size, N visible
keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from magicdec.config.capabilities import Capabilities
from magicdec.kv.layout import PLAIN, KVLayout
from magicdec.kv.view import WEIGHTS_BLOCK, KVView
from magicdec.names import ATTENTION_BACKENDS, load_named


@dataclass(frozen=True)
class CallSize:
    """The size of one layer's attention call on one rank: B rows, T new tokens a row, S cached
    tokens a row."""

    B: int
    T: int
    S: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of all cached tokens."""
        return 2 * self.B * self.S * self.num_kv_heads * self.head_dim * self.dtype_bytes

    @property
    def mask_bytes(self) -> int:
        """Bytes of the boolean mask, and of its copy as numbers that are added to the scores."""
        return self.B * self.T * self.S * (1 + self.dtype_bytes)


class AttentionBackend(Protocol):
    """Every backend derives from this class, and each model gets its own instance. A forward calls
    `plan` once, and then `run` once for each layer with the same view."""

    capabilities: ClassVar[Capabilities]

    @staticmethod
    def load(device: str) -> None:
        """Load whatever must be loaded before the rest of the run. Most backends need nothing."""
        return None

    @staticmethod
    def working_bytes(size: CallSize) -> int:
        """An estimate of the bytes that `run` allocates for one layer, without its inputs and its
        output."""
        return 0

    @staticmethod
    def weights_bytes(size: CallSize) -> int:
        """The bytes that `run_with_weights` allocates in addition to those of `run`."""
        return 0

    def block_size(self, max_tokens: int) -> int:
        """The number of tokens in a KV block, for rows of at most `max_tokens` tokens. It is a
        multiple of the tile size of the layout."""

    def layout(self, dtype: torch.dtype) -> KVLayout:
        """The memory layout in which `run` expects a KV cache of that dtype."""
        return PLAIN

    def plan(self, view: KVView) -> None:
        """Prepare the data that all layers of one forward share."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView) -> Tensor:
        """Append k, v [B,T,G,D] to the cache and compute attention: q [B,T,H,D] -> [B,T,H,D]. The
        score of a key is q.k / sqrt(D)."""

    def run_with_weights(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView
    ) -> tuple[Tensor, Tensor]:
        """Return the output of `run`, equal to the bit, and the attention weights of each block of
        keys: float32 [B, G, num_weight_blocks], summed over the block's keys, the new tokens and
        the query heads of a KV head. For backends that return them, and at most MOST_WATCHED new
        tokens."""
        raise NotImplementedError("refused before the run")


def visible_mask(
    view: KVView, key_positions: Tensor, first: int = 0, last: int | None = None
) -> Tensor:
    """The attention mask of rows `first` to `last` of the view: bool [B, G or 1, T, N], true where
    a new token sees a key. `key_positions` [B, G or 1, N] is -1 for padding."""
    queries = view.query_positions()[first:last, None, :, None]
    keys = key_positions.unsqueeze(2)
    mask = (keys >= 0) & (keys <= queries)
    return mask if view.window is None else mask & (keys > queries - view.window)


def sum_blocks(weights: Tensor, key_positions: Tensor, num_blocks: int) -> Tensor:
    """Sum attention weights, float32 [B, G, N], by block: [B, G, num_blocks]. `key_positions`
    [B, G or 1, N] says to which block a key belongs."""
    # Padding has weight 0, so it may be added to block 0.
    blocks = (key_positions.clamp(min=0) // WEIGHTS_BLOCK).expand_as(weights)
    return weights.new_zeros(*weights.shape[:2], num_blocks).scatter_add_(2, blocks, weights)


def backend_class(name: str) -> type[AttentionBackend]:
    """The class of the backend of that name. The library that it needs may be missing."""
    backend: type[AttentionBackend] = load_named(ATTENTION_BACKENDS, name)
    return backend
