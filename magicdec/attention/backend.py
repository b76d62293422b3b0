"""AttentionBackend: the one contract for prefill, decode and verification, which differ only in T.

Owns the protocol and what every backend shares: the causal rule over a view. Must not know of
policies or models.

Shapes: B rows, T new tokens, H query heads, G KV heads (H a multiple of G), D head size, N visible
keys.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from magicdec.kv.policy import KVView


class AttentionBackend(Protocol):
    """Built once a model; `plan` is called once a forward, `run` once a layer with the same
    view."""

    def block_size(self, max_tokens: int) -> int:
        """Tokens in a KV block, for rows of at most `max_tokens`."""
        ...

    def plan(self, view: KVView) -> None:
        """Prepare what the layers of one forward share."""
        ...

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView) -> Tensor:
        """Append k, v [B,T,G,D] to the cache and attend: q [B,T,H,D] -> [B,T,H,D]. Keys are scored
        q.k / sqrt(D)."""
        ...


def visible_mask(view: KVView, key_positions: Tensor) -> Tensor:
    """Which of the keys [B, N] (position, or -1 for padding) each new token sees: bool [B, T,
    N]."""
    keys = key_positions.unsqueeze(1)
    return (keys >= 0) & (keys <= view.query_positions().unsqueeze(2))
