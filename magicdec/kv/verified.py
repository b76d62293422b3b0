"""VerifiedKV: sinks, a window of the newest tokens, and between them the blocks that the target
looked at most when it last verified.

The choice is a by-product of verification: nothing is copied, predicted or prefilled a second time,
and it follows the text. Every layer and KV head chooses for itself, as many blocks each. Source:
Vegas (2602.07223), SparseSpec (2512.01278, PillarAttn).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from magicdec.kv.policy import MASS_BLOCK, first_key
from magicdec.sections import KVSection


@dataclass(frozen=True)
class VerifiedKV:
    """At most `budget` committed tokens: `num_sink_tokens` sinks, the newest `window` and up to
    MASS_BLOCK - 1 more, so that blocks end where the window begins, and blocks in between.

    Of a model with a `sliding_window` none of these is chosen from before the window of the token
    that comes next; the few that leave it while a step drafts on are masked."""

    reader: ClassVar[str] = "heaviest"
    num_sink_tokens: int
    window: int
    budget: int
    sliding_window: int | None = None  # the model's, where texts get past it

    def __post_init__(self) -> None:
        room = self.budget - self.num_sink_tokens
        if self.num_sink_tokens < 0 or not 1 <= self.window <= room:
            raise ValueError(
                f"KV budget {self.budget} has no room for {self.num_sink_tokens} sink tokens and "
                f"a window of {self.window}"
            )

    @classmethod
    def build(cls, kv: KVSection) -> VerifiedKV:
        return cls(kv.num_sink_tokens, kv.num_recent_tokens, kv.budget)

    def sinks(self, committed: int) -> tuple[int, int]:
        """The range of the sinks that a row of that length can see."""
        first = first_key(committed, self.sliding_window)
        return first, max(first, self.num_sink_tokens)

    def split(self, committed: int) -> tuple[int, int]:
        """Where the window of a row of that length begins, and how many blocks are read before
        it."""
        first, last = self.sinks(committed)
        if committed - first <= self.budget:
            return first, 0
        room = self.budget - (last - first)
        start = (committed - self.window) // MASS_BLOCK * MASS_BLOCK
        if committed - start > room:  # too small a budget for a window that begins with a block
            return committed - room, 0
        return start, (room - (committed - start)) // MASS_BLOCK

    def num_visible(self, committed: int) -> int:
        start, num_blocks = self.split(committed)
        first, last = self.sinks(committed)
        return min(last, start) - first + num_blocks * MASS_BLOCK + committed - start

    def ranges(self, committed: Tensor) -> Tensor:
        """Before anything is known of the attention: the newest blocks."""
        lengths = committed.tolist()
        recency = torch.arange(-(-max(lengths) // MASS_BLOCK), device=committed.device)
        return self.heaviest(lengths, recency.float().expand(1, len(lengths), 1, -1))[0, :, 0]

    def heaviest(self, committed: Sequence[int], mass: Tensor) -> Tensor:
        """Ranges [L, B, G, R, 2] of rows with `committed` tokens, given the attention [L, B, G,
        blocks] that their blocks received."""
        splits = [(*self.sinks(c), *self.split(c), c) for c in committed]
        firsts, lasts, starts, counts, ends = torch.tensor(splits, device=mass.device).unbind(1)
        block = torch.arange(mass.shape[3], device=mass.device)
        eligible = block * MASS_BLOCK >= lasts.unsqueeze(1)  # [B, blocks]
        eligible &= block < starts.unsqueeze(1) // MASS_BLOCK
        most = max(count for *_, count, _ in splits)
        weights = mass.masked_fill(~eligible[:, None], -1.0)
        chosen = weights.topk(most, dim=3).indices  # [L, B, G, most], heaviest first
        taken = torch.arange(most, device=mass.device) < counts.view(-1, 1, 1)
        # What a row does not take becomes an empty range where its window begins.
        begin = torch.where(taken, chosen * MASS_BLOCK, starts.view(-1, 1, 1)).sort(dim=3).values
        stop = torch.minimum(begin + MASS_BLOCK, starts.view(-1, 1, 1))
        kept = torch.stack([firsts, torch.minimum(lasts, starts), starts, ends], dim=1)
        kept = kept.view(-1, 1, 2, 2).expand(*begin.shape[:3], 2, 2)  # sinks and window
        blocks = torch.stack([begin, stop], dim=4)
        return torch.cat([kept[..., :1, :], blocks, kept[..., 1:, :]], dim=3)
