"""The actions of a pipeline's head: integers alone, so that a message of fixed words holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class RunLaunch:
    """A run of rows through the stages, in the order of launches.

    The rows are consecutive tokens from position `first` on, from where a stage first forgets the
    lane. The predictions of the last `num_outputs` rows come home. No later run begins before the
    `num_committed` tokens of the lane that are committed.
    """

    run: int
    request: int
    lane: int  # the row of the KV cache that belongs to the request
    is_speculative: bool
    num_outputs: int
    num_committed: int
    first: int
    tokens: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    @property
    def positions(self) -> range:
        return range(self.first, self.first + self.num_rows)

    def to_words(self) -> tuple[int, ...]:
        """The run as int64 words: seven words of header, then the tokens."""
        numbers = (self.run, self.request, self.lane, int(self.is_speculative), self.num_outputs)
        return (*numbers, self.num_committed, self.first, *self.tokens)

    @classmethod
    def from_words(cls, words: Sequence[int]) -> RunLaunch:
        run, request, lane, is_speculative, num_outputs, committed, first, *tokens = words
        numbers = num_outputs, committed, first
        return cls(run, request, lane, bool(is_speculative), *numbers, tuple(tokens))


class JudgedRun(NamedTuple):
    """The drafts of a run whose first draft was judged, and the number accepted."""

    num_drafted: int
    num_accepted: int
    position: int  # of the first draft in the text


@dataclass(frozen=True)
class Cancel:
    """Runs whose further results nobody will read. A stage that skips one sends a void header on
    instead."""

    runs: tuple[int, ...]


@dataclass(frozen=True)
class Commit:
    """The next tokens of the request's output."""

    request: int
    tokens: tuple[int, ...]
    finished: str | None  # "eos", "length", or None while the request goes on
    judged: tuple[JudgedRun, ...] = ()  # the runs of drafts about which all is known now
    num_cancelled: int = 0  # draft tokens of runs of which no draft will be judged


@dataclass(frozen=True)
class DraftAction:
    """A step of the drafter: find the most probable token after `path`, which follows the committed
    tokens."""

    draft: int
    request: int
    path: tuple[int, ...]


Action = RunLaunch | Cancel | Commit | DraftAction
Candidate = tuple[int, float]
"""A path's most probable next token, and its probability."""
