"""KVCache: addressing, blocks, layouts, copies and truncation. `test_kv_view.py` tests what is read
of it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounded import as_stored, mixed
from scipy.linalg import hadamard

from magicdec.kv.cache import KVCache
from magicdec.kv.layout import FP8_TILED, INT4_TILED, INT8_TILED, PLAIN, TILED, KVLayout
from magicdec.kv.pool import CacheShape
from magicdec.speculation.policies.streaming_llm import StreamingLLM

CODED: dict[KVLayout, str] = {FP8_TILED: "fp8", INT8_TILED: "int8", INT4_TILED: "int4"}
POOLS = {FP8_TILED: torch.float8_e4m3fn, INT8_TILED: torch.int8, INT4_TILED: torch.uint8}


def make_cache(
    num_rows: int = 3, block_size: int = 4, blocks_per_row: int = 5, spare: int = 0
) -> KVCache:
    shape = CacheShape(2, 3, 8, block_size, num_rows * blocks_per_row + spare)
    return KVCache(shape, num_rows, blocks_per_row, torch.float32, torch.device("cpu"))


def test_written_tokens_are_read_back_from_interleaved_blocks() -> None:
    cache = make_cache()
    for row, tokens in ((1, 7), (0, 20), (2, 3), (1, 20)):  # in turns: blocks interleave
        cache.allocate(row, tokens)
    assert cache.blocks[1] != sorted(range(min(cache.blocks[1]), min(cache.blocks[1]) + 5))
    k = torch.randn(2, 17, 3, 8)
    v = torch.randn(2, 17, 3, 8)
    rows = torch.tensor([1, 0])
    slots = cache.slots(rows, torch.arange(17).expand(2, -1))
    cache.write(1, slots, k, v)
    read_k, read_v = cache.read(1, slots)
    assert torch.equal(read_k, k.transpose(1, 2)) and torch.equal(read_v, v.transpose(1, 2))
    assert not cache.k[0].any(), "another layer is untouched"


@pytest.mark.parametrize("layout", [PLAIN, TILED], ids=["plain", "tiled"])
@settings(max_examples=40, deadline=None)
@given(data=st.data(), num_slots=st.integers(1, 90), head_dim=st.sampled_from([2, 16, 48]))
def test_a_layout_returns_written_tokens_and_changes_no_others(
    layout: KVLayout, data: st.DataObject, num_slots: int, head_dim: int
) -> None:
    pools = [torch.randn(2, 3, 2, 64, head_dim).bfloat16() for _ in "kv"]
    reads = (layout.read_keys, layout.read_values)
    everything = torch.arange(3 * 2 * 64)
    chosen = data.draw(st.permutations(range(len(everything))))[:num_slots]
    slots = torch.tensor(chosen)
    new = [torch.randn(2, num_slots, head_dim).bfloat16() for _ in "kv"]
    expected = [read(pool, everything) for read, pool in zip(reads, pools, strict=True)]
    for pool, values in zip(pools, expected, strict=True):
        assert torch.equal(values.flatten().sort()[0], pool.flatten().sort()[0]), "each once"
    layout.write_keys(pools[0], slots, new[0])
    layout.write_values(pools[1], slots, new[1])
    for read, pool, values, all_values in zip(reads, pools, new, expected, strict=True):
        all_values[:, slots] = values
        assert torch.equal(read(pool, slots), values)
        assert torch.equal(read(pool, everything), all_values)


@pytest.mark.parametrize("num_tokens", [1, 64, 100, 190])
@pytest.mark.parametrize("block_size", [64, 192])
@pytest.mark.parametrize("layout", [PLAIN, TILED, *CODED], ids=["plain", "tiled", *CODED.values()])
def test_the_first_keys_of_rows_are_those_at_their_slots(
    layout: KVLayout, block_size: int, num_tokens: int
) -> None:
    """Rows lie in several blocks or in one, and end within a tile."""
    dtype = POOLS.get(layout, torch.bfloat16)
    shape = CacheShape(2, 3, 32, block_size, 3 * 192 // block_size, layout)
    cache = KVCache(shape, 3, 192 // block_size, dtype, torch.device("cpu"))
    for row in (2, 0, 1):
        cache.allocate(row, 192)
    rows = torch.tensor([1, 2])
    slots = cache.slots(rows, torch.arange(192).expand(2, -1))
    k = torch.randn(2, 192, 3, 32).bfloat16()
    cache.write(1, slots, k, k)
    expected = cache.read(1, slots)[0][:, :, :num_tokens]
    assert torch.equal(cache.first_keys(1, rows, num_tokens), expected)


@pytest.mark.parametrize("head_dim", [4, 64, 80])
@pytest.mark.parametrize("layout", CODED, ids=CODED.values())
def test_a_cache_of_codes_rounds_to_the_scales_of_a_token_and_head(
    layout: KVLayout, head_dim: int
) -> None:
    """By the definition: to 127ths of the largest magnitude, of each 32 numbers to -8ths of the
    largest, of which there are no more than seven, or to FP8. A token of zeros stays zero, other
    tokens do not change, and copies have the same bits."""
    shape = CacheShape(2, 3, head_dim, 128, 2, layout)
    dtype = POOLS[layout]
    cache = KVCache(shape, 2, 1, dtype, torch.device("cpu"))
    for row in range(2):
        cache.allocate(row, 128)
    rows = torch.arange(2)
    places = torch.stack([torch.randperm(128)[:41] for _ in rows])
    slots = cache.slots(rows, places)
    k, v = torch.randn(2, 2, 41, 3, head_dim)
    k[0, 5] = 0
    v[1, 7, 2] = 0
    cache.write(1, slots, k, v)
    pairs = zip((k, v), cache.read(1, slots), (True, False), strict=True)
    for written, found, are_keys in pairs:
        expected = as_stored(written.transpose(1, 2), dtype, are_keys)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    whole = cache.slots(rows, torch.arange(128).expand(2, -1))
    untouched = torch.ones(2, 128, dtype=torch.bool)
    untouched[rows.unsqueeze(1), places] = False
    for stored in cache.read(1, whole):
        assert not stored.transpose(1, 2)[untouched].any()
    assert not any(stored.any() for stored in cache.read(0, whole)), "another layer is untouched"
    cache.copy_block(cache.blocks[0][0], cache.blocks[1][0])
    first, second = cache.read(1, whole)[0]
    assert torch.equal(first, second)
    sizes = {
        "fp8": {4: 4, 64: 64, 80: 80},
        "int8": {4: 8, 64: 68, 80: 84},
        "int4": {4: 18, 64: 36, 80: 54},
    }
    assert cache.bytes_per_token == 2 * 2 * 3 * sizes[CODED[layout]][head_dim]


def test_keys_of_int4_are_rounded_after_a_hadamard_transform() -> None:
    numbers = torch.randn(5, 16)
    matrix = torch.from_numpy(hadamard(16)).float()
    torch.testing.assert_close(mixed(numbers), numbers @ matrix)
    pool = torch.zeros(1, 1, 1, 64, INT4_TILED.token_size(16), dtype=torch.uint8)
    ones = torch.ones(1, 1, 16)
    INT4_TILED.write_keys(pool, torch.tensor([3]), ones)
    codes = pool.flatten()[: 64 * 16]
    assert codes[codes != 0].tolist() == [8], "the sum of all dimensions, -8 of its scale"
    assert torch.equal(INT4_TILED.read_keys(pool, torch.tensor([3]))[..., :16], ones)


@pytest.mark.parametrize("head_dim", [8, 16, 40, 80, 128])
@pytest.mark.parametrize("layout", CODED, ids=CODED.values())
def test_codes_that_are_read_and_written_again_are_the_same(
    layout: KVLayout, head_dim: int
) -> None:
    """Of heads that are whole parts of a transform or half of one, also with outliers."""
    pool = torch.zeros(1, 4, 1, 64, layout.token_size(head_dim), dtype=POOLS[layout])
    slots = torch.arange(4 * 64)
    keys = torch.randn(1, len(slots), head_dim)
    keys[..., 0] *= 50
    layout.write_keys(pool, slots, keys)
    before = pool.clone()
    layout.write_keys(pool, slots, layout.read_keys(pool, slots)[..., :head_dim])
    assert torch.equal(pool.view(torch.uint8), before.view(torch.uint8))


def test_tiles_hold_pairs_of_dimensions_of_keys_and_pairs_of_tokens_of_values() -> None:
    pool = torch.zeros(1, 2, 1, 64, 4)
    tokens = torch.arange(128.0).view(1, 128, 1) + torch.arange(4.0) / 4
    TILED.write_keys(pool, torch.arange(128), tokens)
    assert pool.flatten()[:4].tolist() == [0, 0.25, 1, 1.25], "tokens 0 and 1, dimensions 0 and 1"
    assert pool.flatten()[128:130].tolist() == [0.5, 0.75], "token 0, dimensions 2 and 3"
    TILED.write_values(pool, torch.arange(128), tokens)
    assert pool.flatten()[:4].tolist() == [0, 1, 0.25, 1.25], "dimensions 0 and 1, tokens 0 and 1"


def test_tokens_are_copied_between_caches_of_different_layouts() -> None:
    caches = []
    for layout in (PLAIN, TILED):
        shape = CacheShape(2, 3, 8, 64, 2, layout)
        caches.append(KVCache(shape, 1, 2, torch.bfloat16, torch.device("cpu")))
        caches[-1].allocate(0, 100)
    slots = caches[0].slots(torch.tensor([0]), torch.arange(70).view(1, -1))
    k, v = (torch.randn(1, 70, 3, 8).bfloat16() for _ in "kv")
    for layer in range(2):
        caches[0].write(layer, slots, k + layer, v)
    moved = slots.flip(2)
    caches[1].copy_from(caches[0], slots, moved)
    assert torch.equal(caches[1].read(1, moved)[0], caches[0].read(1, slots)[0])
    assert torch.equal(caches[1].read(0, moved)[1], v.transpose(1, 2))
    assert torch.equal(caches[1].read_keys(moved), caches[0].read_keys(slots))
    caches[1].write_keys(slots, caches[0].read_keys(slots))
    assert torch.equal(caches[1].read(1, slots)[0], caches[0].read(1, slots)[0])


def test_a_block_consists_of_whole_tiles() -> None:
    with pytest.raises(AssertionError, match="whole tiles"):
        KVCache(CacheShape(1, 1, 8, 96, 2, TILED), 1, 2, torch.bfloat16, torch.device("cpu"))


def test_blocks_are_taken_from_the_pool_and_returned() -> None:
    cache = make_cache(num_rows=2, blocks_per_row=3)
    cache.allocate(0, 9)
    cache.allocate(0, 12)
    assert len(cache.blocks[0]) == 3, "allocation tops up, it does not start over"
    cache.allocate(1, 12)
    cache.release(0)
    cache.allocate(0, 4)
    assert set(cache.blocks[0]).isdisjoint(cache.blocks[1])


def test_an_exhausted_pool_raises_an_error() -> None:
    shape = CacheShape(1, 1, 2, 4, 2)
    cache = KVCache(shape, 2, 2, torch.float32, torch.device("cpu"))
    cache.allocate(0, 8)
    with pytest.raises(ValueError, match="row 1 needs 1 more blocks, 0 are free"):
        cache.allocate(1, 1)


def test_truncate_shortens_rows_and_never_lengthens_them() -> None:
    cache = make_cache()
    cache.advance([0, 2], 9)
    cache.truncate([2], [4])
    assert cache.lengths == [9, 0, 4] and cache.seq_lens.tolist() == [9, 0, 4]
    with pytest.raises(AssertionError):
        cache.truncate([2], [5])


def test_streaming_llm_needs_room_for_a_window() -> None:
    with pytest.raises(ValueError, match="KV budget 16 must be larger than 16 sink tokens"):
        StreamingLLM(16, 16)
