"""What a draft log says of a step: the same set of positions has one hash, wherever its keys are
kept and however it is cut into ranges, and any other set has another."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from magicdec.kv.cache import BatchRows
from magicdec.kv.layer_views import LayerViews, LayerWindows
from magicdec.runner.observers.draft_log import DIGITS, Digest, DraftLog, digest_of_ranks

LAYERS = 3
HEADS = 2
Ranges = Sequence[tuple[int, int]]


def cache_of(num_layers: int = LAYERS) -> Any:
    return SimpleNamespace(shape=SimpleNamespace(num_layers=num_layers, num_kv_heads=HEADS))


def alone(cache: Any) -> Any:
    """The caches of a runner whose layers all have one window."""
    windows = LayerWindows((None,), (0,) * cache.shape.num_layers)
    return SimpleNamespace(distinct=[cache], windows=windows)


def view_of(cache: Any, ranges: torch.Tensor) -> Any:
    rows = ranges.shape[1]
    index = torch.arange(rows)
    return SimpleNamespace(cache=cache, rows=tuple(range(rows)), row_index=index, all_ranges=ranges)


def views_of(*views: Any) -> LayerViews:
    """The views of layers in turns."""
    layer_places = tuple(layer % len(views) for layer in range(views[0].cache.shape.num_layers))
    return LayerViews(views, LayerWindows((None, 1)[: len(views)], layer_places))


def show(
    log: DraftLog, views: LayerViews, offsets: torch.Tensor | None, num_forwards: int = 1
) -> None:
    """Show a log draft forwards of row 0."""
    rows = BatchRows.of([0], torch.device("cpu"))
    log.on_draft(rows, views, offsets, num_forwards)


def shared(*ranges: tuple[int, int]) -> torch.Tensor:
    """What all layers and heads of one row read."""
    return torch.tensor([[[list(ranges)]]])


def digest_of(*forwards: torch.Tensor, cache: Any = None, chain: int = 1) -> Digest:
    """Of a step with these forwards of one row."""
    log = DraftLog()
    cache = cache or cache_of()
    for ranges in forwards:
        show(log, views_of(view_of(cache, ranges)), None, chain)
    (digest,) = log.digests([0]) or [("", 0)]
    return digest


WHOLE = shared((0, 16), (100, 140))


@pytest.mark.parametrize(
    "ranges",
    [
        shared((0, 5), (5, 16), (100, 140)),
        shared((100, 120), (0, 16), (120, 140)),
        shared((0, 16), (50, 50), (100, 140)),
        WHOLE.expand(LAYERS, 1, HEADS, 2, 2),
    ],
)
def test_a_set_of_positions_has_one_hash(ranges: torch.Tensor) -> None:
    assert digest_of(ranges) == digest_of(WHOLE)


def test_layers_with_another_window_count_for_themselves() -> None:
    """The number of keys is the mean over layers, two of three of the first kind."""
    cache = cache_of()

    def digest(*kind_ranges: torch.Tensor) -> Digest:
        log = DraftLog()
        show(log, views_of(*(view_of(cache, ranges) for ranges in kind_ranges)), None)
        (found,) = log.digests([0]) or [("", 0)]
        return found

    narrow = shared((0, 0), (130, 140))
    other = shared((0, 0), (129, 139))
    assert digest(WHOLE, WHOLE)[0] == digest_of(WHOLE)[0]
    assert digest(WHOLE, narrow)[1] == (2 * 56 + 10) // 3
    assert (
        len({digest(*pair)[0] for pair in ((WHOLE, narrow), (WHOLE, other), (narrow, WHOLE))}) == 3
    )


OTHERS = {
    "a sink fewer": shared((0, 15), (100, 140)),
    "a sink fewer and the window longer": shared((0, 15), (99, 140)),
    "the window shifted": shared((0, 16), (99, 139)),
    "one token elsewhere": shared((0, 16), (98, 99), (101, 140)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_set_has_another(name: str) -> None:
    assert digest_of(OTHERS[name])[0] != digest_of(WHOLE)[0]


def test_another_set_of_one_head_of_one_layer_is_seen() -> None:
    for layer in range(LAYERS):
        for head in range(HEADS):
            ranges = WHOLE.repeat(LAYERS, 1, HEADS, 1, 1)
            ranges[layer, 0, head, 0, 1] -= 1
            ranges[layer, 0, head, 1, 0] -= 1
            assert digest_of(ranges)[0] != digest_of(WHOLE)[0]
    swapped = WHOLE.repeat(LAYERS, 1, HEADS, 1, 1)
    swapped[0, 0, 0] = swapped[0, 0, 0] + 1
    other = WHOLE.repeat(LAYERS, 1, HEADS, 1, 1)
    other[1, 0, 0] = other[1, 0, 0] + 1
    assert digest_of(swapped)[0] != digest_of(other)[0], "which layer it is matters"


def test_a_chain_is_its_forwards_one_after_the_other() -> None:
    one = shared((0, 16), (100, 140))
    two = shared((0, 16), (100, 141))
    assert digest_of(one, chain=2) == digest_of(one, two)
    assert digest_of(one, chain=2)[1] == 56 + 57
    assert digest_of(two, one)[0] != digest_of(one, two)[0], "the order matters"


def test_entries_of_a_copy_are_the_positions_that_they_hold() -> None:
    """A row of 5 chosen tokens of 40 and what followed them, of which the newest 6 are read."""
    copy = cache_of()
    source = cache_of()
    positions = torch.tensor([[[3, 30, 7, 38, 39], [1, 2, 3, 38, 39]]])  # [B, G, N]
    offsets = torch.tensor([35])
    log = DraftLog()
    log.on_choice(alone(copy), [0], [positions] * LAYERS)
    show(log, views_of(view_of(copy, shared((2, 5), (5, 8)))), offsets)
    (copy_digest,) = log.digests([0]) or []
    kept = [[(7, 8), (38, 40), (40, 43)], [(3, 4), (38, 40), (40, 43)]]
    ranges = torch.tensor([[kept]] * LAYERS)  # [L, B, G, R, 2]
    assert copy_digest == digest_of(ranges, cache=source)
    log.begin()
    log.on_choice(alone(copy), [0], [positions.flip(2)] * LAYERS)
    show(log, views_of(view_of(copy, shared((2, 5), (5, 8)))), offsets)
    assert log.digests([0]) != [copy_digest], "other entries are read"


def test_what_was_drafted_counts_without_padding() -> None:
    log = DraftLog()
    ids = torch.tensor([[5, 6, 7], [5, 6, 9], [5, 6, 7]])
    log.drafted([0, 1, 2], ids, [2, 2, 3])
    first, second, third = log.digests([0, 1, 2]) or []
    assert first == second != third


def test_a_step_begins_with_nothing_and_captured_steps_have_no_log() -> None:
    log = DraftLog()
    show(log, views_of(view_of(cache_of(), WHOLE)), None)
    before = log.digests([0])
    log.begin()
    assert log.digests([0]) != before and (log.digests([0]) or [("", 1)])[0][1] == 0
    log.is_complete = False
    assert log.digests([0]) is None


def test_what_ranks_have_logged_becomes_one_digest_that_follows_from_all_of_them() -> None:
    """In four digits, so that the numbers here are fixed ones that show it."""
    tokens = "1111"
    reads = "2222"
    others = "3333"
    same = digest_of_ranks([(tokens + reads, 260)] * 3)
    assert same == (tokens + reads, 260) == digest_of_ranks([(tokens + reads, 260)])
    found = [
        digest_of_ranks([(tokens + first, 0), (tokens + second, 260)])
        for first, second in ((reads, others), (others, reads), (reads, "4444"))
    ]
    assert all(text[:DIGITS] == tokens and number == 260 for text, number in found)
    assert len({text for text, _ in found} | {tokens + reads, tokens + others}) == 5
    text, _ = digest_of_ranks([(tokens + reads, 1), (others + reads, 1)])
    half = slice(DIGITS)
    assert text[half] not in (tokens, others) and text[DIGITS:] == reads
