"""SnapKV: the prompt tokens with the largest attention from the last ones, by KV head, and all
later tokens, in a small cache of their own.

Source: SnapKV, arXiv 2404.14469, section 4; as a draft: MagicDec, arXiv 2408.11049, section 4.

Shapes: B rows, G KV heads, S cached tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.config.sections import MAX_AUTO_GAMMA, KVSection
from magicdec.kv.cache import BatchRows
from magicdec.kv.view import SinksAndWindow, first_key
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.request import Request
from magicdec.speculation.copied_kv import CopiedKV
from magicdec.speculation.draft_kv import DraftKV
from magicdec.speculation.observation import newest_queries, weights_in_cache
from magicdec.speculation.policies.policy import KVPolicy

KERNEL = 5  # neighbours that share a score: what is attended to is seldom a single token


@dataclass(frozen=True)
class SnapKV(KVPolicy):
    """A policy that copies at most `budget` tokens: the newest `window_size`, and for each KV
    head those with the largest attention from them.

    A later token replaces the one with the lowest score, or the oldest if no chosen one is left.
    `reselect_every` > 0 chooses anew after that many tokens."""

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
    def check(cls, kv: KVSection, gamma: int, flag: str | None) -> None:
        if kv.budget <= kv.window_size:
            raise ValueError(
                f"{flag or '--budget'} {kv.budget} must be larger than "
                f"--window_size {kv.window_size}"
            )

    def draft_kv(self, runner: ModelRunner) -> DraftKV:
        return ChosenCopy(runner, self)

    def copied_tokens(self, context: int) -> int:
        return min(self.budget, context)

    @property
    def observed_tokens(self) -> int:
        return self.window_size

    @property
    def chooses_again(self) -> bool:
        return self.reselect_every > 0

    def rerun_tokens(self, context: int) -> int:
        return min(self.window_size, context) if self.reselect_every else 0

    def select(self, weights: Tensor, window: int) -> Tensor:
        """Positions to keep, int64 [B, G, min(S, budget)], from the weights [B, G, S] that keys
        received from the newest `window` tokens: by ascending score, then these tokens."""
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


class ChosenCopy(CopiedKV):
    """A copy of the chosen tokens by ascending score, then newly committed ones; drafts read the
    newest `budget` entries.

    Under a sliding window only tokens are chosen that stay visible until the next choice or the
    end, because heads would lose them in different orders. Of layers with a narrower window than
    others it holds the newest tokens."""

    def __init__(self, source: ModelRunner, policy: SnapKV) -> None:
        super().__init__(source, SinksAndWindow(0, policy.budget))
        self.policy = policy
        self.chosen_at = [0] * source.num_rows  # context length at the last choice
        # Tokens at positions before this one see everything that was chosen.
        self.lasts_until = [0] * source.num_rows

    @property
    def following(self) -> int:
        """The most tokens after a prompt, drafts included."""
        most = self.source.max_following
        return self.source.max_tokens if most is None else most

    @property
    def row_tokens(self) -> int:
        return min(self.policy.budget + self.following, self.source.max_tokens)

    def fill(self, requests: Sequence[Request]) -> None:
        self._choose(requests)

    def fork(self, forks: Sequence[Request], texts: Sequence[Request]) -> None:
        super().fork(forks, texts)
        for request, text in zip(forks, texts, strict=True):
            assert request.row is not None and text.row is not None, "texts and forks have rows"
            self.chosen_at[request.row] = self.chosen_at[text.row]
            self.lasts_until[request.row] = self.lasts_until[text.row]

    def prepare(self, requests: Sequence[Request], gamma: int) -> None:
        """Also choose anew where due."""
        super().prepare(requests, gamma)
        every = self.policy.reselect_every
        requests_due = []
        for request in requests:
            if (row := request.row) is None:
                continue
            last = request.num_cached + gamma
            is_due = every and request.num_cached >= self.chosen_at[row] + every
            if is_due or last > self.lasts_until[row]:
                requests_due.append(request)
        self._choose(requests_due, gamma)

    def _choose(self, requests: Sequence[Request], gamma: int = MAX_AUTO_GAMMA) -> None:
        """Fill the rows of `requests` anew; rows of equal length together."""
        by_length: dict[int, list[Request]] = {}
        for request in requests:
            by_length.setdefault(request.num_cached, []).append(request)
        for length, equal in by_length.items():
            rows = BatchRows.of([r.row for r in equal if r.row is not None], self.source.device)
            until, first = self._reach(length, gamma)
            queries = []  # of a text of which nothing stays in the sliding window
            if first < length:
                queries = newest_queries(self.source, equal, min(self.policy.window_size, length))
            count = self._copy_chosen(rows, length, first, queries)
            for row in rows.numbers:
                self._offsets[row] = self.shifts[row] = length - count
                self.chosen_at[row] = length
                self.lasts_until[row] = until

    def _copy_chosen(
        self, rows: BatchRows, length: int, first: int, queries: Sequence[Tensor]
    ) -> int:
        """Refill `rows` from positions `first` to `length` - 1 by the newest queries [B, W, H,
        D] of each layer. Returns the number of entries."""
        source = self.source
        cache = self.runner.cache
        count = min(self.policy.budget, length - first)
        places = torch.arange(count, device=source.device).expand(len(rows), -1)
        chosen = list[Tensor]()
        newest_positions = torch.arange(length - count, length, device=source.device)
        everywhere = newest_positions.expand(len(rows), cache.shape.num_kv_heads, -1)
        for layer, newest in enumerate(queries):
            if source.windows.is_narrow(layer):
                # The layer may have lost those before its window, where no draft looks either.
                self._copy(layer, rows, everywhere, places)
                chosen.append(everywhere)
                continue
            window = min(newest.shape[1], length - first)
            weights = weights_in_cache(
                source, layer, rows.index, newest[:, newest.shape[1] - window :], first, length
            )
            positions = first + self.policy.select(weights, window)
            self._copy(layer, rows, positions, places)
            chosen.append(positions)
        for observer in self.runner.observers:
            observer.on_choice(self.runner.caches, rows.numbers, chosen)
        cache.truncate(rows, [0] * len(rows))
        cache.advance(rows, count)
        return count

    def _copy(self, layer: int, rows: BatchRows, positions: Tensor, places: Tensor) -> None:
        entries = self.source.caches.read(layer, rows.index, positions)
        self.runner.caches.write(layer, rows.index, places, *entries)

    def _reach(self, length: int, gamma: int) -> tuple[int, int]:
        """The position up to which a choice serves, and the first position visible from there."""
        until = min(self.source.max_tokens, length + self.following)
        every = self.policy.reselect_every
        if every and self.source.window is not None:
            until = min(until, length + every + gamma)
        return until, min(length, first_key(until - 1, self.source.window))
