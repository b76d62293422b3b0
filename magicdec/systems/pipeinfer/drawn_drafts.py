"""Drafts of a chosen acceptance rate, for pipelines whose models compute nothing."""

from __future__ import annotations

import math
import random

DRAFT_PROBABILITY = 0.7  # that the draft gives its candidate, at every place


def draw_right(acceptance: float, length: int, seed: int) -> list[bool]:
    """Whether the draft is right, at each of `length` places: an exact share in random order, since
    independent draws would often miss the rate by 0.07 in 64 tokens."""
    chooser = random.Random(seed)
    number = math.floor(acceptance * length + chooser.random())
    right = {*chooser.sample(range(length), number)}
    return [place in right for place in range(length)]
