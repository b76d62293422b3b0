"""The backend for torch's own variable-length attention (`torch.nn.attention.varlen`), which runs
the flash-attention kernels that come with torch. It needs CUDA and bfloat16.

Owns the calls to it. A block holds a whole row, and a full view is read in place: the pool is
passed as one long sequence, `cu_seq_k` says where each row begins in it and `seqused_k` how long
each row is. The block tables of the function are not used, because not every release of torch
supports them. The keys of any other view are first copied into a buffer.
"""

from __future__ import annotations

import inspect

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

# Parameters that older releases lack: 2.10 all three, 2.11 the last two.
NEEDED = ("window_size", "enable_gqa", "seqused_k")
INSTALL = "install torch 2.12 or later"
CAUSAL = (-1, 0)  # window_size: see all earlier tokens and no later one


def missing_parts() -> str | None:
    """A message if this version of torch lacks the function or a parameter, otherwise None."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return f"torch {torch.__version__} has no varlen_attn; {INSTALL}"
    missing = [name for name in NEEDED if name not in inspect.signature(varlen_attn).parameters]
    if missing:
        return f"varlen_attn of torch {torch.__version__} lacks {', '.join(missing)}; {INSTALL}"
    return None


class VarlenBackend(LibraryBackend):
    capabilities = library_capabilities(
        "varlen", HeadSizes("a multiple of 8, at most 256", range(8, 257, 8)), missing_parts
    )

    def __init__(self) -> None:
        super().__init__()
        from torch.nn.attention.varlen import varlen_attn

        self._attend = varlen_attn

    def block_size(self, max_tokens: int) -> int:
        return max_tokens

    def can_read_in_place(self, view: KVView) -> bool:
        return all(len(view.cache.blocks[row]) == 1 for row in view.rows)

    def attend_in_place(self, layer: int, q: Tensor, view: KVView) -> Tensor:
        cache = view.cache
        heads, size = cache.shape.num_kv_heads, cache.shape.block_size
        first = cache.block_table[view.row_index, 0] * heads * size
        starts = torch.cat([first, first[-1:]]).to(torch.int32)
        keys, values = as_one_text(cache.k[layer]), as_one_text(cache.v[layer])
        longest = max(view.lengths) + view.num_new
        return self._call(q, keys, values, starts, real_lengths(view), longest)

    def attend_chosen(self, layer: int, q: Tensor, choice: Chosen, view: KVView) -> Tensor:
        keys, values = gather_keys(layer, choice, view)  # [S, N, 1, D]
        starts = torch.arange(len(keys) + 1, dtype=torch.int32, device=q.device) * keys.shape[1]
        longest = keys.shape[1]
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        return self._call(q, keys, values, starts, choice.lengths, longest)

    def _call(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, longest: int
    ) -> Tensor:
        """Attention of q [S,T,H,D]. Sequence i reads `lengths[i]` tokens of k, v [tokens, G, D],
        beginning at token `starts[i]`; `starts` has S+1 entries."""
        num_new = q.shape[1]
        queries = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device) * num_new
        out = self._attend(
            q.flatten(0, 1), k, v, queries, starts, num_new, longest,
            window_size=CAUSAL, enable_gqa=True, seqused_k=lengths,
        )  # fmt: skip
        assert isinstance(out, Tensor), "the log-sum-exp was not asked for"
        return out.view(q.shape)


def as_one_text(pool: Tensor) -> Tensor:
    """View a pool [blocks, G, block_size, D] as [tokens, G, D] without a copy. Token t of block b
    has the index b * G * block_size + t. The indices that no block uses show keys of other
    heads; they are never read."""
    blocks, heads, size, head_dim = pool.shape
    tokens = ((blocks - 1) * heads + 1) * size
    return pool.as_strided((tokens, heads, head_dim), (head_dim, size * head_dim, 1))
