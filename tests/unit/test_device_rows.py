"""Captured rows, whose lengths only the device knows: they read the same keys and get the same
lengths as rows whose lengths the host knows, and the bounds on the host hold."""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_kv_cache import make_cache

from magicdec.drafting.block_kv import ChosenBlocks
from magicdec.drafting.policies.full import FullKV
from magicdec.drafting.policies.streaming_llm import StreamingLLM
from magicdec.drafting.policies.verified import VerifiedKV
from magicdec.kv.cache import BatchRows, Lengths
from magicdec.kv.view import WEIGHTS_BLOCK, KVView, Visible, make_view

CAPACITY, MOST_TAIL = 128, 5


def device_rows(numbers: list[int], active: list[bool]) -> BatchRows:
    index = torch.tensor(numbers)
    return BatchRows(tuple(numbers), index, torch.tensor(active).long(), 2 * MOST_TAIL)


def keys_of(view: KVView, layer: int, row: int, head: int) -> list[int]:
    ranges = view.layer_ranges(layer)
    ranges = ranges[row, head if ranges.shape[1] > 1 else 0]
    return [p for first, last in ranges.tolist() for p in range(first, last)]


def policies(kind: str, sinks: int, room: int, window: int | None, committed: list[int]):  # type: ignore[no-untyped-def]
    """A policy for the host and the same policy for the device."""
    if kind == "full":
        return FullKV(), FullKV()
    if kind == "streaming_llm":
        return (StreamingLLM(sinks, sinks + room),) * 2
    policy = VerifiedKV(sinks, max(1, room // 2), sinks + room, window)
    mass = torch.rand(2, len(committed), 3, CAPACITY // WEIGHTS_BLOCK)
    lengths, most = torch.tensor(committed), max(policy.split(c)[1] for c in committed)
    blocks = -(-max(committed) // WEIGHTS_BLOCK)
    whole = min(policy.budget // WEIGHTS_BLOCK, CAPACITY // WEIGHTS_BLOCK)
    return (
        ChosenBlocks(policy, policy.top_blocks(lengths, mass[..., :blocks], min(most, blocks))),
        ChosenBlocks(policy, policy.top_blocks(lengths, mass, whole)),
    )


@settings(max_examples=300, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(1, 117), st.integers(0, MOST_TAIL), st.booleans()),
        min_size=1, max_size=4,
    ),
    kind=st.sampled_from(["full", "streaming_llm", "verified"]),
    num_new=st.integers(1, 6),
    sinks=st.integers(0, 20),
    room=st.integers(1, 130),
    window=st.none() | st.integers(8, 127),
    drafts=st.booleans(),
)  # fmt: skip
# Near the end of a row, budget and tail can reach its capacity without showing all its tokens.
@example(
    rows=[(117, 0, True)], kind="streaming_llm", num_new=6, sinks=4, room=109, window=None,
    drafts=True,
)  # fmt: skip
def test_a_captured_view_shows_the_keys_of_the_hosts_view(
    rows: list[tuple[int, int, bool]], kind: str, num_new: int, sinks: int, room: int,
    window: int | None, drafts: bool,
) -> None:  # fmt: skip
    """This holds for active rows; rows that have ended see only their new tokens. `is_full` is true
    only for a full view, and no row sees more tokens than the bound on the host."""
    cache = make_cache(num_rows=len(rows), block_size=64, blocks_per_row=CAPACITY // 64)
    committed = [c for c, _, _ in rows] if drafts else [c + t for c, t, _ in rows]
    for row, (settled, tail, _) in enumerate(rows):
        cache.advance([row], settled + tail)
    numbers, active = list(range(len(rows))), [a for *_, a in rows]
    asked: tuple[Visible, Visible] = policies(kind, sinks, room, window, committed)
    given_host = committed if drafts else None
    given_device = Lengths.of(committed, torch.device("cpu")) if drafts else None
    host = make_view(cache, numbers, asked[0], num_new, given_host, window)
    on_device = device_rows(numbers, active)
    view = make_view(cache, on_device, asked[1], num_new, given_device, window)
    counts = view.count_keys().tolist()
    for row, (settled, tail, goes_on) in enumerate(rows):
        length = settled + tail
        for layer in range(2):
            for head in range(3):
                expected = keys_of(host, layer, row, head)
                if not goes_on:
                    expected = list(range(length, length + num_new))
                assert keys_of(view, layer, row, head) == expected
        assert counts[row] == len(expected) <= view.num_visible[row] + num_new
        assert length <= view.lengths[row] == CAPACITY - num_new
        if view.is_full and goes_on:
            assert len(expected) == length + num_new
    assert view.query_positions().tolist() == host.query_positions().tolist()
    assert view.num_weight_blocks >= host.num_weight_blocks


def test_captured_rows_change_only_the_lengths_on_the_device() -> None:
    cache = make_cache(num_rows=3, block_size=64, blocks_per_row=1)
    cache.advance([0, 1, 2], 10)
    rows = device_rows([2, 0], [True, False])
    before = cache.lengths_of(rows)
    cache.advance(rows, 4)
    assert cache.seq_lens.tolist() == [10, 10, 14], "a row that has ended stands still"
    assert cache.lengths == [10, 10, 10]
    cache.truncate(rows, Lengths(torch.tensor([12, 13]), (64, 64)))
    assert cache.seq_lens.tolist() == [10, 10, 12], "and is not lengthened"
    assert before.tensor.tolist() == [10, 10], "as it was"
    assert before.bounds == (64, 64)
    cache.set_host_lengths([2], [12])
    assert cache.lengths == [10, 10, 12]
