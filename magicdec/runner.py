"""ModelRunner: one model, its KV cache and its attention backend on one rank group. `forward` and
`truncate`, no more.

Owns the meeting of model, cache and backend. Must not know what the tokens are for: drafting,
verification and decoding are the same call with another policy or another T.

Shapes: B rows, T new tokens, V vocabulary rows on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from magicdec.attention.backend import AttentionBackend
from magicdec.distributed.groups import Group
from magicdec.kv.cache import CacheShape, KVCache
from magicdec.kv.full import FullKV
from magicdec.kv.policy import Visible, make_view
from magicdec.model.transformer import Transformer

FULL = FullKV()

Watch = Callable[[int, Tensor], None]
"""Told of each layer of a forward where its attention went: (layer, mass [B, G, blocks]), as
`AttentionBackend.run_with_mass` gives it."""


@dataclass
class ForwardCounts:
    """Forwards run so far and what they read, for this rank's model; the roofline is computed from
    these."""

    num_forwards: int = 0
    num_tokens: int = 0
    kv_tokens_read: int = 0  # visible keys, new ones included, summed over rows and forwards

    def copy(self) -> ForwardCounts:
        return replace(self)

    def minus(self, other: ForwardCounts) -> ForwardCounts:
        return ForwardCounts(
            self.num_forwards - other.num_forwards,
            self.num_tokens - other.num_tokens,
            self.kv_tokens_read - other.kv_tokens_read,
        )


@dataclass
class ModelRunner:
    """`model` with set positions; `num_rows` sequences of at most `max_tokens` cached tokens
    each."""

    model: Transformer
    backend: AttentionBackend
    group: Group
    num_rows: int
    max_tokens: int
    cache: KVCache = field(init=False)
    counts: ForwardCounts = field(init=False, default_factory=ForwardCounts)

    def __post_init__(self) -> None:
        weight = next(self.model.parameters())
        self.device, dtype = weight.device, weight.dtype
        config = self.model.config
        block_size = self.backend.block_size(self.max_tokens)
        blocks_per_row = -(-self.max_tokens // block_size)
        _, (first, last) = self.model.shard.heads(config.num_heads, config.num_kv_heads)
        shape = CacheShape(
            num_layers=len(self.model.layers),
            num_kv_heads=last - first,
            head_dim=config.head_dim,
            block_size=block_size,
            num_blocks=self.num_rows * blocks_per_row,
        )
        self.cache = KVCache(shape, self.num_rows, blocks_per_row, dtype, self.device)
        self.model.set_positions(self.max_tokens, self.device)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        rows: Sequence[int],
        policy: Visible = FULL,
        committed: Sequence[int] | None = None,
        last_only: bool = False,
        watch: Watch | None = None,
    ) -> Tensor:
        """Append token_ids [B, T] to `rows` and return this rank's logits [B, T, V] ([B, 1, V] with
        `last_only`).

        `policy` says what is visible of the first `committed` tokens of each row (default: all it
        holds).
        """
        num_new = token_ids.shape[1]
        view = make_view(self.cache, rows, policy, num_new, committed)
        self.backend.plan(view)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            index = layer - self.model.layers.start
            if watch is None:
                return self.backend.run(index, q, k, v, view)
            out, mass = self.backend.run_with_mass(index, q, k, v, view)
            watch(index, mass)
            return out

        logits = self.model(
            token_ids, view.query_positions(), attend, self.group.all_reduce, last_only
        )
        self.cache.advance(rows, num_new)
        self.counts.num_forwards += 1
        self.counts.num_tokens += token_ids.numel()
        self.counts.kv_tokens_read += sum(view.num_visible) + num_new * len(rows)
        return logits

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Forget what `rows` hold past `lengths` tokens."""
        self.cache.truncate(rows, lengths)
