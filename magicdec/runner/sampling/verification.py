"""Judges drafts: pure functions of ids and probabilities.

Greedy (Leviathan et al. 2023, section 2.3): draft tokens are accepted up to the first that is not
the target's own choice. The target's next choice, a correction or a bonus, follows them.

Sampled (Leviathan et al. 2023, algorithm 1 and appendix A.1; Chen et al. 2023, "Accelerating large
language model decoding with speculative sampling", algorithm 2 and theorem 1): the output has
exactly the target's distribution. A draft token x is accepted with probability min(1, p(x)/q(x)).
At the first rejection, the token is sampled from norm(max(0, p - q)) instead. If all K drafts are
accepted, one more token is sampled from p. Greedy rows in the same batch need no special case:
their p is one-hot, so p(x) is 1 or 0.

Shapes: B rows, K drafts, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from magicdec.runner.sampling.sampling import sample


def count_accepted(draft_ids: Tensor, target_ids: Tensor, counts: Tensor | None = None) -> Tensor:
    """How many leading draft ids [B, K], of which the first `counts` [B] are drafts, equal the
    target's choices [B, K+1] at the same positions: int64 [B]."""
    return _leading(draft_ids == target_ids[:, :-1], counts)


def _leading(is_kept: Tensor, counts: Tensor | None) -> Tensor:
    """How many drafts of each row [B, K] stand before the first that is not kept. With `counts`, a
    row has so many drafts, and padding behind them."""
    leading = is_kept.long().cumprod(dim=1).sum(dim=1)
    return leading if counts is None else leading.minimum(counts)


def verify(
    draft_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    u_accept: Tensor,
    u_resample: Tensor,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (accepted [B], next_ids [B]), both int64: how many leading drafts are accepted, and
    the token after them.

    draft_ids [B, K] are the drafts; with `counts` [B], only so many first ones of each row are.
    draft_probs, float64 [B, K, V], are the probabilities q from which they were sampled; None if
    they were not sampled (then q is one-hot). target_probs, float64 [B, K+1, V], are the target's
    probabilities p at each position, given the drafts before it. u_accept [B, K] and u_resample
    [B, K+1] are independent uniform random numbers.
    """
    gamma = draft_ids.shape[1]
    p = target_probs[:, :gamma].gather(2, draft_ids.unsqueeze(2)).squeeze(2)  # [B, K]
    if draft_probs is None:
        is_kept = u_accept < p
    else:
        # This is u < p / q without the division. A token with p = 0 is never accepted.
        is_kept = u_accept * draft_probs.gather(2, draft_ids.unsqueeze(2)).squeeze(2) < p
    accepted = _leading(is_kept, counts)
    following = residual(draft_ids, draft_probs, target_probs, accepted, counts)
    u = u_resample.gather(1, accepted.unsqueeze(1)).squeeze(1)
    return accepted, sample(following, u)


def residual(
    draft_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    accepted: Tensor,
    counts: Tensor | None = None,
) -> Tensor:
    """The distribution from which the token after `accepted` [B] drafts is sampled, [B, V]: what
    remains of p at the rejected position, and p itself if every draft was accepted."""
    num_rows, gamma = draft_ids.shape
    rows = torch.arange(num_rows, device=draft_ids.device)
    p = target_probs[rows, accepted]  # [B, V]
    if gamma == 0:
        return p
    place = accepted.clamp(max=gamma - 1)
    if draft_probs is None:
        q = torch.zeros_like(p).scatter_(1, draft_ids[rows, place].unsqueeze(1), 1.0)
    else:
        q = draft_probs[rows, place]
    is_rejection = accepted < (gamma if counts is None else counts)
    return torch.where(is_rejection.unsqueeze(1), remaining(p, q), p)


@dataclass(frozen=True)
class Judgement:
    """A row that accepts n drafts emits the first n + 1 of its ids."""

    accepted: Tensor  # int64 [B]
    ids: Tensor  # int64 [B, 1 + most drafts that can be accepted]

    @classmethod
    def of(cls, draft_ids: Tensor, accepted: Tensor, following: Tensor) -> Judgement:
        """Of rows that accept the first `accepted` [B] of their drafts [B, K], which the token
        `following` [B] follows."""
        following = following.unsqueeze(1)
        ids = torch.cat([draft_ids, following], dim=1)
        return cls(accepted, ids.scatter(1, accepted.unsqueeze(1), following))


def remaining(p: Tensor, drawn_from: Tensor) -> Tensor:
    """What the target's distribution p [B, V] becomes when a token that was drawn from another
    distribution is rejected: norm(max(0, p - q)). If no entry of p - q is positive, then both are
    equal up to rounding, and p is kept."""
    rest = (p - drawn_from).clamp(min=0)
    total = rest.sum(dim=1, keepdim=True)
    return torch.where(total > 0, rest / total, p)
