"""Checks whether two ways of decoding emitted the same tokens and, if they did not, whether the
difference is a tie.

To decide this, both versions of the sequence are replayed as a whole in the next wider dtype. The
difference is a tie if every token of both versions is the greedy choice of the wider model, or its
logit is lower than that of the choice by at most MARGIN_BOUND. Otherwise it is a divergence. No
difference is excused without this replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from magicdec.records.correctness import Correctness, Divergence
from magicdec.request import Request
from magicdec.runner import ModelRunner

WIDER = {"float32": "float64", "bfloat16": "float32"}
# By how much the logit of an emitted token may be lower than the largest logit of the wider model.
# This is the rounding error of the narrower dtype, with a safety margin.
MARGIN_BOUND = {"float32": 1e-4, "bfloat16": 0.25}


@dataclass(frozen=True)
class Difference:
    """The first position at which two outputs of one prompt differ."""

    sequence: int
    index: int
    expected: int | None
    found: int | None


def first_difference(
    sequence: int, expected: Sequence[int], found: Sequence[int]
) -> Difference | None:
    for i in range(max(len(expected), len(found))):
        a = expected[i] if i < len(expected) else None
        b = found[i] if i < len(found) else None
        if a != b:
            return Difference(sequence, i, a, b)
    return None


def check_outputs(
    reference: str,
    expected: Sequence[Request],
    found: Sequence[Request],
    dtype: str,
    make_wider: Callable[[], ModelRunner],
    chunk: int,
) -> Correctness:
    """Compare the outputs prompt by prompt. `make_wider` makes the runner for the replay; it is
    called only if there is a difference.

    Every rank of the group must call this with the same requests.
    """
    differences = [
        d
        for i, (a, b) in enumerate(zip(expected, found, strict=True))
        if (d := first_difference(i, a.output_ids, b.output_ids)) is not None
    ]
    num_tokens = sum(len(r.output_ids) for r in found)
    if not differences:
        return Correctness(reference, True, num_tokens, None, 0, 0, MARGIN_BOUND[dtype])
    wider = make_wider()
    margins = [
        max(margin(wider, request, chunk) for request in (expected[d.sequence], found[d.sequence]))
        for d in differences
    ]
    bound = MARGIN_BOUND[dtype]
    diverged = [i for i, value in enumerate(margins) if value > bound]
    at = diverged[0] if diverged else 0
    d, value = differences[at], margins[at]
    shown = Divergence(
        d.sequence, d.index, d.expected, d.found, None if value == float("inf") else value
    )
    return Correctness(
        reference,
        identical=False,
        num_tokens=num_tokens,
        first_divergence=shown,
        num_excused=len(differences) - len(diverged),
        num_diverged=len(diverged),
        margin_bound=bound,
    )


def margin(wider: ModelRunner, request: Request, chunk: int) -> float:
    """How far the output of `request` is from a greedy output of `wider`, in logits (see
    `deficit`). It is infinite if the output does not end where its sampling parameters say. It is
    also infinite with penalties, because the replay does not apply them; a difference between such
    outputs is therefore never excused."""
    if not request.sampling.is_plain:
        return float("inf")
    output, ends = request.output_ids, request.sampling.ends
    ended = [n for n, token in enumerate(output, 1) if ends(n, token)]
    if ended != [len(output)]:
        return float("inf")
    return deficit(wider, request.prompt_ids, output, chunk)


@torch.inference_mode()
def deficit(runner: ModelRunner, prompt: Sequence[int], output: Sequence[int], chunk: int) -> float:
    """The largest difference, over the emitted tokens, between `runner`'s largest logit and the
    logit of the token. It is 0 if every token has the largest logit."""
    cache, group = runner.cache, runner.group
    cache.release(0)
    cache.allocate(0, runner.max_tokens)
    ids = torch.tensor([[*prompt, *output[:-1]]], device=runner.device)
    emitted = torch.tensor([*([-1] * (len(prompt) - 1)), *output], device=runner.device)
    worst, at = 0.0, 0
    for part in ids.split(chunk, dim=1):
        logits = runner.forward(part, [0])[0]  # [T, V]
        wanted = emitted[at : at + part.shape[1]]
        at += part.shape[1]
        local = wanted - runner.model.head_rows[0]
        ours = (local >= 0) & (local < logits.shape[1])
        value = logits.gather(1, local.clamp(0, logits.shape[1] - 1).unsqueeze(1)).squeeze(1)
        value = value.masked_fill(~ours, float("-inf"))
        best, value = group.all_gather(torch.stack([logits.max(1).values, value])).amax(0).unbind(0)
        short = (best - value)[wanted >= 0].nan_to_num(nan=float("inf"))
        worst = max([worst, *short.tolist()])
    return worst
