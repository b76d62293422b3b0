"""Choosing tokens and judging drafts: pure functions of logits and ids.

Source of the verification rule: Leviathan et al. 2023, section 2.3, in its greedy case: a draft
token is accepted while it is the target's own choice; the target's next choice, correction or
bonus, follows the accepted ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from magicdec.distributed.groups import Group


def greedy(logits: Tensor, first_row: int, group: Group) -> Tensor:
    """Ids of the largest logits over a vocabulary sharded by rank: [B, T, V] -> int64 [B, T], the
    same on every rank.

    `first_row` is the vocabulary id of this rank's first row. One collective: values and ids travel
    as a float64 pair, which holds both exactly. Equal values go to the smaller id, as one rank's
    argmax would do.
    """
    value, index = logits.max(dim=-1)
    if group.size == 1:
        return index
    pair = torch.stack([value.double(), (index + first_row).double()], dim=-1)  # [B, T, 2]
    values, ids = group.all_gather(pair).unbind(-1)  # [ranks, B, T] each
    best = values.max(dim=0, keepdim=True).values
    return torch.where(values == best, ids, float("inf")).min(dim=0).values.long()


def count_accepted(draft_ids: Tensor, target_ids: Tensor) -> Tensor:
    """How many leading draft ids [B, K] equal the target's choices [B, K+1] at their places: int64
    [B]."""
    equal = draft_ids == target_ids[:, :-1]
    return equal.long().cumprod(dim=1).sum(dim=1)
