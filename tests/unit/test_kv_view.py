"""KVView against an enumeration of what a forward reads: rules, uncommitted tails, sliding windows,
and ranges by head. And captured rows, whose lengths only the device
knows: they read the same keys and get the same lengths as rows whose lengths the host knows, and
the bounds on the host hold."""

import random
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_kv_cache import make_cache
from torch import Tensor

from magicdec.kv.cache import BatchRows, KVCache, Lengths
from magicdec.kv.view import FULL, WEIGHTS_BLOCK, KVView, SinksAndWindow, Visible, make_view
from magicdec.speculation.block_kv import BlockRanges
from magicdec.speculation.policies.policy import FullKV
from magicdec.speculation.policies.streaming_llm import StreamingLLM
from magicdec.speculation.policies.verified import VerifiedKV

ROW_TOKENS = 80


@dataclass(frozen=True)
class Row:
    """`before` tokens, of which `committed` are committed, then the new tokens."""

    before: int
    committed: int


@dataclass(frozen=True)
class ViewCase:
    rows: list[Row]
    rule: SinksAndWindow | None
    window: int | None
    num_new: int

    def first(self, row: Row) -> int:
        return 0 if self.window is None else max(0, row.before + 1 - self.window)

    def old(self, row: Row) -> list[int]:
        """The visible positions before the new tokens."""
        seen = set(range(row.before))
        if self.rule is not None:
            newest = self.rule.budget - self.rule.num_sink_tokens
            hidden = range(self.rule.num_sink_tokens, max(0, row.committed - newest))
            seen -= set(hidden)
        return sorted(position for position in seen if position >= self.first(row))

    def new(self, row: Row) -> list[int]:
        return [*range(row.before, row.before + self.num_new)]


def draw(chooser: random.Random) -> ViewCase:
    num_new = chooser.randint(1, 7)
    rows = []
    for _ in range(chooser.randint(1, 3)):
        before = chooser.randint(0, 40)
        rows.append(Row(before, max(0, before - chooser.choice([0, 0, 1, 4]))))
    sinks = chooser.randint(0, 5)
    rule = chooser.choice([None, SinksAndWindow(sinks, sinks + chooser.randint(1, 30))])
    return ViewCase(rows, rule, chooser.choice([None, 1, 9, 30]), num_new)


def view_of(case: ViewCase) -> KVView:
    cache = make_cache(len(case.rows), ROW_TOKENS, 1)
    for number, row in enumerate(case.rows):
        cache.advance([number], row.before)
    numbers = range(len(case.rows))
    rule = case.rule or FULL
    committed = Lengths.of([row.committed for row in case.rows], torch.device("cpu"))
    return make_view(cache, numbers, rule, case.num_new, committed, case.window)


def padded(rows: list[list[int]]) -> list[list[int]]:
    """`rows` filled with -1 to equal lengths."""
    size = max(map(len, rows))
    return [[*row, *[-1] * (size - len(row))] for row in rows]


@pytest.mark.parametrize("block", range(4))
def test_a_view_has_the_keys_of_an_enumeration(block: int) -> None:
    for seed in range(block * 100, (block + 1) * 100):
        check(draw(random.Random(seed)))


def check(case: ViewCase) -> None:
    view = view_of(case)
    rows = case.rows
    old = [case.old(row) for row in rows]
    assert view.lengths == tuple(row.before for row in rows)
    assert view.lengths == tuple(view.seq_lens.tolist())
    assert view.num_visible == tuple(map(len, old))
    assert view.first_keys == tuple(case.first(row) for row in rows)
    in_window = [row.before - case.first(row) for row in rows]
    assert view.is_full == ([len(positions) for positions in old] == in_window)
    assert view.count_keys().tolist() == [len(positions) + case.num_new for positions in old]
    longest = max(row.before for row in rows) + case.num_new
    assert view.num_weight_blocks == -(-longest // WEIGHTS_BLOCK)
    new = [case.new(row) for row in rows]
    seen = [[*before, *after] for before, after in zip(old, new, strict=True)]
    assert view.key_positions()[:, 0].tolist() == padded(seen)
    assert view.query_positions().tolist() == new


@dataclass(frozen=True)
class ByHead:
    """Layer l, head g see `count` tokens from l + g on."""

    count: int

    def ranges(self, committed: Tensor) -> Tensor:
        starts = torch.tensor([[layer + head for head in range(3)] for layer in range(2)])
        starts = starts[:, None].expand(-1, len(committed), -1)
        return torch.stack([starts, starts + self.count], dim=3).unsqueeze(3)

    def num_visible(self, committed: int) -> int:
        return self.count

    def most_visible(self, committed: int) -> int:
        return self.count


def test_layers_and_heads_may_have_ranges_of_their_own() -> None:
    cache: KVCache = make_cache(1, ROW_TOKENS, 1)
    cache.advance([0], 20)
    view = make_view(cache, [0], ByHead(5), 2, [18])
    for layer, head in product(range(2), range(3)):
        first = layer + head
        expected = [*range(first, first + 5), 18, 19, 20, 21]
        assert view.key_positions(layer)[0, head].tolist() == expected
    assert view.num_visible == (7,) and view.count_keys().tolist() == [9]


def test_a_window_never_makes_ranges_by_head_a_full_view() -> None:
    """The rule keeps them within the window itself, and heads could see other tokens of it."""
    cache = make_cache(1, ROW_TOKENS, 1)
    cache.advance([0], 9)
    view = make_view(cache, [0], ByHead(5), 1, window=6)
    assert view.num_visible == (5,) and not view.is_full


CAPACITY = 128
MOST_TAIL = 5


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
    lengths = torch.tensor(committed)
    most = max(policy.split(c)[1] for c in committed)
    blocks = -(-max(committed) // WEIGHTS_BLOCK)
    whole = min(policy.budget // WEIGHTS_BLOCK, CAPACITY // WEIGHTS_BLOCK)
    return (
        BlockRanges(policy, policy.top_blocks(lengths, mass[..., :blocks], min(most, blocks))),
        BlockRanges(policy, policy.top_blocks(lengths, mass, whole)),
    )


@settings(max_examples=300, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(1, 117), st.integers(0, MOST_TAIL), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    kind=st.sampled_from(["full", "streaming_llm", "verified"]),
    num_new=st.integers(1, 6),
    sinks=st.integers(0, 20),
    room=st.integers(1, 130),
    window=st.none() | st.integers(8, 127),
    drafts=st.booleans(),
)
# Near the end of a row, budget and tail can reach its capacity without showing all its tokens.
@example(
    rows=[(117, 0, True)],
    kind="streaming_llm",
    num_new=6,
    sinks=4,
    room=109,
    window=None,
    drafts=True,
)
def test_a_captured_view_shows_the_keys_of_the_hosts_view(
    rows: list[tuple[int, int, bool]],
    kind: str,
    num_new: int,
    sinks: int,
    room: int,
    window: int | None,
    drafts: bool,
) -> None:
    """This holds for active rows; rows that have ended see only their new tokens. `is_full` is true
    only for a full view, and no row sees more tokens than the bound on the host."""
    cache = make_cache(num_rows=len(rows), block_size=64, blocks_per_row=CAPACITY // 64)
    committed = [c for c, _, _ in rows] if drafts else [c + t for c, t, _ in rows]
    for row, (settled, tail, _) in enumerate(rows):
        cache.advance([row], settled + tail)
    numbers = list(range(len(rows)))
    active = [a for *_, a in rows]
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
