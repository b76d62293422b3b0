"""Recall: a prefix that ends on the beginning of a passage which stands far back in it, so that the
right continuation is far away.

Owns where the passage is taken from. Must not know where prefixes come from.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from magicdec.workload.answers import Continuation

CUE = 64  # tokens of the passage that the prefix ends on
NEAREST, FURTHEST = 2000, 12000  # tokens from the passage to its repetition
LEAST_PREFIX = 64  # tokens; shorter ones leave no passage to go on with


def make_prompts(
    prefixes: Sequence[tuple[int, ...]], gen_len: int, seed: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[Continuation, ...]]:
    """Each prefix with a cue in place of its last tokens, and how it goes on. ValueError if they
    are shorter than LEAST_PREFIX."""
    if len(prefixes[0]) < LEAST_PREFIX:
        raise ValueError(
            f"--prefix_len {len(prefixes[0])} is too short for --dataset recall; "
            f"it must be at least {LEAST_PREFIX}"
        )
    made = [
        repeat_passage(prefix, gen_len, random.Random(f"{seed}:recall:{i}"))
        for i, prefix in enumerate(prefixes)
    ]
    return tuple(prompt for prompt, _ in made), tuple(answer for _, answer in made)


def repeat_passage(
    prefix: tuple[int, ...], gen_len: int, rng: random.Random
) -> tuple[tuple[int, ...], Continuation]:
    """The cue repeats a passage NEAREST to FURTHEST tokens back; where the prefix is too short for
    that, at least a third of it and at most all of it but BOS. The continuation is the passage's,
    `gen_len` tokens of it or as many as stand before the cue."""
    num_cue = min(CUE, len(prefix) // 8)
    body = prefix[:-num_cue]
    distance = rng.randint(min(NEAREST, len(body) // 3), min(FURTHEST, len(body) - 1))
    start = len(body) - distance
    after = start + num_cue
    return body + body[start:after], Continuation(body[after : after + gen_len])
