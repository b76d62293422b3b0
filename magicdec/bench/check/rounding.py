"""Rounding: the difference between two computations of the same logits in this run, measured by
replaying known outputs, and its predictions for the outputs of two passes.

A *gap* is the difference between the logits of a position's two best tokens. Shapes: B requests of
a batch, N output tokens after the first, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from magicdec.bench.check.forced import gap
from magicdec.kv.cache import upload
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.runner.model_runner import ModelRunner, gather_vocab
from magicdec.runner.prefill import prefill
from magicdec.runner.request import Request
from magicdec.runner.step_plan import PrefillChunk

CONFIDENCE = 0.999  # of both limits on how often rounding changes a token
TAIL = 5.0  # no rounding error is taken to exceed so many times the root of the mean square
MIN_TOKENS = 256  # errors are measured over at least so many tokens, if the run has them


@dataclass(frozen=True)
class Gaps:
    """The gaps of an output by the run's own model in both shapes of a run."""

    pairs: Tensor  # int64 [N, 2]: the two best tokens of the decode step, the best one first
    decode: Tensor  # float64 [N]: their gap if each step computes one token; never negative
    verify: Tensor  # float64 [N]: their gap in a verification; negative if the order changed


@dataclass(frozen=True)
class WiderView:
    """The wider model's view of an output."""

    shortfalls: Tensor  # float64 [N + 1]: its largest logit minus the logit of the emitted token
    gaps: Tensor  # float64 [N]: its gaps between the pairs that it was asked about, if any


@torch.inference_mode()
def measure_gaps(
    runner: ModelRunner, requests: Sequence[Request], gamma: int, prefill_chunk: int
) -> list[Gaps]:
    """The gaps of outputs that `runner` decoded in this order, in batches of its rows. It costs
    about one more prefill and baseline pass. Every rank of the group calls this with the same
    requests."""
    gaps = []
    for first in range(0, len(requests), runner.num_rows):
        batch = [
            replace(r, row=row) for row, r in enumerate(requests[first : first + runner.num_rows])
        ]
        for row in range(runner.num_rows):
            runner.release(row)
            runner.allocate(row)
        prefill(
            runner, PrefillChunk.whole([replace(r, output_ids=[]) for r in batch]), prefill_chunk
        )
        inputs = [r.output_ids[:-1] for r in batch]
        longest = max(map(len, inputs))
        ids = upload([row + [0] * (longest - len(row)) for row in inputs], runner.device)
        pairs, decode = _replay(runner, ids, 1)
        runner.truncate(range(len(batch)), [len(r.prompt_ids) for r in batch])
        _, verify = _replay(runner, ids, gamma + 1, pairs)
        gaps += [
            Gaps(pairs[i, :n], decode[i, :n], verify[i, :n]) for i, n in enumerate(map(len, inputs))
        ]
    return gaps


def _replay(
    runner: ModelRunner, ids: Tensor, step: int, pairs: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Appends ids [B, N] to the first B rows, `step` tokens a forward, padded. Returns pairs [B, N,
    2], by default the two best tokens of each position, and their gaps [B, N]."""
    rows = range(len(ids))
    chosen = []
    gaps = []
    for at in range(0, ids.shape[1], step):
        part = ids[:, at : at + step]
        logits = runner.forward(ForwardBatch(pad(part, (0, step - part.shape[1])), rows))[
            :, : part.shape[1]
        ]
        whole = gather_vocab(logits, runner.vocab_places, runner.group)
        chosen.append(whole.topk(2).indices if pairs is None else pairs[:, at : at + step])
        gaps.append(gap(whole, chosen[-1]))
    if not gaps:
        return ids.new_zeros(len(ids), 0, 2), ids.new_zeros(len(ids), 0, dtype=torch.float64)
    return torch.cat(chosen, dim=1), torch.cat(gaps, dim=1)


@torch.inference_mode()
def view_of(
    wider: ModelRunner, request: Request, prefill_chunk: int, pairs: Tensor | None = None
) -> WiderView:
    """Replays one request, prompt and output, through the wider model, at the cost of a prefill.
    `pairs` [N, 2] are tokens whose gaps are wanted. The shortfall of a NaN is infinite. Every rank
    of the group calls this."""
    output = request.output_ids
    wider.release(0)
    wider.allocate(0)
    ids = upload([[*request.prompt_ids, *output[:-1]]], wider.device)
    emitted = upload(output, wider.device)
    at = 1 - len(request.prompt_ids)
    shortfalls = []
    gaps = []
    for part in ids.split(prefill_chunk, dim=1):
        logits = wider.forward(ForwardBatch(part, [0]))
        # the outputs that this chunk predicts
        first = max(at, 0)
        last = at + part.shape[1]
        if last > 0:
            whole = gather_vocab(logits[:, first - at :], wider.vocab_places, wider.group)[0]
            chosen = whole.gather(1, emitted[first:last].unsqueeze(1)).squeeze(1)
            shortfalls.append((whole.amax(1) - chosen).double().nan_to_num(nan=math.inf))
            if pairs is not None:
                begin = max(first, 1)  # the first token has no pair
                gaps.append(gap(whole[begin - first :], pairs[begin - 1 : last - 1]))
        at = last
    return WiderView(torch.cat(shortfalls), torch.cat(gaps or [shortfalls[0][:0]]))


def sequences_to_measure(differing: Sequence[int], requests: Sequence[Request]) -> list[int]:
    """The sequences that differ, and others until MIN_TOKENS tokens are reached."""
    chosen = list(differing)
    for i in range(len(requests)):
        if sum(len(requests[j].output_ids) for j in chosen) >= MIN_TOKENS:
            break
        if i not in differing:
            chosen.append(i)
    return chosen


def chances_to_differ(gaps: Sequence[Gaps]) -> list[float]:
    """For each output, the probability that rounding alone changes a token in a pass of the other
    shape.

    A token changes if its gap moves by more than its size, to the smaller side; and in half of the
    moves of just that size, as the smaller id wins among equal logits. Moves come from all
    positions, in either direction alike.
    """
    moves = torch.cat([(g.verify - g.decode).abs() for g in gaps]).sort().values
    return [1 - (1 - changes(moves, g.decode)).prod().item() for g in gaps]


def changes(moves: Tensor, gaps: Tensor) -> Tensor:
    """For gaps [N] between two tokens, the probability [N] that a move, of a size in the sorted
    `moves` [M] and to either side alike, changes the larger one."""
    if len(moves) == 0:
        return torch.zeros_like(gaps)
    smallest = torch.finfo(moves.dtype).tiny
    larger = len(moves) - torch.searchsorted(moves, gaps, right=True)
    as_large = len(moves) - torch.searchsorted(moves, gaps.clamp(min=smallest))
    return (larger + as_large) / (4 * len(moves))


def most_by_chance(chances: Sequence[float], confidence: float = CONFIDENCE) -> int:
    """The number of independent events that is exceeded with a probability of at most 1 -
    `confidence`."""
    probabilities = np.ones(1)  # the probability of each number of events
    for chance in chances:
        probabilities = np.convolve(probabilities, [1 - chance, chance])
    return min(len(chances), int(np.searchsorted(probabilities.cumsum(), confidence)))


def is_by_chance(expected: int, found: int) -> bool:
    """Whether the count `found` may exceed `expected` by chance: the one-sided sign test at
    CONFIDENCE."""
    total = expected + found
    as_many = sum(math.comb(total, count) for count in range(found, total + 1))
    return as_many > (1 - CONFIDENCE) * 2**total


def largest_error(gaps: Sequence[Gaps], wider: Sequence[WiderView]) -> float:
    """The largest error, in logits, that rounding makes in a gap of the run's own model: TAIL times
    the root mean square error against the wider model.

    Only the quarter of positions with the smallest gaps counts: elsewhere rounding changes no
    token, and errors grow with the logits. The shape with smaller errors counts, so that a wrong
    kernel of one shape does not excuse itself.
    """
    true = torch.cat([view.gaps for view in wider])
    if len(true) == 0:
        return 0.0
    is_near = true.abs() <= true.abs().quantile(0.25)
    shapes = [torch.cat([g.decode for g in gaps]), torch.cat([g.verify for g in gaps])]
    return TAIL * min((gap - true)[is_near].square().mean().sqrt().item() for gap in shapes)
