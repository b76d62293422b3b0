"""Drafts that read sinks, a window, and the top-k blocks of the runner's own cache by a score.

All drafts between two verifications share one choice.

Shapes: L layers, B rows, G KV heads of this rank, R ranges.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from magicdec.config.sections import KVSection
from magicdec.kv.cache import BatchRows, Lengths, Rows
from magicdec.kv.view import WEIGHTS_BLOCK as BLOCK
from magicdec.kv.view import ChosenRanges, SinksAndWindow, Visible
from magicdec.runner.model_runner import ModelRunner
from magicdec.speculation.block_choice import top_blocks
from magicdec.speculation.draft_kv import DraftKV
from magicdec.speculation.observation import sum_over_replicas
from magicdec.speculation.policies.policy import KVPolicy, check_sinks

Number = TypeVar("Number", int, Tensor)


@dataclass(frozen=True)
class BlockSelection(KVPolicy):
    """A policy that shows at most `budget` committed tokens: sinks, whole blocks, and at least
    the newest `window` tokens.

    With a `sliding_window`, tokens before the next token's window are not chosen; those that
    leave it during a step are masked. Layers with a window that others do not have see the newest
    `budget` tokens, as far as their window reaches."""

    settings: ClassVar[tuple[str, ...]] = ("budget", "num_sink_tokens", "recent_window")
    needs_verification: ClassVar[bool] = True
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
    def build(cls, kv: KVSection) -> BlockSelection:
        return cls(kv.num_sink_tokens, kv.num_recent_tokens, kv.budget)

    @classmethod
    def check(cls, kv: KVSection, gamma: int, flag: str | None) -> None:
        check_sinks(kv, flag)
        if kv.num_sink_tokens + kv.num_recent_tokens > kv.budget:
            raise ValueError(
                f"--recent_window {kv.num_recent_tokens} does not fit "
                f"{flag or '--budget'} {kv.budget} beside "
                f"--num_sink_tokens {kv.num_sink_tokens}"
            )

    def sinks(self, committed: Number) -> tuple[Number, Number]:
        first = committed * 0
        if self.sliding_window is not None:
            first = _positive(committed + 1 - self.sliding_window)
        return first, first + _positive(self.num_sink_tokens - first)

    def split(self, committed: Number) -> tuple[Number, Number]:
        """The begin of a row's window, and the number of blocks read before it."""
        first, last = self.sinks(committed)
        room = self.budget - (last - first)
        start = (committed - self.window) // BLOCK * BLOCK
        # Conditions are factors, so that numbers and tensors of them are served alike.
        is_long = committed - first > self.budget
        is_short = committed - first <= self.budget
        has_room = committed - start <= room
        is_tight = committed - start > room  # too small a budget to begin with a block
        begin = has_room * start + is_tight * (committed - room)
        num_blocks = has_room * ((room - committed + start) // BLOCK)
        return is_short * first + is_long * begin, is_long * num_blocks

    def num_visible(self, committed: int) -> int:
        start, num_blocks = self.split(committed)
        first, last = self.sinks(committed)
        return min(last, start) - first + num_blocks * BLOCK + committed - start

    def most_visible(self, committed: int) -> int:
        return min(committed, self.budget)

    def in_narrow_layers(self) -> Visible:
        return SinksAndWindow(0, self.budget)

    def ranges(self, committed: Tensor) -> Tensor:
        """The newest blocks, while no attention is known."""
        lengths = committed.tolist()
        most = max(self.split(length)[1] for length in lengths)
        recency = torch.arange(-(-max(lengths) // BLOCK), device=committed.device)
        scores = recency.float().expand(1, len(lengths), 1, -1)
        return self.top_blocks(committed, scores, most)[0, :, 0]

    def top_blocks(self, committed: Tensor, scores: Tensor, most: int) -> Tensor:
        """Ranges [L, B, G, R, 2] of at most `most` blocks, from committed [B] and block scores
        >= 0 [L, B, G, blocks]."""
        firsts, lasts = self.sinks(committed)
        starts, counts = self.split(committed)
        block = torch.arange(scores.shape[3], device=scores.device)
        eligible = block * BLOCK >= lasts.unsqueeze(1)  # [B, blocks]
        eligible &= block < starts.unsqueeze(1) // BLOCK
        eligible_scores = scores.masked_fill(~eligible[:, None], -1.0)
        best = eligible_scores.topk(most, dim=3).indices  # [L, B, G, most], the best first
        is_taken = torch.arange(most, device=scores.device) < counts.view(-1, 1, 1)
        # What a row does not take becomes an empty range where its window begins.
        begin = torch.where(is_taken, best * BLOCK, starts.view(-1, 1, 1)).sort(dim=3).values
        stop = torch.minimum(begin + BLOCK, starts.view(-1, 1, 1))
        always = torch.stack([firsts, torch.minimum(lasts, starts), starts, committed], dim=1)
        always = always.view(-1, 1, 2, 2).expand(*begin.shape[:3], 2, 2)  # sinks and window
        blocks = torch.stack([begin, stop], dim=4)
        return torch.cat([always[..., :1, :], blocks, always[..., 1:, :]], dim=3)


@dataclass(frozen=True)
class BlockRanges(ChosenRanges):
    """A policy with the ranges chosen for one batch."""

    policy: BlockSelection
    key_ranges: Tensor

    def num_visible(self, committed: int) -> int:
        return self.policy.num_visible(committed)

    def most_visible(self, committed: int) -> int:
        return self.policy.most_visible(committed)

    def in_narrow_layers(self) -> Visible:
        return self.policy.in_narrow_layers()


class BlockKV(DraftKV):
    """A draft KV of chosen blocks. Subclasses score the blocks."""

    def __init__(self, runner: ModelRunner, policy: BlockSelection) -> None:
        self.policy = replace(policy, sliding_window=runner.window)
        super().__init__(runner, self.policy)
        # Whole KV blocks: the bound of a row whose length only the device knows.
        self.num_blocks = -(-runner.cache.tokens_per_row // BLOCK)
        self._choice: tuple[Lengths, BlockRanges, tuple[int, ...]] | None = None

    def in_widest(self, layers: Mapping[int, Tensor]) -> Iterator[tuple[int, Tensor]]:
        """What the layers in this cache have, by their number in it. Layers with a narrower window
        choose nothing."""
        windows = self.runner.windows
        for layer, values in layers.items():
            if not windows.is_narrow(layer):
                yield windows.numbers[layer], values

    @abstractmethod
    def scores(self, rows: BatchRows, committed: Lengths, num_blocks: int) -> tuple[Tensor, Tensor]:
        """Block scores by the query heads of this rank, float32 [L, any, G, >= num_blocks], and
        the index [B] of `rows` in dimension 1."""

    def select(self, rows: Rows, committed: Lengths) -> Visible:
        rows = BatchRows.of(rows, self.runner.device)
        if self._choice is None or not self._is_chosen_for(rows, committed):
            chosen = BlockRanges(self.policy, self._choose(rows, committed))
            self._choice = committed, chosen, rows.numbers
        return self._choice[1]

    def _choose(self, rows: BatchRows, committed: Lengths) -> Tensor:
        """Ranges [L, B, G, R, 2]. Native code may break ties differently."""
        runner = self.runner
        policy = self.policy
        lengths = committed.bounds
        num_blocks = min(self.num_blocks, -(-max(lengths) // BLOCK))
        most = policy.budget // BLOCK
        if not rows.is_captured:
            most = max(policy.split(length)[1] for length in lengths)
        most = min(most, num_blocks)
        scores, index = self.scores(rows, committed, num_blocks)
        is_native = runner.executor is not None
        if not is_native or runner.model.shard.replicates(runner.model.config.num_kv_heads):
            scores = sum_over_replicas(runner, scores[:, index, :, :num_blocks])
            index = torch.arange(len(rows))
        if not is_native:
            return policy.top_blocks(committed.tensor, scores, most)
        sinks, splits = zip(*((policy.sinks(n), policy.split(n)) for n in lengths), strict=True)
        split = (*zip(*sinks, strict=True), *zip(*splits, strict=True), lengths)
        return top_blocks(scores, index, split, most)

    def _is_chosen_for(self, rows: BatchRows, committed: Lengths) -> bool:
        """Lengths that only the device knows are compared by identity."""
        assert self._choice is not None, "asked of a choice"
        lengths, _, numbers = self._choice
        is_equal = not rows.is_captured and lengths.bounds == committed.bounds
        return lengths is committed or (is_equal and numbers == rows.numbers)

    def commit(self, rows: BatchRows, lengths: Lengths) -> None:
        self._choice = None


def _positive(number: Number) -> Number:
    return number * (number > 0)
