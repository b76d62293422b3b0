"""HeaviestReader: a draft reads the blocks of the runner's own cache that the last verification
looked at most; nothing of the cache is copied.

Owns what is known of the attention, a number a block, layer, row and KV head of this rank. Which
blocks follow from it is the policy's arithmetic (`kv/verified.py`). Ranks that hold copies of one
KV head choose each for its own query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from magicdec.kv.policy import MASS_BLOCK
from magicdec.kv.verified import VerifiedKV
from magicdec.request import Batch
from magicdec.runner import ModelRunner

REPLAYED = 16  # newest prompt tokens whose attention makes the first choice


@dataclass(frozen=True)
class Chosen:
    """A policy whose choice of ranges for one batch is made."""

    policy: VerifiedKV
    chosen: Tensor  # [L, B, G, R, 2]

    def ranges(self, committed: Tensor) -> Tensor:
        return self.chosen

    def num_visible(self, committed: int) -> int:
        return self.policy.num_visible(committed)


class HeaviestReader:
    """The choice is made once a step: all draft forwards between two verifications share it."""

    def __init__(self, runner: ModelRunner, policy: VerifiedKV) -> None:
        self.runner, self.policy = runner, replace(policy, sliding_window=runner.window)
        shape = runner.cache.shape
        blocks = -(-runner.max_tokens // MASS_BLOCK)
        self._mass = torch.zeros(
            shape.num_layers, runner.num_rows, shape.num_kv_heads, blocks, device=runner.device
        )
        self._seen: dict[int, Tensor] = {}  # layer -> mass of the rows of the last verification
        self._choice: tuple[list[int], list[int], Chosen] | None = None  # rows, lengths, ranges

    @classmethod
    def build(
        cls, runner: ModelRunner, policy: VerifiedKV, kv_dtype: torch.dtype | None
    ) -> HeaviestReader:
        return cls(runner, policy)

    def watch(self, layer: int, mass: Tensor) -> None:
        self._seen[layer] = mass

    def begin(self, batch: Batch) -> None:
        """The newest tokens of each long prompt a second time, for their attention alone."""
        rows = [
            (request, row)
            for request, row in zip(batch.requests, batch.rows, strict=True)
            if self.runner.cache.lengths[row] > self.policy.budget
        ]
        if not rows:
            return
        held = [self.runner.cache.lengths[row] for _, row in rows]
        count = min(REPLAYED, *held)
        tokens = [
            (*request.prompt_ids, *request.output_ids)[length - count : length]
            for (request, _), length in zip(rows, held, strict=True)
        ]
        self._replay(torch.tensor(tokens, device=self.runner.device), [row for _, row in rows])

    def _replay(self, tokens: Tensor, rows: list[int]) -> None:
        """Tokens [B, T] that stand at the end of `rows`; their K and V are put back, since a
        forward of another T may round them otherwise."""
        runner, cache = self.runner, self.runner.cache
        held = [cache.lengths[row] for row in rows]
        runner.truncate(rows, [length - tokens.shape[1] for length in held])
        index = torch.tensor(rows, device=runner.device)
        new = torch.arange(tokens.shape[1], device=runner.device)
        slots = cache.slots(index, cache.seq_lens[index].unsqueeze(1) + new)
        before = [cache.read(layer, slots) for layer in range(cache.shape.num_layers)]
        runner.forward(tokens, rows, watch=self.watch, last_only=True)
        for layer, (k, v) in enumerate(before):
            cache.write(layer, slots, k.transpose(1, 2), v.transpose(1, 2))
        self.commit(rows, held)

    def refresh(self, batch: Batch, num_draft_tokens: int) -> None:
        """The last verification has told."""

    def lengths(self, rows: Sequence[int]) -> list[int]:
        return [self.runner.cache.lengths[row] for row in rows]

    def forward(self, token_ids: Tensor, rows: Sequence[int], settled: Sequence[int]) -> Tensor:
        return self.runner.forward(token_ids, rows, self._choose(rows, settled), settled)

    def _choose(self, rows: Sequence[int], settled: Sequence[int]) -> Chosen:
        if self._choice is None or self._choice[:2] != (list(rows), list(settled)):
            blocks = -(-max(settled) // MASS_BLOCK)
            mass = self._mass[:, list(rows), :, :blocks]
            chosen = Chosen(self.policy, self.policy.heaviest(settled, mass))
            self._choice = list(rows), list(settled), chosen
        return self._choice[2]

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self.runner.truncate(rows, lengths)

    def commit(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """The verification of `rows` has ended: what was seen of it is theirs."""
        for layer, mass in self._seen.items():
            self._mass[layer, list(rows), :, : mass.shape[2]] = mass
        self._seen.clear()
        self._choice = None
