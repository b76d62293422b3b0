"""Judges drafts: pure functions of ids and probabilities.

Greedy (Leviathan et al. 2023, section 2.3): draft tokens are accepted up to the first that is not
the target's own choice. The target's next choice, a correction or a bonus, follows them.

Sampled (Leviathan et al. 2023, algorithm 1 and appendix A.1; Chen et al. 2023, "Accelerating large
language model decoding with speculative sampling", algorithm 2 and theorem 1): the output has
exactly the target's distribution. A draft token x is accepted with probability min(1, p(x)/q(x)).
At the first rejection, the token is sampled from norm(max(0, p - q)) instead. If all K drafts are
accepted, one more token is sampled from p. Greedy rows in the same batch need no special case:
their p is one-hot, so p(x) is 1 or 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from magicdec.sampling.sampling import sample


def count_accepted(draft_ids: Tensor, target_ids: Tensor) -> Tensor:
    """How many leading draft ids [B, K] equal the target's choices [B, K+1] at the same positions:
    int64 [B]."""
    equal = draft_ids == target_ids[:, :-1]
    return equal.long().cumprod(dim=1).sum(dim=1)


def verify(
    draft_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    u_accept: Tensor,
    u_resample: Tensor,
) -> tuple[Tensor, Tensor]:
    """Returns (accepted [B], next_ids [B]), both int64: how many leading drafts are accepted, and
    the token after them.

    draft_ids [B, K] are the drafts. draft_probs, float64 [B, K, V], are the probabilities q from
    which they were sampled; None if they were not sampled (then q is one-hot). target_probs,
    float64 [B, K+1, V], are the target's probabilities p at each position, given the drafts before
    it. u_accept [B, K] and u_resample [B, K+1] are independent uniform random numbers.
    """
    num_drafts = draft_ids.shape[1]
    p = target_probs[:, :num_drafts].gather(2, draft_ids.unsqueeze(2)).squeeze(2)  # [B, K]
    if draft_probs is None:
        is_kept = u_accept < p
    else:
        # This is u < p / q without the division. A token with p = 0 is never accepted.
        is_kept = u_accept * draft_probs.gather(2, draft_ids.unsqueeze(2)).squeeze(2) < p
    accepted = is_kept.long().cumprod(dim=1).sum(dim=1)
    remaining = residual(draft_ids, draft_probs, target_probs, accepted)
    u = u_resample.gather(1, accepted.unsqueeze(1)).squeeze(1)
    return accepted, sample(remaining, u)


def residual(
    draft_ids: Tensor, draft_probs: Tensor | None, target_probs: Tensor, accepted: Tensor
) -> Tensor:
    """The distribution from which the token after `accepted` [B] drafts is sampled: [B, V], not
    normalised.

    It is max(0, p - q) at the rejected position, and p if every draft was accepted. If no entry of
    p - q is positive, then p and q are equal up to rounding, and p is used.
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
