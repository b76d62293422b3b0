"""Sampling as pure functions of whole logits: penalties, filters, and the draw of a token.

top_k and top_p are one operator (`keep_top`), which hides from capture a loop that avoids sorting
the vocabulary on a CPU. On CUDA, where the host must not wait for a value, it sorts.

Sources: Holtzman et al. 2020 (top_p), Nguyen et al. 2024 (min_p), Keskar et al. 2019, section 4.1
(repetition penalty).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from magicdec.config.sections import SamplingSection
from magicdec.runner.request import SamplingParams
from magicdec.runner.sampling.metadata import Filters, Penalties
from magicdec.runner.sampling.randomness import derive_seed

# Tokens that are looked at first, and how many times more then: often they have all that is kept.
FIRST = 256
GROWTH = 16


def keep_top(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Scores float64 [B, T, V], -inf where top_k and then top_p (both [B, 1, 1]) drop a token.
    The largest score must be 0. Off: top_k >= V, top_p = 1."""
    filtered: Tensor = torch.ops.magicdec.keep_top(scores, top_k, top_p)
    return filtered


def by_selection(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`keep_top` by the likeliest tokens, and more until all kept ones are among them."""
    vocab_size = scores.shape[-1]
    weights = scores.exp()
    has_top_k = top_k < vocab_size
    has_top_p = top_p < 1
    count = FIRST
    while True:
        is_all = GROWTH * count > vocab_size
        count = vocab_size if is_all else count
        best = scores.sort(dim=-1, descending=True).values if is_all else scores.topk(count).values
        last_kept = (top_k.clamp(max=count) - 1).expand(*scores.shape[:2], 1)
        floor = torch.where(has_top_k, best.gather(-1, last_kept), -torch.inf)
        total = torch.where(scores < floor, 0.0, weights).sum(dim=-1, keepdim=True)
        shares = torch.where(best < floor, 0.0, best.exp() / total)
        cumulative = shares.cumsum(dim=-1)
        is_enough = (~has_top_k | (top_k <= count)) & (~has_top_p | (cumulative[..., -1:] >= top_p))
        if is_all or bool(is_enough.all()):
            break
        count *= GROWTH
    # A token is kept if those that are likelier have less than top_p together.
    num_kept = (cumulative - shares < top_p).sum(dim=-1, keepdim=True)
    # Scores that are NaN keep no token, and are noted elsewhere (`SamplingMetadata.note`).
    last_kept = (num_kept - 1).clamp(min=0)
    top_p_floor = torch.where(has_top_p, best.gather(-1, last_kept), -torch.inf)
    return torch.where(scores < torch.maximum(floor, top_p_floor), -torch.inf, scores)


def by_sorting(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`keep_top` by a full sort, without decisions on the host."""
    vocab_size = scores.shape[-1]
    ascending = scores.sort(dim=-1).values
    first = vocab_size - top_k.clamp(max=vocab_size)
    floor = ascending.gather(-1, first.expand(*scores.shape[:2], 1))
    ascending = torch.where(ascending < floor, -torch.inf, ascending)
    # A token is dropped if it and all less likely tokens together have at most 1 - top_p.
    cumulative = ascending.softmax(dim=-1).cumsum(dim=-1)
    num_dropped = (cumulative <= 1 - top_p).sum(-1, keepdim=True)
    floor = ascending.gather(-1, num_dropped.clamp(max=vocab_size - 1))
    return torch.where(scores < floor, -torch.inf, scores)


_library = torch.library.Library("magicdec", "FRAGMENT")
_library.define("keep_top(Tensor scores, Tensor top_k, Tensor top_p) -> Tensor")
_library.impl("keep_top", by_selection, "CPU")
_library.impl("keep_top", by_sorting, "CUDA")


@torch.library.register_fake("magicdec::keep_top")
def _fake(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    return torch.empty_like(scores)


def process(logits: Tensor, penalties: Penalties | None, drafts: Tensor | None = None) -> Tensor:
    """Apply penalties to logits [B, T, V]: float32. Their vocabulary may exceed V.

    `drafts` [B, D] follow the committed output; the T positions are the last of the D + 1 after
    it. Drafts before a position count as output. First the repetition penalty (as in
    transformers, it divides positive logits and multiplies negative ones), then the presence
    penalty (as in vLLM, subtracted once a token)."""
    logits = logits.float()
    if penalties is None:
        return logits
    x = logits[penalties.index]  # [R, T, V]
    _, num_positions, vocab_size = x.shape
    in_output = penalties.in_output[:, :vocab_size].unsqueeze(1)
    if drafts is not None:
        before = _drafts_before(drafts, num_positions)
        in_output = in_output | _drafted(drafts[penalties.index], before, vocab_size)
    in_prompt = penalties.in_prompt[:, :vocab_size].unsqueeze(1)
    weakened = torch.where(x < 0, x * penalties.repetition, x / penalties.repetition)
    x = torch.where(in_prompt | in_output, weakened, x) - penalties.presence * in_output
    return logits.index_copy(0, penalties.index, x)


def probabilities(logits: Tensor, filters: Filters) -> Tensor:
    """Sampling probabilities of logits [B, T, V]: float64 [B, T, V].

    The order is that of `generate` in transformers: temperature, top_k, top_p, min_p, one after
    the other. Ties with the last kept token are kept, so that sorting order does not matter; the
    likeliest token always is. A greedy row is one-hot at its largest logit with the smallest id."""
    best = logits.argmax(dim=-1, keepdim=True)
    choice = torch.zeros_like(logits, dtype=torch.float64).scatter_(-1, best, 1.0)
    scores = logits.double()
    # The largest score is shifted to 0 first, so that it stays finite at any temperature.
    scores = (scores - scores.gather(-1, best)) / filters.temperature
    if filters.top is not None:
        scores = keep_top(scores, *filters.top)
    probs = scores.softmax(dim=-1)
    if filters.min_p is not None:
        least = filters.min_p * probs.amax(dim=-1, keepdim=True)
        probs = torch.where(probs < least, 0.0, probs)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    return torch.where(filters.is_greedy, choice, probs)


def sample(probs: Tensor, u: Tensor) -> Tensor:
    """Sample by the inverse CDF: ids int64 [B] from unnormalized probs float64 [B, V] with u [B]
    in [0, 1).

    It takes the first id whose cumulative probability exceeds u, never one of probability 0,
    even under rounding. Rows need a positive entry."""
    is_possible = probs > 0
    cumulative = probs.cumsum(dim=-1)
    is_past = is_possible & (cumulative > u.unsqueeze(-1) * cumulative[:, -1:])
    last = probs.shape[-1] - 1 - is_possible.flip(-1).long().argmax(dim=-1)
    return torch.where(is_past.any(dim=-1), is_past.long().argmax(dim=-1), last)


def make_params(
    section: SamplingSection,
    max_new_tokens: int,
    eos_token_ids: tuple[int, ...],
    request_id: int,
    is_coupled: bool = False,
) -> SamplingParams:
    """The sampling parameters of a request, with a seed derived from the section's and its id."""
    values = dataclasses.asdict(section)
    values["seed"] = derive_seed(section.seed, request_id)
    return SamplingParams(max_new_tokens, eos_token_ids, is_coupled=is_coupled, **values)


def _drafts_before(drafts: Tensor, num_positions: int) -> Tensor:
    """Which drafts [B, D] come before each of the last positions of D + 1: bool [T, D]."""
    gamma = drafts.shape[1]
    assert num_positions <= gamma + 1
    shape = (gamma + 1, gamma)
    before = torch.ones(shape, dtype=torch.bool, device=drafts.device).tril(-1)
    return before[-num_positions:]


def _drafted(drafts: Tensor, is_before: Tensor, vocab_size: int) -> Tensor:
    """Which tokens of drafts [R, D] come before each position: bool [R, T, V]."""
    shape = (len(drafts), drafts.shape[1], vocab_size)
    tokens = torch.zeros(shape, device=drafts.device).scatter_(2, drafts.unsqueeze(2), 1.0)
    return is_before.float() @ tokens > 0
