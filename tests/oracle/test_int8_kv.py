"""The int8 KV cache: the numbers that it stores, and the kernel against attention in float64 over
the numbers that are read back."""

from __future__ import annotations

import pytest
import torch
from conftest import (
    TINY,
    decode_both,
    make_draft,
    make_requests,
    make_runner,
    random_prompts,
    tiny_transformer,
)
from torch import Tensor

from magicdec.attention.native import NativeBackend, has_bfloat16_path, kernel
from magicdec.attention.sdpa import SDPABackend
from magicdec.config.sections import KVSection
from magicdec.cost_model.roofline import bytes_read, weight_bytes
from magicdec.drafting.policies.full import FullKV
from magicdec.drafting.policies.policy import KVPolicy
from magicdec.drafting.policies.streaming_llm import StreamingLLM
from magicdec.kv.cache import KVCache
from magicdec.kv.layout import INT8_TILED, PLAIN, TILED, Layout
from magicdec.kv.pool import CacheShape
from magicdec.kv.view import WEIGHTS_BLOCK, make_view

HEADS = [(4, 4, 64), (6, 2, 16), (5, 1, 80), (7, 7, 32), (4, 2, 96), (8, 1, 128), (2, 2, 256)]
POLICIES: list[KVPolicy] = [FullKV(), StreamingLLM(4, 11), StreamingLLM(21, 60), StreamingLLM(0, 1)]
LENGTHS, COMMITTED = [37, 3, 150, 0], [35, 3, 146, 0]
MAX_TOKENS = 256

needs_kernel = pytest.mark.skipif(not has_bfloat16_path(), reason="no bfloat16 dot products")


def filled(kv_heads: int, size: int, dtype: torch.dtype = torch.bfloat16) -> KVCache:
    """An int8 cache with rows of LENGTHS random tokens in interleaved blocks. After the end of a
    row there are large numbers."""
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
    q: Tensor, k: Tensor, v: Tensor, keys: list[int], first: int, window: int | None
) -> tuple[Tensor, Tensor]:
    """Causal attention of one row in float64: q [T, H, D] at positions `first` and after, over the
    last `window` positions of k, v [G, S, D] at `keys`. Returns the output and the probability of
    each block [G, blocks]."""
    group = q.shape[1] // k.shape[0]
    out = torch.empty(q.shape, dtype=torch.float64)
    mass = torch.zeros(k.shape[0], -(-MAX_TOKENS // WEIGHTS_BLOCK), dtype=torch.float64)
    for t in range(q.shape[0]):
        oldest = 0 if window is None else max(0, first + t + 1 - window)
        seen = torch.tensor([s for s in keys if oldest <= s <= first + t])
        for h in range(q.shape[1]):
            scores = k[h // group, seen].double() @ q[t, h].double() / q.shape[2] ** 0.5
            weights = torch.softmax(scores, 0)
            out[t, h] = weights @ v[h // group, seen].double()
            mass[h // group].index_add_(0, seen // WEIGHTS_BLOCK, weights)
    return out, mass


@pytest.mark.narrow("pairs")
@needs_kernel
@pytest.mark.parametrize("window", [None, 9], ids=["all", "window"])
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_kernel_equals_attention_written_out(
    heads: tuple[int, int, int], policy: KVPolicy, window: int | None
) -> None:
    num_heads, kv_heads, size = heads
    for num_new, rows in ((1, [0, 1, 2, 3]), (5, [2, 0, 1]), (3, [1, 3]), (40, [2]), (33, [0, 3])):
        cache, backend = filled(kv_heads, size), NativeBackend()
        view = make_view(cache, rows, policy, num_new, [COMMITTED[r] for r in rows], window)
        q = torch.randn(len(rows), num_new, num_heads, size).bfloat16()
        k, v = (torch.randn(len(rows), num_new, kv_heads, size).bfloat16() for _ in "kv")
        backend.plan(view)
        call = backend.run_with_weights if num_new < 32 else backend.run_with_lse
        out, mass = call(1, q, k, v, view)
        held_k, held_v = cache.read(1, everything(cache, MAX_TOKENS))
        for i, (r, keys) in enumerate(zip(rows, view.key_positions()[:, 0].tolist(), strict=True)):
            new = slice(LENGTHS[r], LENGTHS[r] + num_new)  # appended by the kernel
            for held, given in ((held_k, k), (held_v, v)):
                given = given[i].transpose(0, 1).float()
                bound = given.abs().amax(2, keepdim=True) / 127 / 2 * 1.001
                assert ((held[r][:, new] - given).abs() <= bound).all()
            expected, blocks = written_out(q[i], held_k[r], held_v[r], keys, LENGTHS[r], window)
            assert (out[i].double() - expected).abs().max() < 2e-2, (num_new, r)
            if num_new < 32:
                assert (mass[i] - blocks[:, : mass.shape[2]]).abs().max() < 1e-3, (num_new, r)


@needs_kernel
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_token_gets_the_same_bits_alone_and_with_others(heads: tuple[int, int, int]) -> None:
    num_heads, kv_heads, size = heads
    outputs = []
    for together in (False, True):
        cache, backend = filled(kv_heads, size), NativeBackend()
        q = torch.randn(2, 8, num_heads, size).bfloat16()
        k, v = (torch.randn(2, 8, kv_heads, size).bfloat16() for _ in "kv")
        parts = []
        for t in (slice(0, 8),) if together else (slice(t, t + 1) for t in range(8)):
            view = make_view(cache, [0, 2], FullKV(), t.stop - t.start)
            backend.plan(view)
            parts.append(backend.run(1, q[:, t], k[:, t], v[:, t], view))
            cache.advance([0, 2], t.stop - t.start)
        outputs.append(torch.cat(parts, dim=1))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("size", [16, 64, 80, 256])
@pytest.mark.parametrize("source_layout", [PLAIN, TILED], ids=["plain", "tiled"])
def test_the_error_of_a_copied_number_is_at_most_half_its_scale(
    size: int, source_layout: Layout
) -> None:
    """The tokens are scattered over tiles. A token of zeros stays zero, and other tokens do not
    change."""
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    shapes = [CacheShape(2, 3, size, 128, 2, layout) for layout in (source_layout, INT8_TILED)]
    source = KVCache(shapes[0], 2, 1, torch.bfloat16, cpu)
    target = KVCache(shapes[1], 2, 1, torch.int8, cpu)
    for cache in (source, target):
        for row in range(2):
            cache.allocate(row, 128)
    everywhere = torch.arange(128).expand(2, -1)
    k, v = (torch.randn(2, 128, 3, size).bfloat16() for _ in "kv")
    k[0, 5], v[1, 70, 2] = 0, 0
    rows, whole = torch.arange(2), source.slots(torch.arange(2), everywhere)
    for layer in range(2):
        source.write(layer, whole, k, v * (layer + 1))
    index = torch.stack([torch.randperm(100)[:41], torch.randperm(100)[:41]])
    places = torch.stack([torch.randperm(128)[:41], torch.randperm(128)[:41]])
    target.copy_from(source, source.slots(rows, index), target.slots(rows, places))
    for layer in range(2):
        wanted = source.read(layer, source.slots(rows, index))
        found = target.read(layer, target.slots(rows, places))
        for exact, got in zip(wanted, found, strict=True):
            half = exact.float().abs().amax(3, keepdim=True) / 127 / 2
            assert ((got - exact.float()).abs() <= half * 1.0001).all()
            assert ((got - exact.float()).abs() > half / 2).any()
        untouched = torch.ones(2, 128, dtype=torch.bool)
        untouched[torch.arange(2).unsqueeze(1), places] = False
        for held in target.read(layer, target.slots(rows, everywhere)):
            assert (held.transpose(1, 2)[untouched] == 0).all()
    again = KVCache(shapes[1], 2, 1, torch.int8, cpu)
    for row in range(2):
        again.allocate(row, 128)
    again.copy_from(target, target.slots(rows, everywhere), again.slots(rows, everywhere))
    slots = target.slots(rows, everywhere)
    for once, twice in zip(target.read(1, slots), again.read(1, slots), strict=True):
        torch.testing.assert_close(
            twice, once, rtol=1e-6, atol=0
        )  # a second quantisation changes nothing
    assert target.num_bytes == 2 * 2 * 2 * 3 * 128 * (size + 4)


LOSSLESS = {
    "self, snapkv": ("self", KVSection("snapkv", 20, window_size=3, draft_kv_dtype="int8")),
    "self, anew": (
        "self",
        KVSection("snapkv", 20, window_size=3, reselect_every=7, draft_kv_dtype="int8"),
    ),
    "model, snapkv": ("model", KVSection("snapkv", 20, window_size=4, draft_kv_dtype="int8")),
    "model, full": ("model", KVSection("full", draft_kv_dtype="int8")),
    "model, rolling": ("model", KVSection("streaming_llm", 33, 16, draft_kv_dtype="int8")),
}


@pytest.mark.parametrize("name", LOSSLESS)
def test_speculation_emits_the_baseline_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 with the reference backend: an int8 cache changes the drafts, but not the
    tokens."""
    drafter, kv = LOSSLESS[name]
    made: list[torch.dtype] = []
    original = KVCache.__init__

    def record(cache: KVCache, *args: object) -> None:
        original(cache, *args)  # type: ignore[arg-type]
        made.append(cache.k.dtype)

    monkeypatch.setattr(KVCache, "__init__", record)
    lengths, room = [5, 70, 1, 33], 70 + 40 + 4
    target = tiny_transformer()
    runner = make_runner(target, len(lengths), room, SDPABackend())
    draft = None
    if drafter == "model":
        draft = make_draft(target, kv, len(lengths), room, SDPABackend(), block_size=64)
    requests = make_requests(random_prompts(lengths, TINY.vocab_size), 40)
    baseline, ours, accepted = decode_both(runner, requests, kv, 4, 64, drafter, draft)
    assert ours == baseline
    assert made[0] == torch.float32 and made[-1] == torch.int8
    flat = [a for step in accepted for a in step]
    if kv.policy == "full":
        assert sum(flat) > 2 * len(flat)
    else:
        assert any(flat) and any(a < 4 for a in flat)


@needs_kernel
def test_bytes_read_are_those_of_each_cache() -> None:
    """The kernel counts keys. A key takes one byte for each number and a scale in int8, otherwise
    two bytes for each number."""
    model = tiny_transformer(dtype=torch.bfloat16)
    runner = make_runner(model, 2, 70, NativeBackend())
    for each, size in ((runner, 2 * TINY.head_dim), (runner.with_cache(70, torch.int8), 20)):
        for row in range(2):
            each.cache.allocate(row, 70)
        for ids in (torch.ones(2, 40, dtype=torch.long), torch.ones(2, 1, dtype=torch.long)):
            counts, keys = each.counts.copy(), kernel(TINY.head_dim).magicdec_keys_read()
            each.forward(ids, [0, 1])
            keys = kernel(TINY.head_dim).magicdec_keys_read() - keys
            used = each.counts.minus(counts)
            if ids.shape[1] == 1:  # a long chunk reads a key once for several tokens
                assert used.kv_bytes_read == keys * 2 * size > 0
            assert bytes_read(model, used) == used.kv_bytes_read + weight_bytes(model)
