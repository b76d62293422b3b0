"""KVCache and views: addressing, blocks, truncation; views against a naive enumeration."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magicdec.kv.cache import CacheShape, KVCache
from magicdec.kv.full import FullKV
from magicdec.kv.policy import KVPolicy, make_view
from magicdec.kv.streaming_llm import StreamingLLM


def make_cache(
    num_rows: int = 3, block_size: int = 4, blocks_per_row: int = 5, spare: int = 0
) -> KVCache:
    shape = CacheShape(2, 3, 8, block_size, num_rows * blocks_per_row + spare)
    return KVCache(shape, num_rows, blocks_per_row, torch.float32, torch.device("cpu"))


def test_what_is_written_is_read_back_whatever_the_blocks() -> None:
    cache = make_cache()
    for row, tokens in ((1, 7), (0, 20), (2, 3), (1, 20)):  # rows grow in turns: blocks interleave
        cache.allocate(row, tokens)
    assert cache.blocks[1] != sorted(range(min(cache.blocks[1]), min(cache.blocks[1]) + 5))
    k, v = torch.randn(2, 17, 3, 8), torch.randn(2, 17, 3, 8)
    rows = torch.tensor([1, 0])
    slots = cache.slots(rows, torch.arange(17).expand(2, -1))
    cache.write(1, slots, k, v)
    read_k, read_v = cache.read(1, slots)
    assert torch.equal(read_k, k.transpose(1, 2)) and torch.equal(read_v, v.transpose(1, 2))
    assert not cache.k[0].any(), "another layer is untouched"


def test_slots_of_different_rows_and_heads_never_meet() -> None:
    cache = make_cache()
    for row in range(3):
        cache.allocate(row, 20)
    slots = cache.slots(torch.arange(3), torch.arange(20).expand(3, -1))
    assert slots.unique().numel() == slots.numel() == 3 * 3 * 20


def test_blocks_are_taken_from_the_pool_and_returned() -> None:
    cache = make_cache(num_rows=2, blocks_per_row=3)
    cache.allocate(0, 9)
    cache.allocate(0, 12)
    assert len(cache.blocks[0]) == 3, "allocation tops up, it does not start over"
    cache.allocate(1, 12)
    cache.release(0)
    cache.allocate(0, 4)
    assert set(cache.blocks[0]).isdisjoint(cache.blocks[1])


def test_an_exhausted_pool_says_so() -> None:
    shape = CacheShape(1, 1, 2, 4, 2)
    cache = KVCache(shape, 2, 2, torch.float32, torch.device("cpu"))
    cache.allocate(0, 8)
    with pytest.raises(ValueError, match="row 1 needs 1 more blocks, 0 are free"):
        cache.allocate(1, 1)


def test_truncate_forgets_and_never_lengthens() -> None:
    cache = make_cache()
    cache.advance([0, 2], 9)
    cache.truncate([2], [4])
    assert cache.lengths == [9, 0, 4] and cache.seq_lens.tolist() == [9, 0, 4]
    with pytest.raises(AssertionError):
        cache.truncate([2], [5])


def visible(policy: KVPolicy, committed: int, length: int, num_new: int) -> list[int]:
    """The same thing said plainly."""
    if isinstance(policy, StreamingLLM):
        window = range(max(0, committed - (policy.budget - policy.num_sink_tokens)), committed)
        kept = sorted({*range(min(committed, policy.num_sink_tokens)), *window})
    else:
        kept = list(range(committed))
    return [*kept, *range(committed, length + num_new)]


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), min_size=1, max_size=4),
    num_new=st.integers(1, 6),
    sinks=st.integers(0, 6),
    window=st.integers(1, 40),
    full=st.booleans(),
)
def test_key_positions_are_what_the_policy_says(
    lengths: list[tuple[int, int]], num_new: int, sinks: int, window: int, full: bool
) -> None:
    policy: KVPolicy = FullKV() if full else StreamingLLM(sinks, sinks + window)
    cache = make_cache(num_rows=len(lengths), block_size=64, blocks_per_row=1)
    for row, (committed, tail) in enumerate(lengths):
        cache.advance([row], committed + tail)
    rows = list(range(len(lengths)))[::-1]
    view = make_view(cache, rows, policy, num_new, [lengths[r][0] for r in rows])
    expected = [visible(policy, c, c + t, num_new) for c, t in (lengths[r] for r in rows)]
    longest = max(map(len, expected))
    padded = [row + [-1] * (longest - len(row)) for row in expected]
    assert view.key_positions()[:, 0].tolist() == padded
    assert [n + num_new for n in view.num_visible] == [len(row) for row in expected]
    assert view.is_full == all(
        len(e) == sum(lengths[r]) + num_new for e, r in zip(expected, rows, strict=True)
    )


def test_streaming_llm_never_reads_more_than_its_budget() -> None:
    policy = StreamingLLM(16, 33)
    for committed in (0, 1, 16, 17, 32, 33, 34, 1000):
        ranges = policy.ranges(torch.tensor([committed]))[0]
        assert int((ranges[:, 1] - ranges[:, 0]).sum()) == policy.num_visible(committed)
        assert policy.num_visible(committed) == min(33, committed)


def test_streaming_llm_needs_room_for_a_window() -> None:
    with pytest.raises(ValueError, match="KV budget 16 must be larger than 16 sink tokens"):
        StreamingLLM(16, 16)
