"""Calls into `block_choice.cpp`, the native choice of KV blocks.

Shapes: L layers, B rows of a forward, R cache rows, G KV heads of this rank, D head size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from magicdec.kernels.build import SHARED_HEADERS, load_library, share_openmp
from magicdec.kv.cache import KVCache
from magicdec.kv.layout import FP8_TILED, INT4_TILED, INT8_TILED, PLAIN, TILED

SOURCE = Path(__file__).with_suffix(".cpp")
HEADERS = (SHARED_HEADERS / "arithmetic.h",)
_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_int64
# The kinds of pools of keys, as the library numbers them.
KINDS = (
    (PLAIN, torch.float32),
    (PLAIN, torch.bfloat16),
    (TILED, torch.bfloat16),
    (INT8_TILED, torch.int8),
    (INT4_TILED, torch.uint8),
    (FP8_TILED, torch.float8_e4m3fn),
)


@cache
def library() -> ctypes.CDLL:
    share_openmp()
    native = load_library(SOURCE, ("-fopenmp",), HEADERS)
    sizes = (_SIZE,) * 3
    native.magicdec_top_blocks.argtypes = (
        _POINTER,
        *sizes,
        _POINTER,
        _POINTER,
        *sizes,
        _SIZE,
        _POINTER,
    )
    native.magicdec_score_blocks.argtypes = (*(_POINTER,) * 5, *(_SIZE,) * 9, _POINTER)
    native.magicdec_mean_keys.argtypes = (
        ctypes.c_int,
        _POINTER,
        _SIZE,
        _POINTER,
        _SIZE,
        _SIZE,
        *(_POINTER,) * 3,
        *(_SIZE,) * 6,
        _POINTER,
    )
    return native


def top_blocks(scores: Tensor, rows: Tensor, split: Sequence[Sequence[int]], most: int) -> Tensor:
    """Visible ranges [L, B, G, most + 2, 2]: sinks, the best blocks in ascending order, the
    window. Unused ranges are empty.

    scores [L, R, G, blocks]; rows [B]; `split` has five lists of B numbers: first sink, end of
    the sinks, begin of the window, number of blocks, number of tokens."""
    assert scores.dtype == torch.float32 and scores.stride(3) == 1
    layers, _, heads, _ = scores.shape
    count = len(rows)
    numbers = torch.tensor(split, dtype=torch.int64)
    ranges = torch.empty(layers, count, heads, most + 2, 2, dtype=torch.int64)
    library().magicdec_top_blocks(
        scores.data_ptr(),
        *scores.stride()[:3],
        rows.data_ptr(),
        numbers.data_ptr(),
        layers,
        count,
        heads,
        most,
        ranges.data_ptr(),
    )
    return ranges


def score_blocks(
    queries: Tensor,
    means: Tensor,
    rows: Tensor,
    texts: Tensor,
    blocks: Sequence[tuple[int, int]],
    num_blocks: int,
) -> Tensor:
    """Softmax of mean key . query / sqrt(D) over `blocks` [B] (first, stop), summed over the query
    heads of a KV head: float32 [L, B, G, num_blocks].

    queries [L, R, G, H/G, D] at `rows` [B] and means [L, any, G, blocks, D] at `texts` [B] are
    contiguous float32."""
    assert queries.is_contiguous() and means.is_contiguous()
    layers, num_rows, heads, rep, size = queries.shape
    scores = torch.empty(layers, len(rows), heads, num_blocks)
    spans = torch.tensor(blocks, dtype=torch.int64)
    library().magicdec_score_blocks(
        queries.data_ptr(),
        means.data_ptr(),
        rows.data_ptr(),
        texts.data_ptr(),
        spans.data_ptr(),
        layers,
        len(rows),
        heads,
        num_rows,
        means.shape[1],
        rep,
        size,
        means.shape[3],
        num_blocks,
        scores.data_ptr(),
    )
    return scores


def add_mean_keys(
    cache: KVCache, rows: Sequence[int], first: Sequence[int], last: Sequence[int], means: Tensor
) -> None:
    """Fill means [L, R, G, blocks, D] for blocks `first` to `last` - 1 of `rows` from the cache."""
    assert means.is_contiguous() and means.dtype == torch.float32
    kind = KINDS.index((cache.shape.layout, cache.k.dtype))
    lists = [torch.tensor(numbers, dtype=torch.int64) for numbers in (rows, first, last)]
    layers, num_rows, heads, blocks, size = means.shape
    library().magicdec_mean_keys(
        kind,
        cache.k.data_ptr(),
        cache.k.stride(0) * cache.k.element_size(),
        cache.block_table.data_ptr(),
        cache.block_table.shape[1],
        cache.shape.block_size,
        *(list.data_ptr() for list in lists),
        layers,
        len(rows),
        heads,
        num_rows,
        size,
        blocks,
        means.data_ptr(),
    )
