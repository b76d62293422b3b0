"""The int8 KV cache: what it stores, and the kernel over it against attention in float64 over the
same cache, read back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from magicdec.attention.native import NativeBackend, has_bfloat16_path
from magicdec.attention.sdpa import SDPABackend  # noqa: F401
from magicdec.kv.cache import CacheShape, KVCache
from magicdec.kv.full import FullKV
from magicdec.kv.int8_layout import INT8_TILED
from magicdec.kv.policy import MASS_BLOCK, KVPolicy, make_view
from magicdec.kv.streaming_llm import StreamingLLM

HEADS = [(4, 4, 64), (6, 2, 16), (5, 1, 80), (7, 7, 32), (4, 2, 96), (8, 1, 128), (2, 2, 256)]
POLICIES: list[KVPolicy] = [FullKV(), StreamingLLM(4, 11), StreamingLLM(21, 60), StreamingLLM(0, 1)]
LENGTHS, COMMITTED = [37, 3, 150, 0], [35, 3, 146, 0]
MAX_TOKENS = 256

needs_kernel = pytest.mark.skipif(not has_bfloat16_path(), reason="no bfloat16 dot products")


def filled(kv_heads: int, size: int, dtype: torch.dtype = torch.bfloat16) -> KVCache:
    """int8 rows of LENGTHS random tokens, with large ones past their ends, in blocks that
    interleave."""
    torch.manual_seed(0)
    shape = CacheShape(2, kv_heads, size, 64, len(LENGTHS) * MAX_TOKENS // 64, INT8_TILED)
    cache = KVCache(shape, len(LENGTHS), MAX_TOKENS // 64, torch.int8, torch.device("cpu"))
    for tokens in (MAX_TOKENS // 2, MAX_TOKENS):
        for row in range(len(LENGTHS)):
            cache.allocate(row, tokens)
    k, v = (torch.randn(len(LENGTHS), MAX_TOKENS, kv_heads, size).to(dtype) for _ in "kv")
    for row, length in enumerate(LENGTHS):
        k[row, length:], v[row, length:] = 1e3, 1e4
    cache.write(1, everything(cache, MAX_TOKENS), k, v)
    for row, length in enumerate(LENGTHS):
        cache.advance([row], length)
    return cache


def everything(cache: KVCache, count: int) -> Tensor:
    rows = torch.arange(len(cache.lengths))
    return cache.slots(rows, torch.arange(count).expand(len(rows), -1))


def written_out(
    q: Tensor, k: Tensor, v: Tensor, keys: list[int], first: int
) -> tuple[Tensor, Tensor]:
    """One row: q [T, H, D] at positions first.. over k, v [G, S, D] at `keys`, causal, in float64:
    output, and the probability of each block of keys [G, blocks]."""
    group = q.shape[1] // k.shape[0]
    out = torch.empty(q.shape, dtype=torch.float64)
    mass = torch.zeros(k.shape[0], -(-MAX_TOKENS // MASS_BLOCK), dtype=torch.float64)
    for t in range(q.shape[0]):
        seen = torch.tensor([s for s in keys if 0 <= s <= first + t])
        for h in range(q.shape[1]):
            scores = k[h // group, seen].double() @ q[t, h].double() / q.shape[2] ** 0.5
            weights = torch.softmax(scores, 0)
            out[t, h] = weights @ v[h // group, seen].double()
            mass[h // group].index_add_(0, seen // MASS_BLOCK, weights)
    return out, mass


@needs_kernel
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_kernel_equals_attention_written_out(heads: tuple[int, int, int], policy: KVPolicy) -> None:
    num_heads, kv_heads, size = heads
    for num_new, rows in ((1, [0, 1, 2, 3]), (5, [2, 0, 1]), (3, [1, 3]), (40, [2]), (33, [0, 3])):
        cache, backend = filled(kv_heads, size), NativeBackend()
        view = make_view(cache, rows, policy, num_new, [COMMITTED[r] for r in rows])
        q = torch.randn(len(rows), num_new, num_heads, size).bfloat16()
        k, v = (torch.randn(len(rows), num_new, kv_heads, size).bfloat16() for _ in "kv")
        backend.plan(view)
        call = backend.run_with_mass if num_new < 32 else backend.run_with_lse
        out, mass = call(1, q, k, v, view)
        held_k, held_v = cache.read(1, everything(cache, MAX_TOKENS))
        for i, (r, keys) in enumerate(zip(rows, view.key_positions()[:, 0].tolist(), strict=True)):
            new = slice(LENGTHS[r], LENGTHS[r] + num_new)  # appended by the kernel
            for held, given in ((held_k, k), (held_v, v)):
                given = given[i].transpose(0, 1).float()
                bound = given.abs().amax(2, keepdim=True) / 127 / 2 * 1.001
                assert ((held[r][:, new] - given).abs() <= bound).all()
            expected, blocks = written_out(q[i], held_k[r], held_v[r], keys, LENGTHS[r])
            assert (out[i].double() - expected).abs().max() < 2e-2, (num_new, r)
            if num_new < 32:
                assert (mass[i] - blocks[:, : mass.shape[2]]).abs().max() < 1e-3, (num_new, r)
