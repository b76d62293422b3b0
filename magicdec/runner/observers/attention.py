"""AttentionWeights and AttentionQueries: what the layers of the forward that was seen last
attended to and asked for, kept for the policies that choose by it.
"""

from __future__ import annotations

from torch import Tensor

from magicdec.runner.forward_batch import EnqueuedForward, ForwardObserver


class AttentionWeights(ForwardObserver):
    """Attention weights [B, G, blocks] by layer (`AttentionBackend.run_with_weights`)."""

    needs_weights = True

    def __init__(self) -> None:
        self.layers: dict[int, Tensor] = {}

    def on_weights(self, forward: EnqueuedForward, layer: int, weights: Tensor) -> None:
        self.layers[layer] = weights


class AttentionQueries(ForwardObserver):
    """Queries [B, T, H, D] after RoPE by layer."""

    needs_queries = True

    def __init__(self) -> None:
        self.layers: dict[int, Tensor] = {}

    def on_queries(self, forward: EnqueuedForward, layer: int, queries: Tensor) -> None:
        self.layers[layer] = queries
