"""LayerCaches: the KV caches of a runner's layers, one for each distinct window, of the same rows.

A layer with a window needs the K and V of its newest tokens only. Where a bound is known on how far
a row may go back, its cache holds no more: rows take blocks as they grow and give back those behind
the window. Source of the idea of one block table for each kind of layer: vLLM's hybrid KV cache
manager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from magicdec.kv.cache import KVCache
from magicdec.kv.layer_views import LayerWindows
from magicdec.kv.pool import CacheShape
from magicdec.kv.prefix_cache import Beginning, CachedText, PrefixCache, SnapshotRoom, TextBlock

WINDOW_BLOCK = 64  # tokens of a block, unless a backend needs more: little is held past the window
FORK_BLOCK = 16  # the same of rows that fork, each of which copies a block


@dataclass(frozen=True)
class WindowRoom:
    """What a row may need of a layer beside its window: `rewound`, the most tokens by which it is
    truncated, and `new`, the most that a forward appends."""

    rewound: int
    new: int


@dataclass(frozen=True)
class Storage:
    """The blocks of a cache: the tokens of each, how many a row addresses, and all.

    `held` is the window of a cache whose rows hold no more than it and its room."""

    block_size: int
    blocks_per_row: int
    num_blocks: int
    held: int | None = None

    @property
    def num_tokens(self) -> int:
        return self.block_size * self.num_blocks


@dataclass(frozen=True)
class Forks:
    """The last `num_rows` rows of a cache, which fork the texts of the others at neighbouring
    positions (`KVCache.fork`), and have room for `num_tokens` each beside these."""

    num_rows: int
    num_tokens: int

    def num_blocks(self, num_texts: int, block: int) -> int:
        """The most blocks that they take beside those of the texts: one that is copied, and more
        for those whose room ends in the next."""
        num_whole, rest = divmod(self.num_tokens, block)
        return self.num_rows * (1 + num_whole) + rest * (-(-self.num_rows // block) + num_texts)


def storages_of(
    windows: Sequence[int | None],
    room: WindowRoom | None,
    num_rows: int,
    max_tokens: int,
    block_size: Callable[[int], int],
    block_tokens: int | None = None,
    num_blocks: int | None = None,
    forks: Forks | None = None,
) -> list[Storage]:
    """The storage of layers with each of the windows, for rows of at most `max_tokens`.

    It keeps every token, in blocks of about `block_tokens` (default: whatever the backend prefers)
    and `num_blocks` in all (default: as many as all rows can need, of which `forks` share those of
    others), unless the window has `room` and less is held so. `block_size`: see
    `AttentionBackend`."""
    if forks is not None:
        block_tokens = FORK_BLOCK
    size = block_size(block_tokens or max_tokens)
    per_row = -(-max_tokens // size)
    if forks is not None:
        num_texts = num_rows - forks.num_rows
        num_blocks = num_texts * per_row + forks.num_blocks(num_texts, size)
    everything = Storage(size, per_row, num_blocks or num_rows * per_row)
    storages = [everything] * len(windows)
    for place, window in enumerate(windows):
        if window is None or room is None:
            continue
        small = block_size(WINDOW_BLOCK)
        held = -(-(window - 1 + room.rewound + room.new) // small) + 1
        rolling = Storage(small, -(-max_tokens // small), num_rows * held, window)
        if rolling.num_tokens < everything.num_tokens:
            storages[place] = rolling
    return storages


@dataclass
class HostMoves:
    """Blocks that were copied to host memory, and from there."""

    num_out: int = 0
    num_in: int = 0


@dataclass(frozen=True)
class LayerCaches:
    """The caches of layers with the `windows`, in the order of the distinct ones. `held`: see
    `Storage`."""

    windows: LayerWindows
    distinct: tuple[KVCache, ...]
    held: tuple[int | None, ...]
    rewound: int = 0
    prefixes: PrefixCache | None = None  # None: texts share no blocks
    moves: HostMoves = field(default_factory=HostMoves)

    @classmethod
    def of(
        cls,
        windows: LayerWindows,
        storages: Sequence[Storage],
        shape: Callable[[int, Storage], CacheShape],
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        rewound: int = 0,
        shares_prefixes: bool = False,
        num_places: int = 0,
        snapshots: SnapshotRoom | None = None,
    ) -> LayerCaches:
        """`shape` of so many layers with a storage. Rows share blocks if it `shares_prefixes`, of
        which `num_places` may go to host memory, and begin at `snapshots`, if there is room."""
        caches = list[KVCache]()
        for num_layers, storage in zip(windows.num_layers, storages, strict=True):
            cache = KVCache(
                shape(num_layers, storage),
                num_rows=num_rows,
                blocks_per_row=storage.blocks_per_row,
                dtype=dtype,
                device=device,
                beside=caches[0] if caches else None,
            )
            caches.append(cache)
        held = tuple(kept.held for kept in storages)
        prefixes = None
        if shares_prefixes:
            assert not any(held), "what a window has lost cannot be shared"
            prefixes = PrefixCache(caches[0].shape.block_size, num_places, snapshots)
        for cache in caches:
            if num_places:
                cache.offload(num_places)
        return cls(windows, tuple(caches), held, rewound, prefixes)

    @property
    def limits(self) -> tuple[int, int | None]:
        """The block size of the caches that keep every token, and their number of blocks; None if
        none does, so that every row has room."""
        shape = self.distinct[0].shape
        return shape.block_size, None if self.held[0] is not None else shape.num_blocks

    @property
    def num_bytes(self) -> int:
        return sum(cache.num_bytes for cache in self.distinct)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's K and V in all layers and heads of this rank."""
        return sum(cache.bytes_per_token for cache in self.distinct)

    def cache_of(self, layer: int) -> tuple[KVCache, int]:
        """The cache of a layer, and the layer's number in it."""
        return self.distinct[self.windows.window_indices[layer]], self.windows.numbers[layer]

    def fill(self, number: float) -> None:
        """Write `number` everywhere, in place of zeros, whose pages a system may share."""
        for cache in self.distinct:
            for pool in (cache.k, cache.v):
                pool.fill_(number)

    def allocate(self, row: int, num_tokens: int) -> None:
        """Give `row` blocks for `num_tokens` in the caches that keep every token. Raises ValueError
        when a pool is exhausted."""
        if self.prefixes is not None:
            first = self.distinct[0]
            lacking = -(-num_tokens // first.shape.block_size) - len(first.blocks[row])
            self._evict(self.prefixes, lacking - first.num_free)
        for cache, held in zip(self.distinct, self.held, strict=True):
            if held is None:
                cache.allocate(row, num_tokens)

    def reserve(self, count: int) -> list[int]:
        """Blocks that no row is given, the same in all caches."""
        reserved = [cache.reserve(count) for cache in self.distinct]
        return reserved[0]

    def release(self, row: int, text: CachedText = ()) -> None:
        """Empty `row`. Blocks of `text`, the tokens that it has computed, stay for rows whose texts
        begin alike."""
        kept: set[int] = set()
        if self.prefixes is not None:
            first = self.distinct[0]
            kept = self.prefixes.leave(row, text[: first.lengths[row]], first.blocks[row])
        for cache in self.distinct:
            cache.release(row, kept)
        self._give_back_replaced()

    def fork(self, row: int, source: int, length: int, num_tokens: int) -> None:
        """Let an empty row begin with the first `length` tokens of `source`, at least one, with
        room for `num_tokens` in all. `source` has to keep them until the row is released."""
        for cache in self.distinct:
            cache.fork(row, source, length, num_tokens)
        self.distinct[0].advance([row], length)

    def adopt(self, row: int, beginning: Beginning) -> None:
        """Let an empty row begin with the path that it holds in `prefixes`, of which blocks in host
        memory come back."""
        for node in beginning.path:
            if node.place is not None:
                self._bring_back(node)
        blocks = [node.block for node in beginning.path]
        for cache in self.distinct:  # all have given the same blocks to the same rows
            cache.adopt(row, blocks)
        first = self.distinct[0]
        first.advance([row], len(blocks) * first.shape.block_size)

    def copy_beginning(self, row: int, beginning: Beginning) -> None:
        """Copy the block that `row` holds as a source in `prefixes`, if any, to the block that it
        has for this. What it does not take is overwritten by its next tokens."""
        assert self.prefixes is not None, "beginnings are of these"
        if beginning.source is None:
            return
        source = beginning.source
        own = self.distinct[0].blocks[row][len(beginning.path)]
        if source.place is not None:
            self._load(source.place, own)
        else:
            for cache in self.distinct:
                cache.copy_block(source.block, own)
        self.distinct[0].advance([row], beginning.num_copied)
        self.prefixes.copied(row)

    def begin(self, row: int, text: CachedText, num_tokens: int, step: int = 1) -> Beginning:
        """Give an empty row what `prefixes` has of `text`, and room for `num_tokens`. Returns what
        it has, fewer tokens than `text`; with a `step`, a multiple of it in whole blocks."""
        assert self.prefixes is not None, "asked of caches that share"
        first = self.distinct[0]
        beginning = self.prefixes.find(text)
        if step > 1:
            beginning = beginning.in_multiples_of(step)
        num_blocks = -(-num_tokens // first.shape.block_size)
        num_free = first.num_free + len(self.prefixes)
        beginning = beginning.that_fits(num_free, num_blocks)
        self.prefixes.adopt(row, beginning)
        self.adopt(row, beginning)
        self.allocate(row, num_tokens)
        self.copy_beginning(row, beginning)
        return beginning

    def keep(self, row: int, text: CachedText) -> None:
        """Let other rows begin with the blocks of `row`, which holds the tokens of `text`."""
        if self.prefixes is not None:
            first = self.distinct[0]
            self.prefixes.keep(row, text[: first.lengths[row]], first.blocks[row])
            self._give_back_replaced()

    def forget_prefixes(self) -> None:
        """Forget what no row holds, and what has moved so far."""
        self.moves.num_out = self.moves.num_in = 0
        if self.prefixes is not None:
            self._give_back(self.prefixes.clear())

    def _evict(self, prefixes: PrefixCache, count: int) -> None:
        """Give rows `count` blocks that none holds, or all. Some go to host memory."""
        blocks = prefixes.evict(count)
        for block, place in prefixes.take_moved():
            self.moves.num_out += 1
            for cache in self.distinct:
                assert cache.host is not None, "it has room"
                cache.host.save(block, place)
        self._give_back(blocks)

    def _bring_back(self, node: TextBlock) -> None:
        """Copy a node that is held from host memory to a block."""
        assert self.prefixes is not None and node.place is not None, "it is away"
        if not self.distinct[0].num_free:
            self._evict(self.prefixes, 1)
        (block,) = self.reserve(1)
        self._load(node.place, block)
        self.prefixes.come_back(node, block)

    def _load(self, place: int, block: int) -> None:
        self.moves.num_in += 1
        for cache in self.distinct:
            assert cache.host is not None, "it is there"
            cache.host.load(place, block)

    def _give_back_replaced(self) -> None:
        if self.prefixes is not None:
            self._give_back(self.prefixes.take_replaced())

    def _give_back(self, blocks: Sequence[int]) -> None:
        for cache in self.distinct:
            cache.give_back(blocks)

    def make_room(self, rows: Sequence[int], num_new: int) -> None:
        """Move what caches hold of `rows` to a forward of `num_new` tokens. The host has to know
        their lengths.

        Raises AssertionError for a row that was truncated behind what a window still holds."""
        for cache, window in zip(self.distinct, self.held, strict=True):
            if window is None:
                continue
            for row in rows:
                length = cache.lengths[row]
                seen = max(0, length + 1 - window)
                assert seen >= cache.first_held[row], (
                    f"row {row} went back to {length} tokens, and layers with a window of {window} "
                    f"hold none before {cache.first_held[row]}"
                )
                cache.hold(row, max(0, seen - self.rewound), length + num_new)

    def read(self, layer: int, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of a layer's K and V at positions [B, N] or, by KV head, [B, G or 1, N] of `rows`
        [B]: two [B, G, N, D]."""
        cache, number = self.cache_of(layer)
        return cache.read(number, cache.slots(rows, positions))

    def write(self, layer: int, rows: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [B, G, N, D], as `read` returns them."""
        cache, number = self.cache_of(layer)
        cache.write(number, cache.slots(rows, positions), k.transpose(1, 2), v.transpose(1, 2))

    @contextmanager
    def unchanged(self, rows: Tensor, positions: Tensor) -> Iterator[None]:
        """Within the block forwards may write other K and V at positions [B, N] of `rows` [B];
        after it these are bitwise what they were."""
        layers = range(len(self.windows.window_indices))
        entries = [self.read(layer, rows, positions) for layer in layers]
        yield
        for layer, (k, v) in enumerate(entries):
            self.write(layer, rows, positions, k, v)

    def copy_from(self, other: LayerCaches, rows: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy all layers' K and V of `rows` [B] from positions `source` [B, N] of `other` to
        positions `target`. Sources of a repeated target must be equal."""
        if len(self.distinct) == len(other.distinct) == 1:
            (from_cache,) = other.distinct
            (to_cache,) = self.distinct
            from_slots = from_cache.slots(rows, source)
            to_cache.copy_from(from_cache, from_slots, to_cache.slots(rows, target))
            return
        for layer in range(len(self.windows.window_indices)):
            self.write(layer, rows, target, *other.read(layer, rows, source))
