"""Checks whether two ways of decoding emitted the same tokens, and excuses differences that the
rounding of this run explains (`rounding`). A sequence that differs is a tie only if:

1. no more sequences differ than this rounding explains;
2. every token of both versions is within the largest rounding error, `margin_bound`, of the wider
   model's largest logit, given the tokens before it;
3. the sequences that differ fall short of the wider model's choices at no more tokens than the
   baseline's versions of them.

A computation whose bits do not depend on the shape has no rounding, and excuses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Protocol

from torch import Tensor

from magicdec.bench.check.rounding import (
    Gaps,
    WiderView,
    chances_to_differ,
    is_by_chance,
    largest_error,
    most_by_chance,
    sequences_to_measure,
)
from magicdec.records.correctness import Correctness, Divergence
from magicdec.runner.request import Request


def differences(expected: Sequence[Request], found: Sequence[Request]) -> list[Divergence]:
    firsts: list[Divergence] = []
    for sequence, (ours, theirs) in enumerate(zip(expected, found, strict=True)):
        tokens = enumerate(zip_longest(ours.output_ids, theirs.output_ids))
        firsts += [Divergence(sequence, index, a, b) for index, (a, b) in tokens if a != b][:1]
    return firsts


def uncompared(requests: Sequence[Request]) -> Correctness:
    return Correctness(num_tokens=sum(len(r.output_ids) for r in requests))


def identical(reference: str, requests: Sequence[Request]) -> Correctness:
    result = uncompared(requests)
    return replace(result, reference=reference, identical=True, num_excused=0, num_diverged=0)


class Replays(Protocol):
    """The means to judge differences, used only if there are any. Every rank calls them alike."""

    def gaps(self, requests: Sequence[Request]) -> list[Gaps]:
        """The gaps of the reference's outputs, in the shapes of both passes."""

    def views(self, requests: Sequence[Request], pairs: Sequence[Tensor | None]) -> list[WiderView]:
        """The wider model's views of outputs; `pairs` as in `view_of`."""


def check_outputs(
    reference: str, expected: Sequence[Request], found: Sequence[Request], replays: Replays
) -> Correctness:
    """Compares outputs prompt by prompt. Every rank of the group calls this with the same requests.
    Differences cost one more prefill and baseline pass (`Replays.gaps`), and two prefills in the
    wider dtype (`view_of`) for each such sequence, or only for the first if more differ than
    rounding explains. A few equal sequences are replayed too where errors would be measured over
    few tokens."""
    differing = differences(expected, found)
    if not differing:
        return identical(reference, found)
    gaps = replays.gaps(expected)
    chances = chances_to_differ(gaps)
    most = most_by_chance(chances)
    judged = differing if len(differing) <= most else differing[:1]
    measured = sequences_to_measure([d.sequence for d in judged], expected)
    all_views = replays.views(
        [*(expected[i] for i in measured), *(found[d.sequence] for d in judged)],
        [*(gaps[i].pairs for i in measured), *[None] * len(judged)],
    )
    own_views = all_views[: len(measured)]
    views = all_views[len(measured) :]
    bound = largest_error([gaps[i] for i in measured], own_views)
    own_views = own_views[: len(judged)]
    margins = [
        max(margin(expected[d.sequence], ours), margin(found[d.sequence], theirs))
        for d, ours, theirs in zip(judged, own_views, views, strict=True)
    ]
    num_short = [sum(int((v.shortfalls > 0).sum()) for v in side) for side in (own_views, views)]
    diverged = [i for i, value in enumerate(margins) if not value <= bound]
    is_excusable = len(differing) <= most and is_by_chance(*num_short)
    num_diverged = len(diverged) if is_excusable else len(differing)
    worst = diverged[0] if diverged else 0
    value = margins[worst]
    return replace(
        uncompared(found),
        reference=reference,
        identical=False,
        first_divergence=replace(judged[worst], margin=None if math.isinf(value) else value),
        num_excused=len(differing) - num_diverged,
        num_diverged=num_diverged,
        margin_bound=bound,
        expected_differing=sum(chances),
        most_differing=most,
        num_short=num_short[1],
        num_short_reference=num_short[0],
    )


def margin(request: Request, view: WiderView) -> float:
    """The largest shortfall, in logits, of an output from a greedy one of the wider model. It is
    infinite if the output does not end where its sampling parameters say, and with penalties, which
    the replay does not apply."""
    if not request.sampling.is_plain:
        return math.inf
    output = request.output_ids
    ends = request.sampling.ends
    ended = [n for n, token in enumerate(output, 1) if ends(n, token)]
    return float(view.shortfalls.max()) if ended == [len(output)] else math.inf
