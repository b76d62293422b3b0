"""Known answers: the expected output of a prompt, and the score of an actual output.

Owns the two kinds of answers and their scores, between 0 and 1. Must not know how prompts are made
or decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from magicdec.model.tokenizer import Tokenizer
from magicdec.request import Request


class Answer(Protocol):
    """The expected output of one prompt."""

    def score(self, output_ids: Sequence[int], tokenizer: Tokenizer) -> float:
        """The share of the answer that is in the output, 0 to 1."""


@dataclass(frozen=True)
class Strings:
    """Strings that must all appear in the output's text, anywhere and in any case (RULER's
    `string_match_all`). The score is the share of strings that appear."""

    texts: tuple[str, ...]

    def score(self, output_ids: Sequence[int], tokenizer: Tokenizer) -> float:
        # A model's vocabulary may be padded beyond the tokenizer's; the padding ids have no text.
        ids = [i for i in output_ids if i < tokenizer.vocab_size]
        output = tokenizer.decode(ids).casefold()
        return sum(text.casefold() in output for text in self.texts) / len(self.texts)


@dataclass(frozen=True)
class Continuation:
    """The token ids that must be emitted, position by position. The score is the share that match.
    Later tokens are ignored; tokens missing from a shorter output count as wrong."""

    token_ids: tuple[int, ...]

    def score(self, output_ids: Sequence[int], tokenizer: Tokenizer) -> float:
        pairs = zip(self.token_ids, output_ids, strict=False)
        return sum(expected == found for expected, found in pairs) / len(self.token_ids)


def answer_scores(
    answers: Sequence[Answer] | None, finished: Sequence[Request], tokenizer: Tokenizer
) -> list[float] | None:
    """The score of each finished request of a pass. `answers` are in prompt order; without answers
    the scores are None."""
    if answers is None:
        return None
    return [answers[r.request_id].score(r.output_ids, tokenizer) for r in finished]
