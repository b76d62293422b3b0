"""SnapKV: what the last prompt tokens attended to, chosen once, and everything since.

Source: Li et al. 2024, section 4. Owns the choice, a pure function of attention weights; the chosen
entries are kept by `CopiedKV`.

Shapes: B rows, G KV heads, S cached tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.config.sections import KVSection
from magicdec.drafting.copied_kv import CopiedKV
from magicdec.drafting.draft_kv import DraftKV
from magicdec.drafting.policies.policy import KVPolicy
from magicdec.kv.view import FULL, Visible
from magicdec.runner import ModelRunner

KERNEL = 5  # neighbours that share a score: what is attended to is seldom a single token


@dataclass(frozen=True)
class SnapKV(KVPolicy):
    """At most `budget` committed tokens. The choice keeps the newest `window_size` and, for each KV
    head, those that they attended to most. Each later token replaces the one with the lowest score,
    or the oldest if no chosen one is left. With `reselect_every` > 0 the choice is made anew after
    so many tokens."""

    settings: ClassVar[tuple[str, ...]] = ("budget", "window_size", "pooling", "reselect_every")
    is_copied: ClassVar[bool] = True
    budget: int
    window_size: int
    pooling: str = "avg"
    reselect_every: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.window_size < self.budget:
            raise ValueError(
                f"KV budget {self.budget} must be larger than a window of {self.window_size} >= 1"
            )

    @classmethod
    def build(cls, kv: KVSection) -> SnapKV:
        return cls(kv.budget, kv.window_size, kv.pooling, kv.reselect_every)

    @classmethod
    def check(cls, kv: KVSection, num_draft_tokens: int, flag: str | None) -> None:
        if kv.budget <= kv.window_size:
            raise ValueError(
                f"{flag or '--budget'} {kv.budget} must be larger than "
                f"--window_size {kv.window_size}"
            )

    def draft_kv(self, runner: ModelRunner, kv_dtype: torch.dtype | None) -> DraftKV:
        return CopiedKV(runner, self, kv_dtype)

    def draft_reads(self, context: int) -> tuple[int, Visible]:
        return self.copied_tokens(context), FULL

    def copied_tokens(self, context: int) -> int:
        return min(self.budget, context)

    @property
    def observed_tokens(self) -> int:
        return self.window_size

    def rerun_tokens(self, context: int) -> int:
        return min(self.window_size, context) if self.reselect_every else 0

    def select(self, weights: Tensor, window: int) -> Tensor:
        """Positions to keep, int64 [B, G, min(S, budget)], given the attention weights [B, G, S]
        that all keys received from the newest `window` tokens: first the others, that with the
        lowest score first, then these tokens."""
        num_others = weights.shape[2] - window
        newest = torch.arange(num_others, weights.shape[2], device=weights.device)
        newest = newest.expand(*weights.shape[:2], -1)
        if num_others == 0:
            return newest
        scores = self._pool(weights[:, :, :num_others])
        best = scores.topk(min(num_others, self.budget - window), dim=2).indices
        return torch.cat([best.flip(2), newest], dim=2)

    def _pool(self, scores: Tensor) -> Tensor:
        pool = F.avg_pool1d if self.pooling == "avg" else F.max_pool1d
        return pool(scores, KERNEL, stride=1, padding=KERNEL // 2)
