"""Shards: properties for any number of heads and ranks."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from magicdec.distributed.tensor_parallel import Shard, split_evenly


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, int, int]:
    """(query heads, KV heads, ranks), with no more ranks than query heads."""
    num_kv_heads = draw(st.integers(1, 16))
    group = draw(st.integers(1, 16))
    num_heads = num_kv_heads * group
    return num_heads, num_kv_heads, draw(st.integers(1, num_heads))


def shards(layout: tuple[int, int, int]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    num_heads, num_kv_heads, size = layout
    return [Shard(rank, size).heads(num_heads, num_kv_heads) for rank in range(size)]


@given(st.integers(0, 300), st.integers(1, 40))
def test_an_even_split_covers_in_order_and_the_first_parts_are_longer(
    total: int, parts: int
) -> None:
    ranges = [split_evenly(total, parts, i) for i in range(parts)]
    assert ranges[0][0] == 0 and ranges[-1][1] == total
    assert all(left[1] == right[0] for left, right in pairwise(ranges))
    lengths = [stop - start for start, stop in ranges]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1
    assert [Shard(i, parts).split(total) for i in range(parts)] == ranges


@given(st.integers(1, 400), st.sampled_from((1, 2, 8, 16, 32)), st.integers(1, 40))
@example(256, 32, 3)  # 8192 units: 2752, 2720, 2720
@example(5, 16, 3)
@example(6, 16, 2)
def test_mlp_units_are_shared_in_whole_groups(count: int, group: int, size: int) -> None:
    """In int4's groups of 32, or else in the smallest ones, of 16; each rank has some."""
    total = count * group
    ranges = [Shard(rank, size).mlp_units(total) for rank in range(size)]
    assert ranges[0][0] == 0 and ranges[-1][1] == total
    assert all(left[1] == right[0] for left, right in pairwise(ranges))
    lengths = {stop - start for start, stop in ranges}
    if total % 16 or total < 16 * size:
        assert max(lengths) - min(lengths) <= 1
    elif total % (16 * size) == 0:
        assert lengths == {total // size}
    else:
        shared = 16 if total % 32 or total < 32 * size else 32
        assert not any(bound % shared for bounds in ranges for bound in bounds)
        assert min(lengths) > 0 and max(lengths) - min(lengths) <= shared


@given(layouts())
@example((6, 3, 2))
@example((32, 8, 12))
@example((28, 4, 28))
def test_every_query_head_is_on_one_rank_in_order(layout: tuple[int, int, int]) -> None:
    held = [head for (first, last), _ in shards(layout) for head in range(first, last)]
    assert held == list(range(layout[0]))
    assert all(first < last for (first, last), _ in shards(layout)), "no rank is idle"


@given(layouts())
@example((6, 3, 2))
@example((32, 8, 12))
def test_a_query_head_finds_its_kv_head_on_its_own_rank(layout: tuple[int, int, int]) -> None:
    group = layout[0] // layout[1]
    for (first, last), (kv_first, kv_last) in shards(layout):
        needed = {head // group for head in range(first, last)}
        assert needed == set(range(kv_first, kv_last)), "all that it needs and nothing else"


@given(layouts())
@example((12, 3, 7))
def test_query_heads_of_a_rank_divide_over_its_kv_heads(layout: tuple[int, int, int]) -> None:
    """All groups of a rank have equal size: local query head h reads KV head h // (H/G)."""
    for (first, last), (kv_first, kv_last) in shards(layout):
        local, rest = divmod(last - first, kv_last - kv_first)
        assert rest == 0
        for head in range(first, last):
            group = layout[0] // layout[1]
            assert kv_first + (head - first) // local == head // group


@given(layouts())
@example((32, 8, 5))
@example((32, 8, 11))
def test_kv_heads_are_cut_evenly_or_repeated_evenly(layout: tuple[int, int, int]) -> None:
    _, num_kv_heads, size = layout
    held = [range(first, last) for _, (first, last) in shards(layout)]
    copies = [sum(head in kv for kv in held) for head in range(num_kv_heads)]
    if size <= num_kv_heads:
        lengths = [len(kv) for kv in held]
        assert copies == [1] * num_kv_heads and max(lengths) - min(lengths) <= 1
    else:
        assert {len(kv) for kv in held} == {1} and max(copies) - min(copies) <= 1
        assert sum(copies) == size


def test_one_rank_holds_everything() -> None:
    assert Shard().heads(32, 8) == ((0, 32), (0, 8))
    assert Shard().split(100) == (0, 100)


def test_more_ranks_than_query_heads_are_refused() -> None:
    message = "7 ranks cannot share 6 attention heads; use at most 6 ranks"
    with pytest.raises(ValueError, match=message):
        Shard(0, 7).heads(6, 3)
