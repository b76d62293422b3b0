"""SnapKV: what the last prompt tokens attended to, chosen once, and everything since.

Source: Li et al. 2024, section 4. Owns the choice, a pure function of queries and keys; the chosen
entries are kept by `CopiedKV`.

Shapes: W observed tokens, H query heads, G KV heads, D head size, S cached tokens.
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
    """At most `budget` tokens of the context at the time of the choice: the newest `window_size`,
    and for each KV head those that they attended to most. With `reselect_every` > 0 the choice is
    made anew after so many tokens."""

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
                f"{flag or '--draft_budget'} {kv.budget} must be larger than "
                f"--window_size {kv.window_size}"
            )

    def draft_kv(self, runner: ModelRunner, kv_dtype: torch.dtype | None) -> DraftKV:
        return CopiedKV(runner, self, kv_dtype)

    def draft_reads(self, context: int) -> tuple[int, Visible]:
        return self.copied_tokens(context), FULL

    def copied_tokens(self, context: int) -> int:
        return min(self.budget, context)

    def rerun_tokens(self, context: int) -> int:
        return min(self.window_size, context)

    def select(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Ascending positions to keep, int64 [G, min(S, budget)], given the rotated queries [W, H,
        D] of the newest tokens and all keys [G, S, D], theirs included."""
        num_keys, window = keys.shape[1], queries.shape[0]
        everything = torch.arange(num_keys, device=keys.device).expand(keys.shape[0], -1)
        if num_keys <= self.budget:
            return everything
        scores = self._pool(observed_weights(queries, keys)[:, : num_keys - window])
        best = scores.topk(self.budget - window, dim=1).indices.sort(dim=1).values
        return torch.cat([best, everything[:, num_keys - window :]], dim=1)

    def _pool(self, scores: Tensor) -> Tensor:
        pool = F.avg_pool1d if self.pooling == "avg" else F.max_pool1d
        return pool(scores.unsqueeze(0), KERNEL, stride=1, padding=KERNEL // 2).squeeze(0)


def observed_weights(queries: Tensor, keys: Tensor) -> Tensor:
    """Attention probability that each key received from the last tokens' queries, summed over them
    and over the query heads of its KV head: float32 [G, S].

    queries [W, H, D] belong to the last W of keys [G, S, D].
    """
    window, num_heads, size = queries.shape
    groups, num_keys, _ = keys.shape
    packed = queries.view(window, groups, num_heads // groups, size).permute(1, 2, 0, 3)
    scores = torch.matmul(packed.float() * size**-0.5, keys.float().unsqueeze(1).mT)
    position = torch.arange(num_keys, device=keys.device)
    hidden = position > position[num_keys - window :].unsqueeze(1)  # [W, S]
    return scores.masked_fill_(hidden, float("-inf")).softmax(dim=-1).sum(dim=(1, 2))
