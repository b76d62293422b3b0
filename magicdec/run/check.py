"""Did two ways of decoding emit the same tokens, and if not, was it a tie?

A difference is settled by replaying the whole row, both versions of it, in the next wider dtype:
every token that either emitted must be the wider model's choice to within the bound below. What is
beyond it is a divergence. Nothing is excused unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from magicdec.records.correctness import Correctness, Divergence
from magicdec.request import Request
from magicdec.runner import ModelRunner

WIDER = {"float32": "float64", "bfloat16": "float32"}
# How far below the wider model's largest logit an emitted token may lie: rounding of the narrower
# one, with room.
MARGIN_BOUND = {"float32": 1e-4, "bfloat16": 0.25}


@dataclass(frozen=True)
class Difference:
    """The first place where two outputs of one prompt part."""

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
    """Compare outputs prompt by prompt; `make_wider` builds the replaying runner, only if a
    difference needs it.

    Called by every rank of the group with the same requests.
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
    """How far from a greedy output of `wider` this is: see `deficit`; infinite if it does not end
    where its sampling parameters say, or has penalties, which the replay does not apply: between
    such outputs no difference is excused."""
    if not request.sampling.is_plain:
        return float("inf")
    output, ends = request.output_ids, request.sampling.ends
    ended = [n for n, token in enumerate(output, 1) if ends(n, token)]
    if ended != [len(output)]:
        return float("inf")
    return deficit(wider, request.prompt_ids, output, chunk)


@torch.inference_mode()
def deficit(runner: ModelRunner, prompt: Sequence[int], output: Sequence[int], chunk: int) -> float:
    """How far the emitted tokens fall short of `runner`'s greedy choices at worst: 0 if each is its
    largest logit."""
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
