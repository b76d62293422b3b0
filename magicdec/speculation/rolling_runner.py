"""RollingRunner: a runner under StreamingLLM whose cache is bounded by the budget for any text
length.

Source: arXiv 2309.17453, section 3.2: positions are those within the cache. RoPE depends on
distances alone, so keys in the window keep their rotation, and the sinks are rotated to the
positions before it, from their original values so that no error builds up.

Where rows share prefixes they keep every token, and are read in the same way. What a prompt's chunk
computes follows from the text before its end, since each chunk sees the window before it: a row
that begins at the end of a chunk of another one goes on as if it had computed that itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from magicdec.kv.cache import BatchRows, KVCache, Lengths, upload
from magicdec.kv.forward_counts import ForwardCounts
from magicdec.kv.layer_caches import LayerCaches, Storage
from magicdec.kv.layer_views import LayerWindows
from magicdec.kv.prefix_cache import CachedText
from magicdec.kv.view import SinksAndWindow, Visible
from magicdec.model.elementwise.operators import apply_rope
from magicdec.runner.device_batch import NEWEST
from magicdec.runner.layer_states import LayerStates
from magicdec.runner.model_runner import ModelRunner

BLOCK_SIZE = 64  # tokens: evicting is rare, and little is held past the window
MOST_REWOUND = NEWEST - 1  # tokens by which a row of a draft model is rewound if another lacks more


@dataclass
class RollingRunner(ModelRunner):
    """A runner whose rows, of at most `max_tokens` positions, hold the sinks, the window of
    committed tokens, and at most `max_tail` tokens after it (a prompt chunk, or drafts); or every
    token if rows share prefixes, which they do at multiples of `chunk`, that of prompts."""

    max_tail: int = 0
    block_size: int = BLOCK_SIZE
    most_rewound: int = MOST_REWOUND  # so many tokens are kept before the window
    chunk: int = 1

    def __post_init__(
        self,
        shared_caches: LayerCaches | None,
        shared_counts: ForwardCounts | None,
        shared_states: LayerStates | None,
    ) -> None:
        assert self.max_tail > 0
        assert self.model.config.positions == "rope", "other positions cannot be turned"
        self.rule = cast("SinksAndWindow", self.policy)
        self.num_sinks = self.rule.num_sink_tokens
        self.budget = self.rule.budget
        super().__post_init__(shared_caches, shared_counts, shared_states)
        assert self.states is None, "states do not forget single tokens"
        self.settled = [0] * self.num_rows  # committed tokens at which each row's window ends
        self.evicted = [0] * self.num_rows  # blocks before this one are freed, except the sinks'
        # The keys of the sinks of each cache as they were written, [rows, layers, G, sinks, D].
        self.sinks = list(map(self._room_for_sinks, self.caches.distinct))
        # Where others may have a row's first blocks, its sinks are turned in blocks of its own.
        count = self._sink_blocks() if self.shares_prefixes else 0
        self._own_blocks = [self.caches.reserve(count) for _ in range(self.num_rows)]
        self._reads_own = [False] * self.num_rows
        self._num_adopted = [0] * self.num_rows  # blocks that a row has of others

    def layer_windows(self) -> LayerWindows:
        """The cache is no longer than the widest window (`setup.model_checks`), which therefore is
        none. Narrower ones count the tokens of the text, as in any cache."""
        windows = super().layer_windows()
        by_layer = [None if i == 0 else windows.distinct[i] for i in windows.window_indices]
        return LayerWindows.make(by_layer, self.max_tokens)

    def storages(self) -> list[Storage]:
        """As `ModelRunner.storages`, for the blocks that a row holds at one time, or for all."""
        held = None
        if not self.shares_prefixes:
            held = blocks_held(
                self.max_tokens, self.rule, self.max_tail, self.block_size, self.most_rewound
            )
        storage = rolling_storage(
            self.num_rows, self.max_tokens, self.rule, held, self.num_blocks, self.block_size
        )
        return [storage] * len(self.windows.distinct)

    def allocate(self, row: int) -> None:
        assert not self.cache.blocks[row], "the row was released"
        self.settled[row] = 0
        self.evicted[row] = self._sink_blocks()
        self._reads_own[row] = False

    def begin(self, row: int, text: CachedText, num_tokens: int) -> int:
        self.allocate(row)
        if not self.shares_prefixes:
            return 0
        most = min(num_tokens, self.max_tokens)
        num_shared = self.caches.begin(row, self._lasting(text), most, self.chunk).num_tokens
        self._num_adopted[row] = num_shared // self.block_size
        return num_shared

    def keep(self, row: int, text: CachedText) -> None:
        if self.shares_prefixes:
            self._turn_back(row)
            super().keep(row, self._lasting(text))

    def release(self, row: int, text: CachedText = ()) -> None:
        if text:
            self._turn_back(row)
        super().release(row, self._lasting(text))

    def _lasting(self, text: CachedText) -> CachedText:
        """A prompt without its last tokens, which steps may compute once more, with another
        window."""
        return text[: max(0, len(text) - self.most_rewound)]

    def make_room(
        self,
        rows: BatchRows,
        num_new: int,
        policy: Visible,
        committed: Lengths | Sequence[int] | None,
    ) -> Lengths:
        """Evict and allocate blocks on the host, so that a forward cannot be captured."""
        assert policy == self.policy, "evicted tokens cannot be shown"
        assert not rows.is_captured, "blocks are allocated and freed by the host"
        lengths = self.cache.lengths_of(rows)
        bases = lengths if committed is None else Lengths.of(committed, self.device)
        self._roll(rows.numbers, bases.bounds)
        for row, length, start in zip(rows.numbers, lengths.bounds, bases.bounds, strict=True):
            tail = length + num_new - start
            assert tail <= self.max_tail, "the tail is as long as was announced"
            self.caches.allocate(row, start + tail)
        return bases

    def _roll(self, rows: Sequence[int], settled: Sequence[int]) -> None:
        """Move each row's window to end with its `settled` committed tokens."""
        moves = [(r, s) for r, s in zip(rows, settled, strict=True) if s != self.settled[r]]
        rotations = [(r, s) for r, s in moves if max(s, self.settled[r]) > self.budget]
        if rotations and self.num_sinks:
            self._turn_sinks(rotations)
        for row, length in moves:
            self.settled[row] = length
            start = max(self.num_sinks, length - (self.budget - self.num_sinks))
            last = max(self.num_sinks, start - self.most_rewound) // self.block_size
            gone = self.evicted[row]
            is_held = gone * self.block_size <= start or gone == self._sink_blocks()
            assert is_held, "the window was not evicted"
            if last > gone and not self.shares_prefixes:
                for cache in self.caches.distinct:
                    cache.evict(row, gone, last)
                self.evicted[row] = last

    def _turn_sinks(self, rotations: Sequence[tuple[int, int]]) -> None:
        """Rotate the sinks of (row, settled tokens) pairs to the positions before their windows."""
        rows = upload([row for row, _ in rotations], self.device)
        places = torch.arange(self.num_sinks, device=self.device).expand(len(rotations), -1)
        # While a row fits the budget, its sinks have the positions at which they were written.
        new = [i for i, (row, _) in enumerate(rotations) if self.settled[row] <= self.budget]
        for i in new:
            self._read_own(rotations[i][0])
        by = upload([max(0, s - self.budget) for _, s in rotations], self.device)
        cache_parts = zip(self.caches.distinct, self.windows.layers, self.sinks, strict=True)
        for cache, layers, sinks in cache_parts:
            slots = cache.slots(rows, places)
            if new:
                fresh = upload(new, self.device)
                sinks[rows[fresh]] = cache.read_keys(slots[fresh])
            cache.write_keys(slots, self._turned(sinks[rows], layers, by))

    def _read_own(self, row: int) -> None:
        """Copy the first blocks of a row, if others may have them, to those of its own."""
        if self._reads_own[row]:
            return
        self._reads_own[row] = self.shares_prefixes
        for cache in self.caches.distinct:
            for place, own in enumerate(self._own_blocks[row]):
                cache.copy_block(cache.blocks[row][place], own)
                cache.block_table[row, place] = own

    def _turn_back(self, row: int) -> None:
        """Bring all that a row has in blocks of its own back to those that others may have, with
        the sinks as they were written. They are turned again before the next forward."""
        if not self._reads_own[row]:
            return
        self._reads_own[row] = False
        self.settled[row] = 0
        own_blocks = self._own_blocks[row]
        first = self._num_adopted[row]  # the others are as they were
        rows = upload([row], self.device)
        places = torch.arange(self.num_sinks, device=self.device)[first * self.block_size :]
        for cache, sinks in zip(self.caches.distinct, self.sinks, strict=True):
            blocks = cache.blocks[row][: len(own_blocks)]
            cache.block_table[row, : len(own_blocks)] = upload(blocks, self.device)
            for own, block in list(zip(own_blocks, blocks, strict=True))[first:]:
                cache.copy_block(own, block)
            if len(places):
                slots = cache.slots(rows, places.unsqueeze(0))
                cache.write_keys(slots, sinks[rows][..., places, :])

    def _room_for_sinks(self, cache: KVCache) -> Tensor:
        shape = cache.shape
        return torch.zeros(
            self.num_rows,
            shape.num_layers,
            shape.num_kv_heads,
            self.num_sinks,
            shape.head_dim,
            dtype=cache.k.dtype,
            device=self.device,
        )

    def _turned(self, keys: Tensor, layers: Sequence[int], by: Tensor) -> Tensor:
        """The keys [B, layers, G, sinks, D] of these layers rotated by as many positions [B]."""
        ropes = self.model.ropes
        if len(ropes) == 1:
            (table,) = ropes.values()
            return self._rotated(keys, table[by])
        config = self.model.config
        first = self.model.layers.start
        layer_ropes = [config.rope_of(config.kinds[first + layer]) for layer in layers]
        turned = torch.empty_like(keys)
        for rope, table in ropes.items():
            places = [place for place, layer_rope in enumerate(layer_ropes) if layer_rope == rope]
            index = upload(places, self.device)
            turned.index_copy_(1, index, self._rotated(keys.index_select(1, index), table[by]))
        return turned

    def _rotated(self, keys: Tensor, rows: Tensor) -> Tensor:
        """keys [B, any, G, sinks, D] rotated by rows [B, 2, R/2] of a rotary table."""
        flat = keys.float().view(len(keys), 1, -1, keys.shape[-1])
        rotated = apply_rope(flat, rows.unsqueeze(1), self.model.config.rope.interleaved)
        return rotated.view_as(keys).to(keys.dtype)

    def _sink_blocks(self) -> int:
        return -(-self.num_sinks // self.block_size)


def rolling_storage(
    num_rows: int,
    max_tokens: int,
    policy: SinksAndWindow,
    held: int | None,
    num_blocks: int | None = None,
    block_size: int = BLOCK_SIZE,
) -> Storage:
    """The storage of rows that have at most `held` blocks each; or, if None, of `num_blocks` that
    they share (default: as many as all can need), and own blocks of each for its sinks."""
    per_row = -(-max_tokens // block_size)
    if held is not None:
        return Storage(block_size, per_row, num_rows * held)
    own = -(-policy.num_sink_tokens // block_size)
    return Storage(block_size, per_row, (num_blocks or num_rows * per_row) + num_rows * own)


def blocks_held(
    max_tokens: int,
    policy: SinksAndWindow,
    max_tail: int,
    block_size: int = BLOCK_SIZE,
    most_rewound: int = MOST_REWOUND,
) -> int:
    window = policy.budget - policy.num_sink_tokens + most_rewound + max_tail
    num_blocks = -(-policy.num_sink_tokens // block_size) - (-window // block_size) + 1
    return min(num_blocks, -(-max_tokens // block_size))
