"""HeaviestReader: a draft reads the blocks of the runner's own cache that the last verification
looked at most; nothing of the cache is copied.

Owns what is known of the attention, a number a block, layer, row and KV head of this rank. Which
blocks follow from it is the policy's arithmetic (`kv/verified.py`). Ranks that hold copies of one
KV head choose each for its own query heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from magicdec.kv.device_rows import DeviceRows, Lengths, Rows, index_of, upload
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

    def most_visible(self, committed: int) -> int:
        return self.policy.most_visible(committed)


class HeaviestReader:
    """The choice is made once a step: all draft forwards between two verifications share it."""

    def __init__(self, runner: ModelRunner, policy: VerifiedKV) -> None:
        self.runner, self.policy = runner, replace(policy, sliding_window=runner.window)
        shape = runner.cache.shape
        # Of whole KV blocks: the bound of a row whose length only the device knows.
        blocks = -(-runner.cache.tokens_per_row // MASS_BLOCK)
        self._mass = torch.zeros(
            shape.num_layers, runner.num_rows, shape.num_kv_heads, blocks, device=runner.device
        )
        self._seen: dict[int, Tensor] = {}  # layer -> mass of the rows of the last verification
        self._choice: tuple[Rows, Lengths, Chosen] | None = None  # rows, lengths, ranges

    @classmethod
    def build(
        cls, runner: ModelRunner, policy: VerifiedKV, kv_dtype: torch.dtype | None
    ) -> HeaviestReader:
        return cls(runner, policy)

    def watch(self, layer: int, mass: Tensor) -> None:
        self._seen[layer] = mass

    @property
    def memory(self) -> Tensor:
        return self._mass

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
        self._replay(upload(tokens, self.runner.device), [row for _, row in rows])

    def _replay(self, tokens: Tensor, rows: list[int]) -> None:
        """Tokens [B, T] that stand at the end of `rows`; their K and V are put back, since a
        forward of another T may round them otherwise."""
        runner, cache = self.runner, self.runner.cache
        held = [cache.lengths[row] for row in rows]
        runner.truncate(rows, [length - tokens.shape[1] for length in held])
        index = upload(rows, runner.device)
        new = torch.arange(tokens.shape[1], device=runner.device)
        slots = cache.slots(index, cache.seq_lens[index].unsqueeze(1) + new)
        before = [cache.read(layer, slots) for layer in range(cache.shape.num_layers)]
        runner.forward(tokens, rows, watch=self.watch, last_only=True)
        for layer, (k, v) in enumerate(before):
            cache.write(layer, slots, k.transpose(1, 2), v.transpose(1, 2))
        self.commit(rows, held)

    def refresh(self, batch: Batch, num_draft_tokens: int, most_behind: int = 0) -> None:
        """The last verification has told."""

    def follow(self, rows: DeviceRows, most: int) -> None:
        """What drafts read is the runner's own cache."""

    def lengths(self, rows: Rows) -> Lengths:
        return self.runner.cache.lengths_of(rows)

    def forward(self, token_ids: Tensor, rows: Rows, settled: Lengths) -> Tensor:
        return self.runner.forward(token_ids, rows, self._choose(rows, settled), settled)

    def _choose(self, rows: Rows, settled: Lengths) -> Chosen:
        """Of one step."""
        made = self._choice
        if made is None or made[0] != rows or not _are_same(made[1], settled):
            if isinstance(settled, Tensor):
                lengths, blocks = settled, self._mass.shape[3]
                most = self.policy.budget // MASS_BLOCK
            else:
                lengths, blocks = upload(settled, self._mass.device), -(-max(settled) // MASS_BLOCK)
                most = max(self.policy.split(length)[1] for length in settled)
            mass = self._mass[:, index_of(rows, self._mass.device), :, :blocks]
            ranges = self.policy.heaviest(lengths, mass, min(most, blocks))
            made = self._choice = rows, settled, Chosen(self.policy, ranges)
        return made[2]

    def rewind(self, rows: Rows, lengths: Lengths) -> None:
        self.runner.truncate(rows, lengths)

    def commit(self, rows: Rows, lengths: Lengths) -> None:
        """The verification of `rows` has ended: what was seen of it is theirs."""
        index = index_of(rows, self._mass.device)
        for layer, mass in self._seen.items():
            self._mass[layer, :, :, : mass.shape[2]].index_copy_(0, index, mass)
        self._seen.clear()
        self._choice = None


def _are_same(a: Lengths, b: Lengths) -> bool:
    """Of lengths that the device alone knows: one object."""
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)
