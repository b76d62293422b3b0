"""The filters top_k and top_p, as one operator: how much of the vocabulary it looks at depends on
the scores, which on a CPU saves sorting all of it. An operator hides that from what records or
replays the operators of a step. On CUDA, where the host must not wait for a value, everything is
sorted.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Tokens that are looked at first, and how many times more then: often they have all that is kept.
FIRST, GROWTH = 256, 16


def keep_top(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The scores, float64 [B, T, V], with -inf for the tokens that top_k and then top_p drop; both
    are [B, 1, 1]. The largest score of each position must be 0. top_k is off if it is V or more,
    top_p if it is 1."""
    kept: Tensor = torch.ops.magicdec.keep_top(scores, top_k, top_p)
    return kept


def by_selection(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Looks at the likeliest tokens, and at more of them until these have all that is kept."""
    vocab_size, weights = scores.shape[-1], scores.exp()
    has_top_k, has_top_p = top_k < vocab_size, top_p < 1
    count = FIRST
    while True:
        is_all = GROWTH * count > vocab_size
        count = vocab_size if is_all else count
        best = scores.sort(dim=-1, descending=True).values if is_all else scores.topk(count).values
        place = (top_k.clamp(max=count) - 1).expand(*scores.shape[:2], 1)
        floor = torch.where(has_top_k, best.gather(-1, place), -torch.inf)
        total = torch.where(scores < floor, 0.0, weights).sum(dim=-1, keepdim=True)
        shares = torch.where(best < floor, 0.0, best.exp() / total)
        held = shares.cumsum(dim=-1)
        is_enough = (~has_top_k | (top_k <= count)) & (~has_top_p | (held[..., -1:] >= top_p))
        if is_all or bool(is_enough.all()):
            break
        count *= GROWTH
    # A token is kept if those that are likelier have less than top_p together.
    num_kept = (held - shares < top_p).sum(dim=-1, keepdim=True)
    of_top_p = torch.where(has_top_p, best.gather(-1, num_kept - 1), -torch.inf)
    return torch.where(scores < torch.maximum(floor, of_top_p), -torch.inf, scores)


def by_sorting(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Without a decision of the host."""
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


_library = torch.library.Library("magicdec", "FRAGMENT")
_library.define("keep_top(Tensor scores, Tensor top_k, Tensor top_p) -> Tensor")
_library.impl("keep_top", by_selection, "CPU")
_library.impl("keep_top", by_sorting, "CUDA")


@torch.library.register_fake("magicdec::keep_top")
def _fake(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    return torch.empty_like(scores)
