"""What the head of a pipeline tells the stages, the drafter and the user. Every action is plain
integers, so that it can be sent as a typed message of fixed words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Ranges = tuple[tuple[int, int], ...]
"""Cells of a lane as (first, end) pairs, ascending."""


@dataclass(frozen=True)
class Launch:
    """Run these rows through the stages, each stage in the order of launches.

    A stage first applies `moves` (also if it skips the run), then computes the rows. Row i reads
    the cells of `context`, those of its ancestors within the run, and its own. `parents[i]` is the
    row that comes before it, -1 for a row that follows the last token of the context. The
    predictions of the last `num_outputs` rows come home."""

    run: int
    request: int
    lane: int  # the row of the KV cache that belongs to the request
    is_speculative: bool
    num_outputs: int
    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    cells: tuple[int, ...]  # of the lane; the KV of row i is written to cells[i]
    parents: tuple[int, ...]
    context: Ranges
    moves: tuple[tuple[int, int], ...]  # (from, to) cells of the lane

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    def to_words(self) -> tuple[int, ...]:
        """The run as int64 words: eight words of a header, then the rows and the pairs."""
        header = (self.run, self.request, self.lane, int(self.is_speculative))
        sizes = (self.num_outputs, self.num_rows, len(self.context), len(self.moves))
        pairs = [cell for pair in (*self.context, *self.moves) for cell in pair]
        return (*header, *sizes, *self.tokens, *self.positions, *self.cells, *self.parents, *pairs)

    @classmethod
    def from_words(cls, words: Sequence[int]) -> Launch:
        run, request, lane, is_speculative, num_outputs, rows, ranges, moves = words[:8]
        assert len(words) == 8 + 4 * rows + 2 * (ranges + moves), "the header names the size"
        columns = [tuple(words[8 + i * rows : 8 + (i + 1) * rows]) for i in range(4)]
        rest = words[8 + 4 * rows :]
        pairs = tuple(zip(rest[::2], rest[1::2], strict=True))
        tokens, positions, cells, parents = columns
        return cls(
            run, request, lane, bool(is_speculative), num_outputs,
            tokens, positions, cells, parents, pairs[:ranges], pairs[ranges:],
        )  # fmt: skip


@dataclass(frozen=True)
class Cancel:
    """Nothing will read what these runs have still to compute. A stage that skips one of them
    sends a void header on in its place. A stage that has finished it already does nothing."""

    runs: tuple[int, ...]


@dataclass(frozen=True)
class Commit:
    """These are the next tokens of the request's output."""

    request: int
    tokens: tuple[int, ...]
    finished: str | None  # "eos", "length", or None while the request goes on


@dataclass(frozen=True)
class Draft:
    """One step of the draft model: the most probable tokens after each of these paths. A path is
    what follows the committed tokens of the request."""

    draft: int
    request: int
    paths: tuple[tuple[int, ...], ...]


Action = Launch | Cancel | Commit | Draft
Candidates = tuple[tuple[int, float], ...]
"""(token, probability) of a path's next token, the most probable first, at most 8."""


def to_ranges(prefix: int, cells: Iterable[int]) -> Ranges:
    """The cells below `prefix` and `cells`, as ascending (first, end) pairs."""
    ranges = [[0, prefix]] if prefix else []
    for cell in sorted(cells):
        if ranges and ranges[-1][1] == cell:
            ranges[-1][1] = cell + 1
        else:
            ranges.append([cell, cell + 1])
    return tuple((first, end) for first, end in ranges)
