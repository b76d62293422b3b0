"""The flash-attn library: `flash_attn_with_kvcache` of version 3 (module `flash_attn_interface`)
where it is installed, else of version 2 (module `flash_attn`). CUDA, bfloat16.

Owns the calling of it. A full view is read in place through the block table; version 2 asks for
blocks of 256 tokens, version 3 takes any. Other views are gathered, which costs a copy of what they
show: the library knows a left padding and a window, but no sinks.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from magicdec.attention.sequences import (
    Chosen,
    choose_keys,
    gather_keys,
    join_heads,
    refuse_mass,
    split_heads,
)
from magicdec.kv.layout import PLAIN, Layout
from magicdec.kv.policy import KVView

MODULES = ("flash_attn_interface", "flash_attn")  # versions 3 and 2
TABLES = ("page_table", "block_table")  # what they call the block table
BLOCK_SIZE = 256


class FlashAttnBackend:
    def __init__(self) -> None:
        if missing := missing_parts():
            raise ValueError(f"--attention flash_attn: {missing}")
        self._attend, self._table_name = find_function()
        self._new: Tensor | None = None
        self._table: Tensor | None = None  # int32 [B, blocks] where the cache is read in place
        self._lengths: Tensor | None = None
        self._chosen: Chosen | None = None

    def block_size(self, max_tokens: int) -> int:
        return BLOCK_SIZE

    def layout(self, dtype: torch.dtype) -> Layout:
        return PLAIN

    def plan(self, view: KVView) -> None:
        assert view.window is None, "refused before the run"
        self._new = view.cache.slots(view.row_index, view.query_positions())
        self._table = self._chosen = None
        any_block = self._table_name == TABLES[0]
        if view.is_full and (any_block or view.cache.shape.block_size % BLOCK_SIZE == 0):
            self._table = view.cache.block_table[view.row_index].to(torch.int32)
            self._lengths = (view.seq_lens + view.num_new).to(torch.int32)
        elif not view.per_head:
            self._chosen = choose_keys(0, view)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView) -> Tensor:
        assert self._new is not None, "plan before run"
        cache = view.cache
        cache.write(layer, self._new, k, v)
        if self._table is not None:
            # [blocks, block_size, G, D], strided: heads lie outside of tokens in our pools.
            pools = cache.k[layer].transpose(1, 2), cache.v[layer].transpose(1, 2)
            table = {self._table_name: self._table}
            return self._attend(q, *pools, cache_seqlens=self._lengths, causal=True, **table)
        chosen = self._chosen or choose_keys(layer, view)
        keys, values = gather_keys(layer, chosen, view)  # [S, N, 1, D]
        queries = split_heads(q, k.shape[2])
        out = self._attend(queries, keys, values, cache_seqlens=chosen.lengths, causal=True)
        return join_heads(out, q.shape[0])

    def run_with_mass(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView
    ) -> tuple[Tensor, Tensor]:
        raise refuse_mass("flash_attn")


def find_function() -> tuple[Callable[..., Tensor], str]:
    """`flash_attn_with_kvcache` of the newest version here, and its name for the block table."""
    module = next(name for name in MODULES if find_spec(name) is not None)
    function = importlib.import_module(module).flash_attn_with_kvcache
    parameters = inspect.signature(function).parameters
    return function, next(name for name in TABLES if name in parameters)


def missing_parts() -> str | None:
    """What is not installed, if anything."""
    if any(find_spec(name) is not None for name in MODULES):
        return None
    return "flash-attn is not installed; pip install flash-attn (it is built with nvcc)"
