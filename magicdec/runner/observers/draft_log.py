"""DraftLog: a short digest by row of the tokens that a step's drafts read and proposed, to compare
runs step by step (docs/results.md). Only runs made for their counts keep one, because it costs
time.

It hashes the views that kernels get: a set of positions has one hash, however cut into ranges and
wherever cached.

Shapes: L layers, B rows, G KV heads, R ranges, N tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from magicdec.kv.cache import BatchRows, KVCache
from magicdec.kv.layer_caches import LayerCaches
from magicdec.kv.layer_views import LayerViews
from magicdec.kv.view import KVView
from magicdec.runner.forward_batch import ForwardObserver

Numbers = np.ndarray[Any, np.dtype[np.uint64]]
LogPlaces = np.ndarray[Any, np.dtype[np.int64]]

Digest = tuple[str, int]
"""The hash of drafted tokens, then that of read positions, and the number of keys read."""

MASK = (1 << 64) - 1
NEXT_FORWARD = 0x9E3779B97F4A7C15  # odd: by which the hash of the forwards before is multiplied
DIGITS = 4  # hexadecimal digits of each of the two hashes of a digest


def mixed(numbers: LogPlaces) -> Numbers:
    """A fixed random-looking number of 64 bits for each number (splitmix64)."""
    mix = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(NEXT_FORWARD)
    mix = (mix ^ (mix >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mix = (mix ^ (mix >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mix ^ (mix >> np.uint64(31))


def sums_before(numbers: LogPlaces) -> Numbers:
    """Sums modulo 2^64 of the mixed first 0, 1, ..., N of numbers [..., N]: [..., N + 1]."""
    sums = mixed(numbers).cumsum(axis=-1, dtype=np.uint64)
    return np.concatenate([np.zeros_like(sums[..., :1]), sums], axis=-1)


@dataclass(frozen=True)
class ChosenTokens:
    """The first entries of a cache row that are a selection of its text."""

    sums: Numbers  # [L, G, N + 1] of their positions, as `sums_before`

    def sums_at(self, cells: LogPlaces, text_sums: Numbers, offset: int) -> Numbers:
        """Sums of the positions of entries before `cells` [L, G, R]. Later entries lie `offset`
        cells before their position."""
        num_chosen = self.sums.shape[-1] - 1
        chosen = np.take_along_axis(self.sums, np.minimum(cells, num_chosen), axis=-1)
        later = np.maximum(cells, num_chosen) + offset
        return chosen + text_sums[later] - text_sums[num_chosen + offset]


@dataclass
class RowLog:
    reads: int = 0
    num_read: int = 0
    drafted: tuple[int, ...] = ()

    def digest(self) -> Digest:
        drafted = hashlib.blake2b(" ".join(map(str, self.drafted)).encode()).hexdigest()
        read = hashlib.blake2b(str(self.reads).encode()).hexdigest()
        return drafted[:DIGITS] + read[:DIGITS], self.num_read


def digest_of_ranks(digests: Sequence[Digest]) -> Digest:
    """One digest of all ranks' digests of a row and step: hashes that differ are hashed
    together. The number of keys is that of a drafting rank."""
    texts, numbers = zip(*digests, strict=True)
    parts = zip(*((text[:DIGITS], text[DIGITS:]) for text in texts), strict=True)
    return "".join(map(_common, parts)), max(numbers)


def _common(hashes: Sequence[str]) -> str:
    if len(set(hashes)) == 1:
        return hashes[0]
    return hashlib.blake2b(" ".join(hashes).encode()).hexdigest()[:DIGITS]


@dataclass(eq=False)
class DraftLog(ForwardObserver):
    """The log of a pass, for the running step between `begin` and `digests`. With captured
    forwards there are no digests."""

    is_complete: bool = True
    _rows: dict[int, RowLog] = field(default_factory=dict)
    _chosen: dict[tuple[int, int], ChosenTokens] = field(default_factory=dict)  # by cache and row
    _text_sums: Numbers = field(default_factory=lambda: sums_before(np.arange(4096)))

    def begin(self) -> None:
        self._rows.clear()

    def digests(self, rows: Sequence[int]) -> list[Digest] | None:
        if not self.is_complete:
            return None
        return [self._rows.get(row, RowLog()).digest() for row in rows]

    def on_choice(
        self, caches: LayerCaches, rows: Sequence[int], positions: Sequence[Tensor]
    ) -> None:
        for cache, layers in zip(caches.distinct, caches.windows.layers, strict=True):
            for place, row in enumerate(rows):
                self._chosen.pop((id(cache), row), None)
                if positions:
                    chosen = [positions[layer][place].cpu().numpy() for layer in layers]
                    self._chosen[id(cache), row] = ChosenTokens(sums_before(np.stack(chosen)))

    def drafted(self, rows: Sequence[int], ids: Tensor, counts: Sequence[int]) -> None:
        """Note draft ids [B, K], of which `counts` are no padding."""
        for row, tokens, count in zip(rows, ids.tolist(), counts, strict=True):
            self._rows.setdefault(row, RowLog()).drafted = tuple(tokens[:count])

    def on_draft(
        self, rows: BatchRows, views: LayerViews, offsets: Tensor | None, num_forwards: int
    ) -> None:
        self.is_complete &= not rows.is_captured
        if not self.is_complete:
            return
        view = views.widest
        windows = views.windows
        ranges = [_ranges_of(layer_ranges) for layer_ranges in views.distinct]
        shifts = [0] * len(view.rows) if offsets is None else offsets[view.row_index].tolist()
        for _ in range(num_forwards):
            for place, row in enumerate(view.rows):
                hashed = num_read = 0
                for layer_view, view_ranges, layers in zip(
                    views.distinct, ranges, windows.layers, strict=True
                ):
                    row_ranges = view_ranges[:, place]  # [L or 1, G or 1, R, 2]
                    hashed += self._hash(layer_view.cache, row, row_ranges, shifts[place], layers)
                    keys = int((row_ranges[0, 0, :, 1] - row_ranges[0, 0, :, 0]).sum())
                    num_read += len(layers) * keys
                log = self._rows.setdefault(row, RowLog())
                log.reads = (log.reads * NEXT_FORWARD + hashed) & MASK
                log.num_read += num_read // len(windows.window_indices)
            for view_ranges in ranges:
                view_ranges[..., -1, 1] += 1

    def _hash(
        self, cache: KVCache, row: int, ranges: LogPlaces, offset: int, layers: Sequence[int]
    ) -> int:
        """Of what the `layers` of a cache read."""
        size = len(layers), cache.shape.num_kv_heads
        chosen = self._chosen.get((id(cache), row))
        text_sums = self._sums_of_text(int(ranges.max()) + offset)
        if chosen is None:
            before = text_sums[ranges[..., 0] + offset]
            until = text_sums[ranges[..., 1] + offset]
        else:
            everywhere = np.broadcast_to(ranges, (*size, *ranges.shape[2:]))
            before, until = (
                chosen.sums_at(everywhere[..., end], text_sums, offset) for end in (0, 1)
            )
        head_sums = (until - before).sum(axis=-1, dtype=np.uint64)  # [L or 1, G or 1]
        heads = np.array(layers)[:, None] * size[1] + np.arange(size[1])  # of all layers
        weights = mixed(heads) | np.uint64(1)
        return int((weights * head_sums).sum(dtype=np.uint64))

    def _sums_of_text(self, most: int) -> Numbers:
        if most >= len(self._text_sums):
            self._text_sums = sums_before(np.arange(2 * most))
        return self._text_sums


def _ranges_of(view: KVView) -> LogPlaces:
    """[L or 1, B, G or 1, R, 2]: all ranges that a forward reads, the tail last."""
    ranges: LogPlaces = view.all_ranges.cpu().numpy().copy()
    ranges[..., 1] = np.maximum(ranges[..., 0], ranges[..., 1])
    return ranges
