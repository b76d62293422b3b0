"""Judging sampled drafts so that the target's distribution is kept: pure functions.

Source: Leviathan et al. 2023, algorithm 1 and appendix A.1; Chen et al. 2023 ("Accelerating large
language model decoding with speculative sampling"), algorithm 2 and theorem 1. A draft token x is
accepted with min(1, p(x)/q(x)); at the first rejection the token comes from norm(max(0, p - q));
after K acceptances one more comes from p. Greedy rows (p one-hot) among sampled ones need no case
of their own: p(x) is 1 or 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from magicdec.sampling.sampling import sample


def verify(
    draft_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    u_accept: Tensor,
    u_resample: Tensor,
) -> tuple[Tensor, Tensor]:
    """(accepted [B], next_ids [B]), both int64: how many leading drafts are kept, and the token
    after them.

    draft_ids [B, K]; draft_probs float64 [B, K, V] is what each draft was sampled from, None for
    drafts without chance (q is one-hot); target_probs float64 [B, K+1, V], given the drafts before;
    u_accept [B, K] and u_resample [B, K+1] are independent uniform numbers.
    """
    num_drafts = draft_ids.shape[1]
    p = target_probs[:, :num_drafts].gather(2, draft_ids.unsqueeze(2)).squeeze(2)  # [B, K]
    if draft_probs is None:
        is_kept = u_accept < p
    else:
        # u < p / q without the division: a token with p = 0 is never kept, whatever q.
        is_kept = u_accept * draft_probs.gather(2, draft_ids.unsqueeze(2)).squeeze(2) < p
    accepted = is_kept.long().cumprod(dim=1).sum(dim=1)
    remaining = residual(draft_ids, draft_probs, target_probs, accepted)
    u = u_resample.gather(1, accepted.unsqueeze(1)).squeeze(1)
    return accepted, sample(remaining, u)


def residual(
    draft_ids: Tensor, draft_probs: Tensor | None, target_probs: Tensor, accepted: Tensor
) -> Tensor:
    """What the token after `accepted` [B] drafts is sampled from: [B, V], not normalised.

    max(0, p - q) of the rejected position; p where every draft was accepted. Where rounding left
    nothing of p - q, p and q are equal up to rounding, and it is p.
    """
    (num_rows, num_drafts), vocab_size = draft_ids.shape, target_probs.shape[2]
    rows = torch.arange(num_rows, device=draft_ids.device)
    p = target_probs[rows, accepted]  # [B, V]
    if num_drafts == 0:
        return p
    place = accepted.clamp(max=num_drafts - 1)
    if draft_probs is None:
        q = p.new_zeros(num_rows, vocab_size).scatter_(1, draft_ids[rows, place].unsqueeze(1), 1.0)
    else:
        q = draft_probs[rows, place]
    rest = (p - q).clamp(min=0)
    is_rejection = (accepted < num_drafts) & (rest.sum(dim=1) > 0)
    return torch.where(is_rejection.unsqueeze(1), rest, p)
