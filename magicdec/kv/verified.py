"""VerifiedKV: sinks, a window of the newest tokens, and between them the blocks that the target
looked at most when it last verified.

The choice is a by-product of verification: nothing is copied, predicted or prefilled a second time,
and it follows the text. Every layer and KV head chooses for itself, as many blocks each. Source:
Vegas (2602.07223), SparseSpec (2512.01278, PillarAttn).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from magicdec.config.sections import KVSection
from magicdec.kv.policy import MASS_BLOCK

Number = TypeVar("Number", int, Tensor)


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

    def sinks(self, committed: Number) -> tuple[Number, Number]:
        """The range of the sinks that a row of that length can see."""
        first = committed * 0
        if self.sliding_window is not None:
            first = _positive(committed + 1 - self.sliding_window)
        return first, first + _positive(self.num_sink_tokens - first)

    def split(self, committed: Number) -> tuple[Number, Number]:
        """Where the window of a row of that length begins, and how many blocks are read before
        it."""
        first, last = self.sinks(committed)
        room = self.budget - (last - first)
        start = (committed - self.window) // MASS_BLOCK * MASS_BLOCK
        # Conditions are factors, so that numbers and tensors of them are served alike.
        is_long, is_short = committed - first > self.budget, committed - first <= self.budget
        has_room = committed - start <= room
        is_tight = committed - start > room  # too small a budget to begin with a block
        begin = has_room * start + is_tight * (committed - room)
        num_blocks = has_room * ((room - committed + start) // MASS_BLOCK)
        return is_short * first + is_long * begin, is_long * num_blocks

    def num_visible(self, committed: int) -> int:
        start, num_blocks = self.split(committed)
        first, last = self.sinks(committed)
        return min(last, start) - first + num_blocks * MASS_BLOCK + committed - start

    def most_visible(self, committed: int) -> int:
        return min(committed, self.budget)

    def ranges(self, committed: Tensor) -> Tensor:
        """Before anything is known of the attention: the newest blocks."""
        lengths = committed.tolist()
        most = max(self.split(length)[1] for length in lengths)
        recency = torch.arange(-(-max(lengths) // MASS_BLOCK), device=committed.device)
        mass = recency.float().expand(1, len(lengths), 1, -1)
        return self.heaviest(committed, mass, most)[0, :, 0]

    def heaviest(self, committed: Tensor, mass: Tensor, most: int) -> Tensor:
        """Ranges [L, B, G, R, 2] of rows with `committed` [B] tokens, given the attention [L, B, G,
        blocks] that their blocks received; no row takes more than `most` of them."""
        firsts, lasts = self.sinks(committed)
        starts, counts = self.split(committed)
        block = torch.arange(mass.shape[3], device=mass.device)
        eligible = block * MASS_BLOCK >= lasts.unsqueeze(1)  # [B, blocks]
        eligible &= block < starts.unsqueeze(1) // MASS_BLOCK
        weights = mass.masked_fill(~eligible[:, None], -1.0)
        chosen = weights.topk(most, dim=3).indices  # [L, B, G, most], heaviest first
        taken = torch.arange(most, device=mass.device) < counts.view(-1, 1, 1)
        # What a row does not take becomes an empty range where its window begins.
        begin = torch.where(taken, chosen * MASS_BLOCK, starts.view(-1, 1, 1)).sort(dim=3).values
        stop = torch.minimum(begin + MASS_BLOCK, starts.view(-1, 1, 1))
        kept = torch.stack([firsts, torch.minimum(lasts, starts), starts, committed], dim=1)
        kept = kept.view(-1, 1, 2, 2).expand(*begin.shape[:3], 2, 2)  # sinks and window
        blocks = torch.stack([begin, stop], dim=4)
        return torch.cat([kept[..., :1, :], blocks, kept[..., 1:, :]], dim=3)


def _positive(number: Number) -> Number:
    return number * (number > 0)
