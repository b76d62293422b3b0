"""The decode steps of answers: by what a server reports of its drafts or, where it says nothing, by
the tokens that come together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from magicdec.bench.audit.asking import ServerAnswer

TOGETHER_S = 0.003  # between the events of one step, of servers that send one a token
APART = 5  # times as long as that between steps, at least


def num_steps_of(answer: ServerAnswer) -> int | None:
    """The decode steps of an answer after its first token, each of which emits one token more than
    it accepts; as seen, if the server reports no drafts. None if neither is known."""
    count = len(answer.output_ids) - 1
    if answer.counts is not None and answer.counts.accepted is not None:
        # Drafts may be accepted past the end, with the last step. Each verification is a step.
        least = max(1, answer.counts.verifications or 0)
        return max(least, count - answer.counts.accepted) if count else 0
    sizes = seen_steps(answer)
    return None if sizes is None else len(sizes)


def seen_steps(answer: ServerAnswer) -> list[int] | None:
    """The tokens of each decode step as they came: one event a step or, if events have one token
    each, those that came together. None if steps cannot be told apart."""
    first, *later = answer.parts or [(0.0, 0)]
    sizes = [size for _, size in later]
    if max(sizes, default=1) > 1:
        return ([first[1] - 1] if first[1] > 1 else []) + sizes
    gaps = [after[0] - before[0] for before, after in pairwise(answer.parts)]
    short = [gap for gap in gaps if gap <= TOGETHER_S]
    long = [gap for gap in gaps if gap > TOGETHER_S]
    if not short or not long or min(long) < APART * max(short):
        return None
    found = list[int]()
    for gap in gaps:
        if gap > TOGETHER_S or not found:
            found.append(1)
        else:
            found[-1] += 1
    return found


def tokens_per_step(answers: Sequence[ServerAnswer]) -> float | None:
    """Of all answers together; None if it is not known of one of them."""
    steps = [num_steps_of(answer) for answer in answers]
    known = [count for count in steps if count is not None]
    if len(known) < len(steps) or not sum(known):
        return None
    return sum(len(answer.output_ids) - 1 for answer in answers) / sum(known)


def sum_of(name: str, answers: Sequence[ServerAnswer]) -> int | None:
    """What answers report together, `drafted` or `accepted` tokens; None if none reports it."""
    found = [getattr(answer.counts, name) for answer in answers if answer.counts is not None]
    known = [amount for amount in found if amount is not None]
    return sum(known) if known else None
