"""Verification of drafts: pure functions of ids and probabilities.

Greedy (Leviathan et al., arXiv 2211.17192, section 2.3): drafts are accepted up to the first that
is not the target's choice, which follows. Sampled (ibid., algorithm 1 and appendix A.1; Chen et
al., arXiv 2302.01318, algorithm 2 and theorem 1): draft x is accepted with probability min(1,
p(x)/q(x)); after the first rejection a token is sampled from norm(max(0, p - q)), after K accepted
drafts from p. The output has exactly the target's distribution. Greedy rows have a one-hot p.

Shapes: B rows, K drafts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    p, q = _probabilities_of_drafts(draft_ids, draft_probs, target_probs)
    # This is u < p / q without the division. A token with p = 0 is never accepted.
    accepted = leading(u_accept * q < p, counts)
    following = residual(draft_ids, draft_probs, target_probs, accepted, counts)
    u = u_resample.gather(1, accepted.unsqueeze(1)).squeeze(1)
    return accepted, sample(following, u)


def acceptance_of(
    draft_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    counts: Tensor | None = None,
) -> Tensor:
    """The probability with which `verify` accepts the first 1, 2, ..., K drafts, float64 [B, K], 0
    from padding on. At the k-th it is that of accepting these k - 1 drafts, the product of min(1,
    p(x)/q(x)), times that of accepting the next one, whichever is drawn: the sum of min(p, q).

    Its mean over drafts drawn from q is the probability that so many are accepted, for q times
    min(1, p/q) is min(p, q). What `verify` draws has the same mean and varies most; with p(x)/q(x)
    of the k-th draft too it would vary more than so. A product of the sums alone would have another
    mean: the drafts that are accepted before come from min(p, q), and not from q."""
    p, q = _probabilities_of_drafts(draft_ids, draft_probs, target_probs)
    ratio = torch.where(p < q, p / q, (p > 0).double())  # padding may have q = 0
    overlap = p  # with a one-hot q
    if draft_probs is not None:
        overlap = torch.minimum(target_probs[:, : draft_ids.shape[1]], draft_probs).sum(dim=2)
        overlap = overlap.clamp(max=1)
    if counts is not None:
        is_real = torch.arange(draft_ids.shape[1], device=p.device) < counts.unsqueeze(1)
        ratio = ratio * is_real
        overlap = overlap * is_real
    before = torch.cat([torch.ones_like(p[:, :1]), ratio[:, :-1].cumprod(dim=1)], dim=1)
    return before * overlap


def _probabilities_of_drafts(
    draft_ids: Tensor, draft_probs: Tensor | None, target_probs: Tensor
) -> tuple[Tensor, Tensor]:
    """p and q of the drafts themselves, float64 [B, K]; q is 1 if it is one-hot."""
    index = draft_ids.unsqueeze(2)
    p = target_probs[:, : draft_ids.shape[1]].gather(2, index).squeeze(2)
    q = torch.ones_like(p) if draft_probs is None else draft_probs.gather(2, index).squeeze(2)
    return p, q


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
    target_probs: Tensor | None = None  # see `verify`; None: nothing was drawn
    acceptance: Tensor | None = None  # see `acceptance_of`; None: nobody asked

    @classmethod
    def of(
        cls,
        draft_ids: Tensor,
        accepted: Tensor,
        following: Tensor,
        target_probs: Tensor | None = None,
    ) -> Judgement:
        """The verdict of `accepted` [B] of drafts [B, K], then token `following` [B]."""
        following = following.unsqueeze(1)
        ids = torch.cat([draft_ids, following], dim=1)
        return cls(accepted, ids.scatter(1, accepted.unsqueeze(1), following), target_probs)

    @property
    def columns(self) -> list[Tensor]:
        """What the host reads, int64 [B, any] (`Verdicts.read`)."""
        columns = [self.accepted.unsqueeze(1), self.ids]
        return columns if self.acceptance is None else [*columns, (self.acceptance * UNITS).long()]


UNITS = 1 << 53  # in one: probabilities are read by the host as whole numbers, with ids


class Verdicts(NamedTuple):
    """A `Judgement` as the host has read it, by row: a row emits the `ids` of the accepted drafts
    that are kept, and one more."""

    accepted: list[int]
    ids: list[list[int]]
    acceptance: list[list[float]] | None = None  # see `acceptance_of`

    @classmethod
    def read(cls, lines: Sequence[list[int]], first: int, draft_width: int) -> Verdicts:
        """From a line for each row, with `Judgement.columns` from `first` on, of drafts that are
        padded to `draft_width`."""
        last = first + 2 + draft_width
        accepted = [line[first] for line in lines]
        ids = [line[first + 1 : last] for line in lines]
        if len(lines[0]) == last:
            return cls(accepted, ids)
        return cls(accepted, ids, [[count / UNITS for count in line[last:]] for line in lines])

    @classmethod
    def joined(cls, parts: Sequence[Verdicts]) -> Verdicts:
        """The rows of all parts, one after the other. Of rows without drafts nobody asks for the
        acceptance."""
        if len(parts) == 1:
            return parts[0]
        accepted = [count for part in parts for count in part.accepted]
        ids = [row for part in parts for row in part.ids]
        if all(part.acceptance is None for part in parts):
            return cls(accepted, ids)
        missing = list[float]()
        acceptance = [row for part in parts for row in part.acceptance or [missing] * len(part.ids)]
        return cls(accepted, ids, acceptance)

    def at(self, places: Sequence[int]) -> Verdicts:
        """Those of the rows at `places`, in their order."""
        acceptance = self.acceptance
        return Verdicts(
            [self.accepted[place] for place in places],
            [self.ids[place] for place in places],
            None if acceptance is None else [acceptance[place] for place in places],
        )


def remaining(p: Tensor, drawn_from: Tensor) -> Tensor:
    """norm(max(0, p - q)) for p [B, V] and q = `drawn_from`; p itself where both are equal up to
    rounding."""
    rest = (p - drawn_from).clamp(min=0)
    total = rest.sum(dim=1, keepdim=True)
    return torch.where(total > 0, rest / total, p)
