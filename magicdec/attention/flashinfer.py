"""The flashinfer library: its paged prefill wrapper, which serves decoding and verification too, on
tensor cores. CUDA, bfloat16.

Owns the calling of it. Our pools are its HND layout, so that a full view is its pages as they lie.
Any other view is pages of one token, one list for each row and KV head: nothing is copied, and
heads may see different tokens. Kernels are built when first called; the run warms them up.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from magicdec.attention.sequences import choose_keys, join_heads, refuse_mass, split_heads
from magicdec.kv.layout import PLAIN, Layout
from magicdec.kv.policy import KVView

BLOCK_SIZE = 64
WORKSPACE_BYTES = 128 << 20  # what its documentation recommends


class FlashInferBackend:
    def __init__(self) -> None:
        if missing := missing_parts():
            raise ValueError(f"--attention flashinfer: {missing}")
        self._wrapper: Any = None
        self._new: Tensor | None = None
        self._is_planned = False

    def block_size(self, max_tokens: int) -> int:
        return BLOCK_SIZE

    def layout(self, dtype: torch.dtype) -> Layout:
        return PLAIN

    def plan(self, view: KVView) -> None:
        """The library's own plan waits for the first layer, which knows the query heads."""
        assert view.window is None, "refused before the run"
        self._new = view.cache.slots(view.row_index, view.query_positions())
        self._is_planned = False
        if self._wrapper is None:
            from flashinfer import BatchPrefillWithPagedKVCacheWrapper

            device = view.cache.k.device
            workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            self._wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView) -> Tensor:
        assert self._new is not None, "plan before run"
        cache = view.cache
        cache.write(layer, self._new, k, v)
        if not self._is_planned or view.per_head:
            (self._plan_blocks if view.is_full else self._plan_tokens)(layer, q, view)
            self._is_planned = True
        if view.is_full:
            out = self._wrapper.run(q.flatten(0, 1), (cache.k[layer], cache.v[layer]))
            return out.view(q.shape)
        queries = split_heads(q, k.shape[2])
        size = q.shape[3]
        pages = cache.k[layer].view(-1, 1, 1, size), cache.v[layer].view(-1, 1, 1, size)
        out = self._wrapper.run(queries.flatten(0, 1), pages).view(queries.shape)
        return join_heads(out, q.shape[0])

    def run_with_mass(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView
    ) -> tuple[Tensor, Tensor]:
        raise refuse_mass("flashinfer")

    def _plan_blocks(self, layer: int, q: Tensor, view: KVView) -> None:
        """A sequence a row; its pages are its blocks."""
        size = view.cache.shape.block_size
        totals = [length + view.num_new for length in view.lengths]
        counts = [-(-total // size) for total in totals]
        tables = view.cache.block_table[view.row_index]
        pages = torch.cat([table[:n] for table, n in zip(tables, counts, strict=True)])
        last = [(total - 1) % size + 1 for total in totals]
        heads = q.shape[2], view.cache.shape.num_kv_heads
        self._plan(view.num_new, counts, pages, last, heads, size, q)

    def _plan_tokens(self, layer: int, q: Tensor, view: KVView) -> None:
        """A sequence for each row and KV head; its pages are the slots of what it sees."""
        num_kv_heads = view.cache.shape.num_kv_heads
        slots = choose_keys(layer, view).slots  # [B, G, N]
        seen = [n + view.num_new for n in view.num_visible]
        pages = torch.cat([row[:, :n].reshape(-1) for row, n in zip(slots, seen, strict=True)])
        counts = [n for n in seen for _ in range(num_kv_heads)]
        heads = q.shape[2] // num_kv_heads, 1
        self._plan(view.num_new, counts, pages, [1] * len(counts), heads, 1, q)

    def _plan(
        self, num_new: int, counts: list[int], pages: Tensor, last: list[int],
        heads: tuple[int, int], page_size: int, q: Tensor,
    ) -> None:  # fmt: skip
        """Sequences of `num_new` queries over `counts` pages each, `last` tokens in the last.
        Sizes stay on the host, where the library wants them."""
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        queries = torch.arange(len(counts) + 1, dtype=torch.int32) * num_new
        self._wrapper.plan(
            queries, starts, pages.to(torch.int32), torch.tensor(last, dtype=torch.int32),
            *heads, q.shape[3], page_size,
            causal=True, q_data_type=q.dtype, kv_data_type=q.dtype,
        )  # fmt: skip


def missing_parts() -> str | None:
    """What is not installed, if anything."""
    if find_spec("flashinfer") is not None:
        return None
    return "flashinfer is not installed; pip install flashinfer-python"
