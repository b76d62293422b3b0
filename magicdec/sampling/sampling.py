"""Chooses tokens with pure functions of logits and ids. Random numbers are arguments; `randomness`
makes them. `verification` judges drafts if the target samples.

If the target is greedy, drafts are judged here, as in the greedy case of Leviathan et al. 2023,
section 2.3: draft tokens are accepted up to the first that is not the target's own choice. The
target's next choice, a correction or a bonus, follows the accepted tokens. Sources of the filters:
Holtzman et al. 2020 (top_p), Nguyen et al. 2024 (min_p); of the repetition penalty: Keskar et al.
2019, section 4.1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from magicdec.config.sections import SamplingSection
from magicdec.distributed.groups import Group
from magicdec.request import SamplingParams
from magicdec.sampling.metadata import Filters, Penalties
from magicdec.sampling.randomness import derive_seed


def greedy(logits: Tensor, first_row: int, group: Group) -> Tensor:
    """The ids of the largest logits over a vocabulary that is sharded over ranks: [B, T, V] ->
    int64 [B, T], the same on every rank.

    `first_row` is the vocabulary id of this rank's first row. This takes one collective: values and
    ids are sent as pairs of float64, which hold both exactly. Among equal values the smaller id
    wins, as with argmax on one rank.
    """
    value, index = logits.max(dim=-1)
    if group.size == 1:
        return index
    pair = torch.stack([value.double(), (index + first_row).double()], dim=-1)  # [B, T, 2]
    values, ids = group.all_gather(pair).unbind(-1)  # [ranks, B, T] each
    best = values.max(dim=0, keepdim=True).values
    return torch.where(values == best, ids, float("inf")).min(dim=0).values.long()


def count_accepted(draft_ids: Tensor, target_ids: Tensor) -> Tensor:
    """How many leading draft ids [B, K] equal the target's choices [B, K+1] at the same positions:
    int64 [B]."""
    equal = draft_ids == target_ids[:, :-1]
    return equal.long().cumprod(dim=1).sum(dim=1)


def gather_vocab(logits: Tensor, places: Sequence[tuple[int, int]], group: Group) -> Tensor:
    """Gather the logits of a vocabulary that is sharded over ranks: [B, T, columns of this rank] ->
    [B, T, V] on every rank.

    `places` are the half-open ranges of ids of every rank's columns, in the order in which the
    group gathers (`Group.all_gather_range`). This takes one collective; every shard is padded to
    the widest.
    """
    if group.size == 1:
        return logits
    widest = max(last - first for first, last in places)
    padded = torch.nn.functional.pad(logits, (0, widest - logits.shape[-1]))
    shards = zip(places, group.all_gather(padded), strict=True)
    ordered = sorted(shards, key=lambda shard: shard[0])
    return torch.cat([columns[..., : last - first] for (first, last), columns in ordered], dim=-1)


def process(logits: Tensor, penalties: Penalties | None, drafts: Tensor | None = None) -> Tensor:
    """Apply the penalties of each row to its logits [B, T, V]: float32 [B, T, V]. The vocabulary of
    `penalties` may be larger than V.

    `drafts` [B, D] are the tokens proposed after the committed output. D + 1 positions follow that
    output, and the T positions of the logits are the last of these: T = D + 1 when a chain is
    verified, T = 1 when its next token is drafted. The history of a position is the prompt, the
    output and the drafts before it; drafts count as output. The repetition penalty comes first (as
    in transformers, it divides positive logits and multiplies negative ones), then the presence
    penalty (as in vLLM, it is subtracted once for each token).
    """
    logits = logits.float()
    if penalties is None:
        return logits
    x = logits[penalties.index]  # [R, T, V]
    _, num_positions, vocab_size = x.shape
    in_output = penalties.in_output[:, :vocab_size].unsqueeze(1)
    if drafts is not None:
        in_output = in_output | _drafted(drafts[penalties.index], num_positions, vocab_size)
    in_prompt = penalties.in_prompt[:, :vocab_size].unsqueeze(1)
    weakened = torch.where(x < 0, x * penalties.repetition, x / penalties.repetition)
    x = torch.where(in_prompt | in_output, weakened, x) - penalties.presence * in_output
    return logits.index_copy(0, penalties.index, x)


def probabilities(logits: Tensor, filters: Filters) -> Tensor:
    """The probabilities from which each position's token is sampled: logits [B, T, V] -> float64
    [B, T, V].

    The order is that of `generate` in transformers: temperature, top_k, top_p, min_p, each applied
    to the result of the one before. Tokens that are as likely as the last one kept are kept too, so
    the result does not depend on the order in which equal values are sorted. The likeliest token is
    always kept. A greedy row is one-hot at its largest logit; among equals, at the smallest id.
    """
    best = logits.argmax(dim=-1, keepdim=True)
    choice = torch.zeros_like(logits, dtype=torch.float64).scatter_(-1, best, 1.0)
    scores = logits.double()
    # The largest score is shifted to 0 first, so that it stays finite at any temperature.
    scores = (scores - scores.gather(-1, best)) / filters.temperature
    if filters.top is not None:
        scores = _keep_top(scores, *filters.top)
    probs = scores.softmax(dim=-1)
    if filters.min_p is not None:
        least = filters.min_p * probs.amax(dim=-1, keepdim=True)
        probs = torch.where(probs < least, 0.0, probs)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    return torch.where(filters.is_greedy, choice, probs)


def sample(probs: Tensor, u: Tensor) -> Tensor:
    """Sample by the inverse CDF: ids int64 [B] from probs float64 [B, V], which need not sum to 1,
    with random numbers u [B] in [0, 1).

    Chooses the first token, in order of ids, whose cumulative probability exceeds u. A token of
    probability 0 is never chosen, even if no sum exceeds u because of rounding. Each row must have
    a positive entry.
    """
    is_possible = probs > 0
    cumulative = probs.cumsum(dim=-1)
    is_past = is_possible & (cumulative > u.unsqueeze(-1) * cumulative[:, -1:])
    last = probs.shape[-1] - 1 - is_possible.flip(-1).long().argmax(dim=-1)
    return torch.where(is_past.any(dim=-1), is_past.long().argmax(dim=-1), last)


def make_params(
    section: SamplingSection, max_new_tokens: int, eos_token_ids: tuple[int, ...], request_id: int
) -> SamplingParams:
    """The sampling parameters of a request. Its seed is derived from the section's seed and from
    its id."""
    values = dataclasses.asdict(section)
    values["seed"] = derive_seed(section.seed, request_id)
    return SamplingParams(max_new_tokens, eos_token_ids, **values)


def _keep_top(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The scores, float64 [B, T, V], with -inf for the tokens that top_k and then top_p drop; both
    are [B, 1, 1]."""
    vocab_size = scores.shape[-1]
    ascending = scores.sort(dim=-1).values
    first = vocab_size - top_k.clamp(max=vocab_size)
    floor = ascending.gather(-1, first.expand(*scores.shape[:2], 1))
    ascending = torch.where(ascending < floor, -torch.inf, ascending)
    # A token is dropped if it and all less likely tokens together have at most 1 - top_p.
    held = ascending.softmax(dim=-1).cumsum(dim=-1)
    num_dropped = (held <= 1 - top_p).sum(-1, keepdim=True)
    floor = ascending.gather(-1, num_dropped.clamp(max=vocab_size - 1))
    return torch.where(scores < floor, -torch.inf, scores)


def _drafted(drafts: Tensor, num_positions: int, vocab_size: int) -> Tensor:
    """Which tokens of the drafts [R, D] come before a position, for each of the last
    T = `num_positions` of D + 1 positions: bool [R, T, V]."""
    num_rows, num_drafts = drafts.shape
    assert num_positions <= num_drafts + 1
    shape = (num_rows, num_drafts + 1, vocab_size)
    before = torch.zeros(shape, dtype=torch.bool, device=drafts.device)
    before[:, 1:].scatter_(2, drafts.unsqueeze(2), True)
    for place in range(1, num_drafts + 1):
        before[:, place] |= before[:, place - 1]
    return before[:, -num_positions:]
