"""The attention weights that keys of the cache received, by the library of native attention.

Owns the call. Must not know what the weights are for.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from magicdec.attention.native import STORAGE, kernel
from magicdec.kv.cache import KVCache
from magicdec.kv.layout import TILED


def received(
    cache: KVCache, layer: int, rows: Tensor, queries: Tensor, first: int, length: int
) -> Tensor:
    """The attention weights that the keys of rows [B] at positions `first` to `length` - 1 received
    from the newest tokens, whose queries are [B, T, H, D], summed over these and over the query
    heads of a KV head: float32 [B, G, length - first]. The cache has the layout of native
    attention."""
    (num_rows, num_new, num_heads, size), shape = queries.shape, cache.shape
    assert queries.dtype == cache.k.dtype and num_new <= length - first
    queries, table = queries.contiguous(), cache.block_table
    out = torch.empty(num_rows, shape.num_kv_heads, length - first)
    numbers = (ctypes.c_int64 * 8)(
        num_rows, num_new, num_heads, shape.num_kv_heads, shape.block_size, table.shape[1],
        first, length,
    )  # fmt: skip
    kernel(size).magicdec_received(
        STORAGE.index(cache.k.dtype), shape.layout is TILED, numbers, queries.data_ptr(),
        cache.k[layer].data_ptr(), table.data_ptr(), rows.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    return out
