"""Drafts of a chosen acceptance rate, for pipelines whose models are emulated or simulated."""

from __future__ import annotations

import math
import random

DRAFT_PROBABILITY = 0.7  # that the draft gives its candidate, at every place


def draw_right(acceptance: float, length: int, seed: int) -> list[bool]:
    """Whether the draft's candidate is the target's token, at each of `length` places: at so many
    of them, in a random order, as the rate says. If each were drawn by itself, a text of 64 tokens
    would often have a rate that is 0.07 higher, with which a pipeline is twice as fast."""
    chooser = random.Random(seed)
    number = math.floor(acceptance * length + chooser.random())
    right = {*chooser.sample(range(length), number)}
    return [place in right for place in range(length)]
