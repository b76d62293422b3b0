"""Known answers: what a prompt's output should hold, and how much of it a pass got right.

Owns the two kinds of answer and their scores, between 0 and 1. Must not know how prompts are made
or decoded.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from magicdec.model.tokenizer import Tokenizer
from magicdec.request import Request


class Answer(Protocol):
    """What is known of the right output of one prompt."""

    def score(self, output_ids: Sequence[int], tokenizer: Tokenizer) -> float:
        """How much of the answer the output holds, 0 to 1."""


@dataclass(frozen=True)
class Strings:
    """Strings that must all appear in the output's text, in any place and case (RULER's
    `string_match_all`); the score is the share that does."""

    texts: tuple[str, ...]

    def score(self, output_ids: Sequence[int], tokenizer: Tokenizer) -> float:
        # A model's vocabulary may be padded beyond its tokenizer's; such ids have no text.
        ids = [i for i in output_ids if i < tokenizer.vocab_size]
        output = tokenizer.decode(ids).casefold()
        return sum(text.casefold() in output for text in self.texts) / len(self.texts)


@dataclass(frozen=True)
class Continuation:
    """Tokens that must come, each at its place; the score is the share that did. What is emitted
    after them is not judged; what an early end left out counts as wrong."""

    token_ids: tuple[int, ...]

    def score(self, output_ids: Sequence[int], tokenizer: Tokenizer) -> float:
        pairs = zip(self.token_ids, output_ids, strict=False)
        return sum(expected == found for expected, found in pairs) / len(self.token_ids)


def answer_score(
    answers: Sequence[Answer] | None, finished: Sequence[Request], tokenizer: Tokenizer
) -> float | None:
    """Mean score over the finished requests of a pass; answers are in prompt order. None where
    there are no answers."""
    if answers is None:
        return None
    return statistics.fmean(answers[r.request_id].score(r.output_ids, tokenizer) for r in finished)
