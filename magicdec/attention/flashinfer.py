"""The backend for the flashinfer library. It uses the paged prefill wrapper, which runs on tensor
cores, for prefill, decoding and verification. It needs CUDA and bfloat16.

Owns the calls to the library. Our pools have the library's HND layout, so the blocks of a full view
are its pages. Any other view is given as pages of one token, with one list of pages for each row
and KV head: nothing is copied, and heads may see different tokens. The library plans on the host
and therefore needs exact lengths there. It builds its kernels at the first call, which is why a run
warms them up.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from magicdec.attention.library import Chosen, LibraryBackend, library_capabilities
from magicdec.config.capabilities import HeadSizes
from magicdec.kv.view import KVView

BLOCK_SIZE = 64
WORKSPACE_BYTES = 128 << 20  # what its documentation recommends


def missing_parts() -> str | None:
    """A message if the library is not installed, otherwise None."""
    if find_spec("flashinfer") is not None:
        return None
    return "flashinfer is not installed; pip install flashinfer-python"


class FlashInferBackend(LibraryBackend):
    capabilities = library_capabilities(
        "flashinfer",
        HeadSizes("64, 128 or 256", (64, 128, 256)),
        missing_parts,
        can_be_recorded=False,
    )

    def __init__(self) -> None:
        super().__init__()
        self._wrapper: Any = None
        self._is_planned = False

    def block_size(self, max_tokens: int) -> int:
        return BLOCK_SIZE

    def can_read_in_place(self, view: KVView) -> bool:
        return True

    def plan(self, view: KVView) -> None:
        """Make the wrapper. The library's own plan is made in the first layer, where the number of
        query heads is known."""
        super().plan(view)
        self._is_planned = False
        if self._wrapper is None:
            from flashinfer import BatchPrefillWithPagedKVCacheWrapper

            device = view.cache.k.device
            workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            self._wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")

    def attend_in_place(self, layer: int, q: Tensor, view: KVView) -> Tensor:
        if not self._is_planned:
            self._plan_blocks(q, view)
        pools = view.cache.k[layer], view.cache.v[layer]
        return self._wrapper.run(q.flatten(0, 1), pools).view(q.shape)

    def attend_chosen(self, layer: int, q: Tensor, choice: Chosen, view: KVView) -> Tensor:
        if not self._is_planned or view.per_head:
            self._plan_tokens(q, choice, view)
        cache, size = view.cache, q.shape[3]
        pages = cache.k[layer].view(-1, 1, 1, size), cache.v[layer].view(-1, 1, 1, size)
        return self._wrapper.run(q.flatten(0, 1), pages).view(q.shape)

    def _plan_blocks(self, q: Tensor, view: KVView) -> None:
        """Plan one sequence for each row, whose pages are the row's blocks. q is [B,T,H,D]."""
        size = view.cache.shape.block_size
        totals = [length + view.num_new for length in view.lengths]
        counts = [-(-total // size) for total in totals]
        tables = view.cache.block_table[view.row_index]
        pages = torch.cat([table[:n] for table, n in zip(tables, counts, strict=True)])
        last = [(total - 1) % size + 1 for total in totals]
        self._plan(q, counts, pages, last, view.cache.shape.num_kv_heads, size)

    def _plan_tokens(self, q: Tensor, choice: Chosen, view: KVView) -> None:
        """Plan one sequence for each row and KV head, whose pages are the slots of its visible
        tokens. q is [S,T,H/G,D]."""
        key_counts = [n + view.num_new for n in view.num_visible]
        rows = zip(choice.slots, key_counts, strict=True)
        pages = torch.cat([slots[:, :n].reshape(-1) for slots, n in rows])
        counts = [n for n in key_counts for _ in range(view.cache.shape.num_kv_heads)]
        self._plan(q, counts, pages, [1] * len(counts), 1, 1)

    def _plan(
        self, q: Tensor, counts: list[int], pages: Tensor, last: list[int], num_kv_heads: int,
        page_size: int,
    ) -> None:  # fmt: skip
        """Plan sequences of T queries, q [sequences,T,heads,D]. Sequence i has `counts[i]` pages
        and `last[i]` tokens in the last of them. Sizes stay on the host, where the library expects
        them."""
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        queries = torch.arange(len(counts) + 1, dtype=torch.int32) * q.shape[1]
        self._wrapper.plan(
            queries, starts, pages.to(torch.int32), torch.tensor(last, dtype=torch.int32),
            q.shape[2], num_kv_heads, q.shape[3], page_size,
            causal=True, q_data_type=q.dtype, kv_data_type=q.dtype,
        )  # fmt: skip
        self._is_planned = True
