"""The backend for flash-attn (FlashAttention, arXiv 2205.14135), on CUDA in bfloat16:
`flash_attn_with_kvcache` of version 3 (`flash_attn_interface`), else 2 (`flash_attn`). Version 4
(`flash_attn.cute`) alone has none and is refused.

Full views are read through the block table; version 2 needs blocks of 256 tokens. Keys of other
views are copied, because the library knows no sink tokens.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from magicdec.attention.library import (
    Chosen,
    LibraryBackend,
    gather_keys,
    library_capabilities,
    real_lengths,
)
from magicdec.config.capabilities import HeadSizes
from magicdec.kv.view import KVView

MODULES = ("flash_attn_interface", "flash_attn")  # versions 3 and 2
TABLES = ("page_table", "block_table")  # the name of the block table in versions 3 and 2
BLOCK_SIZE = 256


def missing_parts() -> str | None:
    if any(map(has_module, MODULES)):
        return None
    install = "pip install flash-attn (it is built with nvcc)"
    if find_spec("flash_attn") is not None:
        return f"flash-attn 4 alone has no flash_attn_with_kvcache; {install}"
    return f"flash-attn is not installed; {install}"


def has_module(name: str) -> bool:
    """Whether a module is installed. Version 4 leaves a namespace `flash_attn`: a folder without
    a file."""
    spec = find_spec(name)
    if spec is None:
        return False
    return spec.origin is not None or spec.submodule_search_locations is None


class FlashAttnBackend(LibraryBackend):
    capabilities = library_capabilities(
        "flash_attn", HeadSizes("a multiple of 8, at most 256", range(8, 257, 8)), missing_parts
    )

    def __init__(self) -> None:
        super().__init__()
        self._attend, self._table_name = find_function()
        self._table: Tensor | None = None  # int32 [B, blocks] where the cache is read in place
        self._lengths: Tensor | None = None

    def block_size(self, max_tokens: int) -> int:
        return BLOCK_SIZE

    def can_read_in_place(self, view: KVView) -> bool:
        any_block = self._table_name == TABLES[0]
        return any_block or view.cache.shape.block_size % BLOCK_SIZE == 0

    def plan(self, view: KVView) -> None:
        super().plan(view)
        if self._in_place:
            self._table = view.cache.block_table[view.row_index].to(torch.int32)
            self._lengths = real_lengths(view)

    def attend_in_place(self, layer: int, q: Tensor, view: KVView) -> Tensor:
        # A strided [blocks, block_size, G, D]: in our pools the head comes before the token.
        pools = (pool[layer].transpose(1, 2) for pool in (view.cache.k, view.cache.v))
        table = {self._table_name: self._table}
        return self._attend(q, *pools, cache_seqlens=self._lengths, causal=True, **table)

    def attend_chosen(self, layer: int, q: Tensor, choice: Chosen, view: KVView) -> Tensor:
        copies = gather_keys(layer, choice, view)  # [S, N, 1, D]
        return self._attend(q, *copies, cache_seqlens=choice.lengths, causal=True)


def find_function() -> tuple[Callable[..., Tensor], str]:
    """`flash_attn_with_kvcache` of the newest version, and its parameter name of the block
    table."""
    module = next(filter(has_module, MODULES))
    function = importlib.import_module(module).flash_attn_with_kvcache
    parameters = inspect.signature(function).parameters
    return function, next(name for name in TABLES if name in parameters)
