"""Recall: prefixes that end with a cue, the repeated beginning of a passage far back in the prefix.
The expected continuation is that passage, so the model must attend to distant tokens.

Owns the choice of the passage. Must not know where prefixes come from.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from magicdec.workload.answers import Continuation

CUE = 64  # tokens of the passage repeated at the end of the prefix
NEAREST, FURTHEST = 2000, 12000  # tokens between the passage and its repetition
LEAST_PREFIX = 64  # tokens; a shorter prefix has no room for a passage


def make_prompts(
    prefixes: Sequence[tuple[int, ...]], gen_len: int, seed: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[Continuation, ...]]:
    """Each prefix with its last tokens replaced by a cue, and the expected continuations. Raises
    ValueError if the prefixes are shorter than LEAST_PREFIX."""
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
    """The cue repeats the beginning of a passage NEAREST to FURTHEST tokens back. In a short prefix
    the distance is limited: at least a third of the prefix, and never back to the BOS token. The
    continuation is the rest of the passage: `gen_len` tokens, or fewer if the cue comes first."""
    num_cue = min(CUE, len(prefix) // 8)
    body = prefix[:-num_cue]
    distance = rng.randint(min(NEAREST, len(body) // 3), min(FURTHEST, len(body) - 1))
    start = len(body) - distance
    after = start + num_cue
    return body + body[start:after], Continuation(body[after : after + gen_len])
