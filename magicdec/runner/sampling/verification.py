"""Verification of drafts: pure functions of ids and probabilities.

Greedy (Leviathan et al., arXiv 2211.17192, section 2.3): drafts are accepted up to the first that
is not the target's choice, which follows. Sampled (ibid., algorithm 1 and appendix A.1; Chen et
al., arXiv 2302.01318, algorithm 2 and theorem 1): draft x is accepted with probability min(1,
p(x)/q(x)); after the first rejection a token is sampled from norm(max(0, p - q)), after K accepted
drafts from p. The output has exactly the target's distribution. Greedy rows have a one-hot p.

Shapes: B rows, K drafts, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from magicdec.runner.sampling.sampling import sample


def count_accepted(draft_ids: Tensor, target_ids: Tensor, counts: Tensor | None = None) -> Tensor:
    """The number of leading draft ids [B, K], of which `counts` [B] are real, that equal the
    target's [B, K+1]: int64 [B]."""
    return leading(draft_ids == target_ids[:, :-1], counts)


def leading(is_kept: Tensor, counts: Tensor | None) -> Tensor:
    """The number of kept drafts [B, K] before the first rejected one, at most `counts`."""
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
    """(accepted [B], next_ids [B]), int64: the number of accepted leading drafts, and the token
    after them.

    draft_ids [B, K], of which `counts` [B] are real. draft_probs float64 [B, K, V]: their
    distributions q, None if one-hot. target_probs float64 [B, K+1, V]: p at each position, given
    the drafts before. u_accept [B, K] and u_resample [B, K+1] are independent and uniform."""
    gamma = draft_ids.shape[1]
    p = target_probs[:, :gamma].gather(2, draft_ids.unsqueeze(2)).squeeze(2)  # [B, K]
    if draft_probs is None:
        is_kept = u_accept < p
    else:
        # This is u < p / q without the division. A token with p = 0 is never accepted.
        is_kept = u_accept * draft_probs.gather(2, draft_ids.unsqueeze(2)).squeeze(2) < p
    accepted = leading(is_kept, counts)
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
    """The distribution [B, V] of the token after `accepted` [B] drafts: the rest of p at a
    rejection, else p."""
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
    """A verdict by row: n accepted drafts, of whose ids the first n + 1 are emitted."""

    accepted: Tensor  # int64 [B]
    ids: Tensor  # int64 [B, 1 + most drafts that can be accepted]

    @classmethod
    def of(cls, draft_ids: Tensor, accepted: Tensor, following: Tensor) -> Judgement:
        """The verdict of `accepted` [B] of drafts [B, K], then token `following` [B]."""
        following = following.unsqueeze(1)
        ids = torch.cat([draft_ids, following], dim=1)
        return cls(accepted, ids.scatter(1, accepted.unsqueeze(1), following))


def remaining(p: Tensor, drawn_from: Tensor) -> Tensor:
    """norm(max(0, p - q)) for p [B, V] and q = `drawn_from`; p itself where both are equal up to
    rounding."""
    rest = (p - drawn_from).clamp(min=0)
    total = rest.sum(dim=1, keepdim=True)
    return torch.where(total > 0, rest / total, p)
