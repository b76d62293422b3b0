"""The ceiling a number comes with: bytes that a pass had to read, over the bandwidth measured in
the same run.

Weights count once a forward; KV counts by what each forward's view shows, never by capacity. Knows
nothing of clocks.
"""

from __future__ import annotations

from magicdec.model.transformer import Transformer
from magicdec.runner import ForwardCounts

TABLES = ("embedding.", "position_embedding.")  # of which a forward reads a few rows


def weight_bytes(model: Transformer) -> int:
    """Bytes of this rank's weights that one forward reads: all layers, norms and head rows; of the
    embeddings a few rows (0)."""
    names = {n: p.numel() * p.element_size() for n, p in model.named_parameters()}
    total = sum(size for name, size in names.items() if not name.startswith(TABLES))
    if model.is_last and model.head is None:
        total += model.tied_head.numel() * model.tied_head.element_size()
    return total


def kv_bytes_per_token(model: Transformer) -> int:
    """Bytes of K and V that one cached token holds in this rank's layers and heads."""
    config, weight = model.config, next(model.parameters())
    _, (first, last) = model.shard.heads(config.num_heads, config.num_kv_heads)
    return 2 * len(model.layers) * (last - first) * config.cached_head_dim * weight.element_size()


def bytes_read(model: Transformer, counts: ForwardCounts) -> int:
    """Least bytes this rank had to read for the forwards in `counts`."""
    return counts.num_forwards * weight_bytes(model) + counts.kv_bytes_read
