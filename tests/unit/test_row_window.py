"""Which rows move into a contiguous window: the fewest, by comparison with all windows."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from magicdec.scheduling.rows import window_moves


@given(st.lists(st.booleans(), max_size=12))
@example([True, False, True, True, False, True])
def test_the_fewest_rows_move_and_are_adjacent_then(is_taken: list[bool]) -> None:
    moves, size = window_moves(is_taken), sum(is_taken)
    after = list(is_taken)
    for source, target in moves:
        assert after[source] and not after[target], "a row that is taken moves to a free one"
        after[source], after[target] = False, True
    rows = [row for row, one in enumerate(after) if one]
    assert rows == list(range(rows[0], rows[0] + size)) if size else not rows
    starts = range(len(is_taken) - size + 1)
    assert len(moves) == min(size - sum(is_taken[start : start + size]) for start in starts)


def test_the_first_of_the_best_windows_is_taken() -> None:
    assert window_moves([True, False, True]) == [(2, 1)]
    assert window_moves([True, False, False, True, True]) == [(0, 2)]
    assert window_moves([False, True, True, False]) == window_moves([]) == []
