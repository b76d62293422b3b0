"""AttentionBackend: the interface of attention kernels for prefill, decoding and verification,
which differ only in T. A backend declares what it supports, so that no other code branches on its
name.

Shapes: B rows, T new tokens, H query heads, G KV heads (H a multiple of G), D head size, N visible
keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from magicdec.config.capabilities import Capabilities
from magicdec.kv.layout import CODED, PLAIN, KVLayout
from magicdec.kv.view import WEIGHTS_BLOCK, KVView
from magicdec.names import ATTENTION_BACKENDS, load_named


@dataclass(frozen=True)
class CallSize:
    """The size of a layer's attention call on one rank: B rows, T new and S cached tokens a row.
    The numbers of the cache are codes, of 8 bits or fewer, if it `is_coded`."""

    B: int
    T: int
    S: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    is_coded: bool = False

    @property
    def kv_numbers(self) -> int:
        """Numbers of all K and V."""
        return 2 * self.B * self.S * self.num_kv_heads * self.head_dim

    @property
    def kv_bytes(self) -> int:
        return self.kv_numbers * self.dtype_bytes

    @property
    def mask_bytes(self) -> int:
        return self.B * self.T * self.S * (1 + self.dtype_bytes)


class AttentionBackend(Protocol):
    """The base class of attention backends, one instance a model. A forward calls `plan` once,
    then `run` for each layer with the same view."""

    capabilities: ClassVar[Capabilities]
    # float32 [L, H]: logits that take part in the softmax of a layer's query heads like scores of a
    # key without a value (gpt-oss, arXiv 2508.10925, section 2.2); None: the model has none.
    sinks: Tensor | None = None

    @staticmethod
    def load(device: str) -> None:
        """Load parts that must be loaded before the rest of the run."""
        return None

    @staticmethod
    def working_bytes(size: CallSize) -> int:
        """Estimated bytes that `run` allocates for one layer, without inputs and output."""
        return 0

    @staticmethod
    def weights_bytes(size: CallSize) -> int:
        """Further bytes that `run_with_weights` allocates."""
        return 0

    def block_size(self, max_tokens: int) -> int:
        """Tokens of a KV block for rows of at most `max_tokens`: a multiple of the layout's
        tile."""

    def layer_sinks(self, layer: int) -> Tensor | None:
        """The sink logits of a layer, float32 [H]."""
        return None if self.sinks is None else self.sinks[layer]

    def layout(self, dtype: torch.dtype) -> KVLayout:
        """The layout in which `run` expects a cache whose numbers are stored in that dtype."""
        assert dtype not in CODED, "refused before the run"
        return PLAIN

    def plan(self, view: KVView) -> None:
        """Prepare data that all layers of a forward share."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView) -> Tensor:
        """Append k, v [B,T,G,D] to the cache and attend: q [B,T,H,D] -> [B,T,H,D]. Scores are
        q.k / sqrt(D)."""

    def run_with_weights(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView
    ) -> tuple[Tensor, Tensor]:
        """The output of `run`, bitwise, and attention weights float32 [B, G, num_weight_blocks],
        summed over a block's keys, new tokens (at most MOST_WATCHED) and the query heads of a KV
        head."""
        raise NotImplementedError("refused before the run")


def visible_mask(
    view: KVView, key_positions: Tensor, first: int = 0, last: int | None = None
) -> Tensor:
    """The attention mask of rows `first` to `last` - 1: bool [B, G or 1, T, N], true where a
    token sees a key. `key_positions` [B, G or 1, N] are -1 for padding."""
    queries = view.query_positions()[first:last, None, :, None]
    keys = key_positions.unsqueeze(2)
    mask = (keys >= 0) & (keys <= queries)
    return mask if view.window is None else mask & (keys > queries - view.window)


def sum_blocks(weights: Tensor, key_positions: Tensor, num_blocks: int) -> Tensor:
    """Sum weights float32 [B, G, N] of keys at `key_positions` [B, G or 1, N] by block: [B, G,
    num_blocks]."""
    # Padding has weight 0, so it may be added to block 0.
    blocks = (key_positions.clamp(min=0) // WEIGHTS_BLOCK).expand_as(weights)
    return weights.new_zeros(*weights.shape[:2], num_blocks).scatter_add_(2, blocks, weights)


def backend_class(name: str) -> type[AttentionBackend]:
    backend: type[AttentionBackend] = load_named(ATTENTION_BACKENDS, name)
    return backend
