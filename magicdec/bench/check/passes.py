"""The check of a pass that served the same requests as its reference: whether its tokens are right,
its steps and its forwards. There is one for all commands; what differs is how texts are computed
again (`replays`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from magicdec.bench.check.check import Replays, check_outputs, identical, uncompared
from magicdec.bench.check.output import PassOutput
from magicdec.bench.check.replays import Means
from magicdec.distributed.values import all_gather_values
from magicdec.records.correctness import Correctness, JudgedAgain
from magicdec.runner.request import UNKNOWN_ID, Request
from magicdec.systems.modes import Pass


@dataclass(frozen=True)
class Checked:
    """How many requests have other tokens than in the reference, None if that cannot be compared,
    and what else is known of the tokens."""

    num_differing: int | None
    correctness: Correctness


def check_pass(
    reference: PassOutput,
    output: PassOutput,
    judged: JudgedAgain | None,
    means: Means,
    has_others: bool,
    size: int,
) -> Checked:
    """Whether the tokens of a pass are right; `judged` is what is known of its steps. Without
    others (`has_others`) it has no reference but itself. All `size` ranks call it."""
    known = count_differing(reference, output) if has_others else None
    counts = all_gather_values([] if known is None else [known], list[int], size)[0]
    if not counts:
        return Checked(None, replace(uncompared(output.requests), judged_again=judged))
    forwards = means.forwards(reference, output)
    correctness = identical(reference.name, output.requests)
    if counts[0]:
        replays = means.replays(reference, output)
        if replays is None:
            correctness = replace(
                uncompared(output.requests), reference=reference.name, identical=False
            )
        else:
            pair = reference.requests, output.requests
            correctness = check_differing(reference.name, *pair, replays, size)
    return Checked(counts[0], replace(correctness, judged_again=judged, forwards=forwards))


def count_differing(reference: PassOutput, output: PassOutput) -> int | None:
    """The requests whose tokens differ, None if they cannot be compared; known to the first
    rank."""
    serving_pass = output.serving_pass
    system = output.system
    temperature = system.run.config.sampling.temperature
    pairs = list(zip(reference.requests, output.requests, strict=True))
    has_ids = not any(UNKNOWN_ID in request.output_ids for pair in pairs for request in pair)
    is_by_chance = system.options.accepts_by_chance(serving_pass)
    is_comparable = has_ids and can_compare(serving_pass, reference.serving_pass, temperature)
    if is_by_chance or not is_comparable:
        return None
    return sum(expected.output_ids != found.output_ids for expected, found in pairs)


def can_compare(serving_pass: Pass, first: Pass, temperature: float) -> bool:
    """Sampled drafts that are made in turns are rejected at random, so that tokens differ from
    those of a pass that drafts nothing, while their distribution is the same."""
    is_random = temperature > 0 and (serving_pass.drafts_in_turns or first.drafts_in_turns)
    return serving_pass == first or not is_random


def check_differing(
    name: str,
    expected: Sequence[Request],
    found: Sequence[Request],
    replays: Replays,
    size: int,
) -> Correctness:
    """Compares outputs that differ with those of the pass `name`. All `size` ranks call it; only
    the first must know the outputs."""
    # Later turns have prompts that follow from outputs.
    texts = [[(list(r.prompt_ids), r.output_ids) for r in side] for side in (expected, found)]
    known = all_gather_values(texts, list[list[tuple[list[int], list[int]]]], size)[0]
    ours, theirs = (
        [
            replace(request, prompt_ids=tuple(prompt), output_ids=output)
            for request, (prompt, output) in zip(side, side_texts, strict=True)
        ]
        for side, side_texts in zip((expected, found), known, strict=True)
    )
    asked = [pair for pair in zip(ours, theirs, strict=True) if is_asked_alike(*pair)]
    return check_outputs(name, [one for one, _ in asked], [other for _, other in asked], replays)


def is_asked_alike(expected: Request, found: Request) -> bool:
    """Whether both have the same prompt. A turn behind an answer that differs has another one, and
    then its answer shows nothing."""
    return expected.prompt_ids == found.prompt_ids


def combined(checks: Sequence[Checked]) -> Checked:
    """The check of several groups of the same requests together: that of the group that is worst,
    with the steps, tokens and judged differences of all, and the forwards of the first in which
    they are alarming, or else in which they were compared."""
    counts = [checked.num_differing for checked in checks]
    known = [count for count in counts if count is not None]
    found = [checked.correctness for checked in checks]
    worst = max(found, key=badness)
    compared = [correctness for correctness in found if correctness.forwards is not None]
    alarming = [correctness for correctness in compared if correctness.has_alarms]
    forwards = [correctness.forwards for correctness in (*alarming, *compared)]
    judged = [checked.judged_again for checked in found if checked.judged_again is not None]
    if worst.num_diverged is not None:
        worst = replace(
            worst,
            num_excused=sum(correctness.num_excused or 0 for correctness in found),
            num_diverged=sum(correctness.num_diverged or 0 for correctness in found),
        )
    correctness = replace(
        worst,
        num_tokens=sum(correctness.num_tokens or 0 for correctness in found),
        judged_again=JudgedAgain.sum_of(judged) if judged else None,
        forwards=next(iter(forwards), None),
    )
    return Checked(sum(known) if len(known) == len(counts) else None, correctness)


def badness(found: Correctness) -> tuple[int, bool, int, bool]:
    """Divergences are worse than a difference that was not judged, that is worse than ties, and
    they are worse than outputs that were not compared."""
    is_unjudged = found.identical is False and found.num_diverged is None
    is_uncompared = found.identical is None
    return found.num_diverged or 0, is_unjudged, found.num_excused or 0, is_uncompared
