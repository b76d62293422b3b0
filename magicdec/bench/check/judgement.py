"""The first part of the verdict: steps are judged again, exactly, from their own logits in plain
torch, independently of the decoding.

A greedy step is right if it has emitted the largest logit after the newest token, then after each
draft that equals the one before, and no more; and if requests end exactly where end tokens and
lengths say.

Shapes: R rows, K drafts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from magicdec.records.correctness import JudgedAgain, Misjudged
from magicdec.runner.model_runner import ModelRunner, gather_vocab
from magicdec.runner.request import Request
from magicdec.speculation.steps.logits_recorder import KeptStep, LogitsRecorder


@dataclass(frozen=True)
class Walk:
    """The tokens that a row should have emitted: token n after its first n drafts."""

    row: int  # among the rows of the step
    tokens: list[int]


@torch.inference_mode()
def judge_again(
    recorder: LogitsRecorder, requests: Sequence[Request], runner: ModelRunner
) -> JudgedAgain:
    """Judges the steps that `recorder` has kept. `requests`, all of the pass, have ended. Every
    rank of the group calls this."""
    wrong = list[Misjudged]()
    num_tokens = 0
    for step in recorder.steps:
        for walk in walks(step, runner):
            num_tokens += len(walk.tokens)
            wrong += first_wrong(step, walk)
    wrong += [ending for request in requests for ending in ends_elsewhere(request)]
    return JudgedAgain(
        num_steps=len(recorder.steps),
        num_steps_of_all=recorder.num_seen,
        num_tokens=num_tokens,
        num_wrong=len(wrong),
        first_wrong=wrong[0] if wrong else None,
    )


def walks(step: KeptStep, runner: ModelRunner) -> Iterator[Walk]:
    logits = gather_vocab(step.logits, runner.vocab_places, runner.group)
    best = logits.argmax(dim=-1).tolist()
    drafts = step.drafts.tolist()
    for row, request in enumerate(step.requests):
        text = request.output_ids[: step.num_output[row]]
        count = step.counts[row]
        tokens = list[int]()
        for place in range(1 + count):
            token = best[row][place]
            if request.sampling.has_penalties:
                token = best_after(logits[row, place], request, [*text, *tokens])
            tokens.append(token)
            if place < count and drafts[row][place] != token:
                break
        yield Walk(row, tokens)


def best_after(logits: Tensor, request: Request, output: Sequence[int]) -> int:
    """The largest of logits [V] after a request's penalties for its prompt and this output."""
    scores = logits.float()
    sampling = request.sampling
    size = len(logits)
    out = torch.zeros(size, dtype=torch.bool)
    out[[token for token in output if token < size]] = True
    seen = out.clone()
    seen[[token for token in request.distinct_prompt_ids if token < size]] = True
    out = out.to(logits.device)
    seen = seen.to(logits.device)
    penalty = sampling.repetition_penalty
    weakened = torch.where(scores < 0, scores * penalty, scores / penalty)
    scores = torch.where(seen, weakened, scores) - sampling.presence_penalty * out
    return int(scores.argmax())


def first_wrong(step: KeptStep, walk: Walk) -> list[Misjudged]:
    """The first wrong token of a row, in the step's decision or in the request's output, if any."""
    request = step.requests[walk.row]
    before = step.num_output[walk.row]
    decided = step.verdicts.ids[walk.row][: 1 + step.verdicts.accepted[walk.row]]
    got = request.output_ids[before : before + len(walk.tokens)]
    should = walk.tokens[: len(got)]
    is_right = decided == walk.tokens and got == should
    is_right &= len(got) == len(walk.tokens) or request.sampling.ends(before + len(got), got[-1])
    if is_right:
        return []
    found = decided if decided != walk.tokens else got
    index = next(
        (i for i, pair in enumerate(zip(walk.tokens, found, strict=False)) if len(set(pair)) > 1),
        min(len(walk.tokens), len(found)),
    )
    expected_id, found_id = (
        ids[index] if index < len(ids) else None for ids in (walk.tokens, found)
    )
    return [Misjudged(request.request_id, before + index, expected_id, found_id)]


def ends_elsewhere(request: Request) -> list[Misjudged]:
    """The place where a request should have ended, if it has not."""
    output = request.output_ids
    ends = request.sampling.ends
    ended = [count for count, token in enumerate(output, 1) if ends(count, token)]
    if ended == [len(output)]:
        return []
    index = ended[0] if ended else len(output)
    return [Misjudged(request.request_id, index, None, output[index] if ended else None)]
