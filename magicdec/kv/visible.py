"""Visible: the rule that chooses which committed tokens a forward reads, from the lengths alone.

Owns the protocol and the rule of sinks and a window. Must not know how a view is made of the
choice (`view`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Visible(Protocol):
    """Which committed tokens a forward reads: a policy, or a choice that a policy has made."""

    def ranges(self, committed: Tensor) -> Tensor:
        """Visible token ranges (start, stop) of rows with `committed` [B] tokens: [B, R, 2], or
        [L, B, G, R, 2] where each layer and KV head has its own. They are disjoint and ascending
        and may be empty. Every layer and head of a row sees the same number of tokens."""
        ...

    def num_visible(self, committed: int) -> int:
        """The number of tokens in the ranges of a row with `committed` tokens, computed on the
        host."""
        ...

    def most_visible(self, committed: int) -> int:
        """An upper bound of `num_visible` for rows of at most `committed` tokens."""
        ...


@dataclass(frozen=True)
class SinksAndWindow:
    """The first `num_sink_tokens` tokens and the newest ones are visible, at most `budget` in
    all."""

    num_sink_tokens: int
    budget: int

    def ranges(self, committed: Tensor) -> Tensor:
        sinks = committed.clamp(max=self.num_sink_tokens)
        start = torch.maximum(sinks, committed - (self.budget - self.num_sink_tokens))
        zero = torch.zeros_like(committed)
        return torch.stack([torch.stack([zero, sinks], 1), torch.stack([start, committed], 1)], 1)

    def num_visible(self, committed: int) -> int:
        return min(committed, self.budget)

    def most_visible(self, committed: int) -> int:
        return self.num_visible(committed)


def num_within(
    visible: Visible, committed: Sequence[int], first_keys: Sequence[int]
) -> tuple[int, ...]:
    """As `Visible.num_visible` for each row, but counts only tokens from `first_keys` on."""
    ranges = visible.ranges(torch.tensor(committed))  # on the CPU: the host reads the result
    ranges = ranges.clamp(min=torch.tensor(first_keys).view(-1, 1, 1))
    return tuple((ranges[..., 1] - ranges[..., 0]).sum(dim=1).tolist())


def list_cells(ranges: Tensor, size: int) -> Tensor:
    """The first `size` cells in the ranges [B, G or 1, R, 2] of each row: [B, G or 1, size]. Padded
    with -1."""
    stops = (ranges[..., 1] - ranges[..., 0]).cumsum(2)  # where each range ends among the keys
    index = torch.arange(size, device=stops.device).expand(*stops.shape[:2], size).contiguous()
    which = torch.searchsorted(stops, index, right=True)  # the range that key i falls in
    inside = which < ranges.shape[2]
    which = which.clamp(max=ranges.shape[2] - 1)
    before = torch.cat([torch.zeros_like(stops[..., :1]), stops[..., :-1]], dim=2)
    position = ranges[..., 0].gather(2, which) + index - before.gather(2, which)
    return torch.where(inside, position, -1)
