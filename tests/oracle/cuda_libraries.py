"""Stand-ins for the attention libraries that need a GPU: their documented signatures and demands,
computed in float64. What they refuse, the libraries refuse."""

from types import ModuleType

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One sequence, causal, aligned at the end: q [T,H,D] over k, v [S,G,D], H a multiple of G."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("thd,shd->hts", q.double(), k) / q.shape[2] ** 0.5
    hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(2)
    return torch.einsum("hts,shd->thd", weights, v).to(q.dtype)


def attend_pages(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, table: Tensor | None
) -> Tensor:
    """What both versions of flash-attn do: q [B,T,H,D] over [blocks, block_size, G, D]."""
    assert cache_seqlens.dtype == torch.int32 and k_cache.stride(3) == v_cache.stride(3) == 1
    assert table is None or table.dtype == torch.int32
    outputs = []
    for row, length in enumerate(cache_seqlens.tolist()):
        picked = slice(row, row + 1) if table is None else table[row].long()
        k, v = (cache[picked].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        outputs.append(attend(q[row], k, v))
    return torch.stack(outputs)


def flash_attn_2() -> ModuleType:
    def flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        block_table=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        rotary_interleaved=True,
        alibi_slopes=None,
        num_splits=0,
        return_softmax_lse=False,
    ):
        assert causal and k is None and v is None and softmax_scale is None
        if block_table is not None and k_cache.shape[1] % 256:
            raise RuntimeError("Paged KV cache block size must be divisible by 256")
        return attend_pages(q, k_cache, v_cache, cache_seqlens, block_table)

    module = ModuleType("flash_attn")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module


def flash_attn_3() -> ModuleType:
    def flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        qv=None,
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=None,
        cache_batch_idx=None,
        cache_leftpad=None,
        page_table=None,
        cu_seqlens_q=None,
        cu_seqlens_k_new=None,
        max_seqlen_q=None,
        rotary_seqlens=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        attention_chunk=0,
        softcap=0.0,
        rotary_interleaved=True,
        scheduler_metadata=None,
        num_splits=0,
        pack_gqa=None,
        sm_margin=0,
        return_softmax_lse=False,
    ):
        assert causal and k is None and v is None and softmax_scale is None
        return attend_pages(q, k_cache, v_cache, cache_seqlens, page_table)

    module = ModuleType("flash_attn_interface")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module
