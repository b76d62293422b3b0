"""Known answers and their scores, and recall: prefixes that end with the beginning of a distant
passage, which the model must continue."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from magicdec.model.tokenizer import Tokenizer
from magicdec.runner.request import Request


class Answer(Protocol):
    def score(self, output_ids: Sequence[int], tokenizer: Tokenizer) -> float:
        """The share of the answer that is in the output, 0 to 1."""


@dataclass(frozen=True)
class Strings:
    """Strings that must appear in the output's text, anywhere and in any case (RULER's
    `string_match_all`). The score is the share that appears."""

    texts: tuple[str, ...]

    def score(self, output_ids: Sequence[int], tokenizer: Tokenizer) -> float:
        # A model's vocabulary may be padded beyond the tokenizer's; the padding ids have no text.
        ids = [i for i in output_ids if i < tokenizer.vocab_size]
        output = tokenizer.decode(ids).casefold()
        return sum(text.casefold() in output for text in self.texts) / len(self.texts)


@dataclass(frozen=True)
class Continuation:
    """Token ids to emit, position by position. The score is the share that matches, without later
    ones."""

    token_ids: tuple[int, ...]

    def score(self, output_ids: Sequence[int], tokenizer: Tokenizer) -> float:
        pairs = zip(self.token_ids, output_ids, strict=False)
        return sum(expected == actual for expected, actual in pairs) / len(self.token_ids)


def answer_scores(
    answers: Sequence[Answer] | None, finished: Sequence[Request], tokenizer: Tokenizer
) -> list[float] | None:
    """The scores of the finished requests of a pass. `answers` are in prompt order; None gives
    None."""
    if answers is None:
        return None
    return [answers[r.request_id].score(r.output_ids, tokenizer) for r in finished]


CUE = 64  # tokens of the passage repeated at the end of the prefix
# tokens between the passage and its repetition
NEAREST = 2000
FURTHEST = 12000
LEAST_PREFIX = 64  # tokens; a shorter prefix has no room for a passage


def recall_prompts(
    prefixes: Sequence[tuple[int, ...]], gen_len: int, seed: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[Continuation, ...]]:
    """The prefixes with cues at their ends, and the continuations. Raises ValueError for prefixes
    shorter than LEAST_PREFIX."""
    if len(prefixes[0]) < LEAST_PREFIX:
        raise ValueError(
            f"--prefix_len {len(prefixes[0])} is too short for --dataset recall; "
            f"it must be at least {LEAST_PREFIX}"
        )
    repeats = [
        repeat_passage(prefix, gen_len, random.Random(f"{seed}:recall:{i}"))
        for i, prefix in enumerate(prefixes)
    ]
    return tuple(prompt for prompt, _ in repeats), tuple(answer for _, answer in repeats)


def repeat_passage(
    prefix: tuple[int, ...], gen_len: int, rng: random.Random
) -> tuple[tuple[int, ...], Continuation]:
    """A prompt whose cue repeats a passage NEAREST to FURTHEST tokens back (in a short prefix from
    a third on, never the BOS token), and the rest of the passage: `gen_len` tokens, or fewer before
    the cue."""
    num_cue = min(CUE, len(prefix) // 8)
    body = prefix[:-num_cue]
    distance = rng.randint(min(NEAREST, len(body) // 3), min(FURTHEST, len(body) - 1))
    start = len(body) - distance
    after = start + num_cue
    return body + body[start:after], Continuation(body[after : after + gen_len])
