"""KVView: the keys that attention reads in a forward.

A rule (`Visible`) names half-open ranges of the committed context by lengths. The uncommitted tail
(drafts and new tokens) is always visible. Other tokens are not read at all.

Under a sliding window of W tokens, position p sees only p - W + 1 to p. Keys that no token sees are
not read; backends mask those that only some see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from magicdec.kv.cache import BatchRows, KVCache, Lengths, Rows


class Visible(Protocol):
    """A rule for the committed tokens that a forward reads."""

    def ranges(self, committed: Tensor) -> Tensor:
        """Visible ranges (start, stop) of rows with `committed` [B] tokens: [B, R, 2], or [L, B,
        G, R, 2] by layer and KV head; disjoint, ascending, maybe empty. All layers and heads of
        a row see equally many tokens."""

    def num_visible(self, committed: int) -> int:
        """Tokens in the ranges of a row, on the host."""

    def most_visible(self, committed: int) -> int:
        """An upper bound of `num_visible` for rows of at most `committed` tokens."""
        return self.num_visible(committed)

    def in_narrow_layers(self) -> Visible:
        """The rule for layers whose window is narrower than that of others. A choice by attention
        is made among what the widest see."""
        return self


@dataclass(frozen=True)
class SinksAndWindow(Visible):
    """A rule that shows `num_sink_tokens` sinks and the newest tokens, at most `budget` in all."""

    num_sink_tokens: int
    budget: int

    def ranges(self, committed: Tensor) -> Tensor:
        sinks = committed.clamp(max=self.num_sink_tokens)
        start = torch.maximum(sinks, committed - (self.budget - self.num_sink_tokens))
        zero = torch.zeros_like(committed)
        return torch.stack([torch.stack([zero, sinks], 1), torch.stack([start, committed], 1)], 1)

    def num_visible(self, committed: int) -> int:
        return min(committed, self.budget)


def num_within(
    visible: Visible, committed: Sequence[int], first_keys: Sequence[int]
) -> tuple[int, ...]:
    """`Visible.num_visible` by row, of tokens from `first_keys` on."""
    ranges = visible.ranges(torch.tensor(committed))  # on the CPU: the host reads the result
    ranges = ranges.clamp(min=torch.tensor(first_keys).view(-1, 1, 1))
    return tuple((ranges[..., 1] - ranges[..., 0]).sum(dim=1).tolist())


def list_positions(ranges: Tensor, size: int) -> Tensor:
    """The first `size` positions in ranges [B, G or 1, R, 2]: [B, G or 1, size], padded with -1."""
    stops = (ranges[..., 1] - ranges[..., 0]).cumsum(2)  # where each range ends among the keys
    index = torch.arange(size, device=stops.device).expand(*stops.shape[:2], size).contiguous()
    which = torch.searchsorted(stops, index, right=True)  # the range that key i falls in
    inside = which < ranges.shape[2]
    which = which.clamp(max=ranges.shape[2] - 1)
    before = torch.cat([torch.zeros_like(stops[..., :1]), stops[..., :-1]], dim=2)
    position = ranges[..., 0].gather(2, which) + index - before.gather(2, which)
    return torch.where(inside, position, -1)


WEIGHTS_BLOCK = 16  # keys of a block whose attention weights are summed


@dataclass(frozen=True)
class FullView(Visible):
    """A rule that shows every committed token."""

    def ranges(self, committed: Tensor) -> Tensor:
        return torch.stack([torch.zeros_like(committed), committed], dim=1).unsqueeze(1)

    def num_visible(self, committed: int) -> int:
        return committed


FULL = FullView()


class ChosenRanges(Visible):
    """A rule of ranges already chosen for one batch."""

    key_ranges: Tensor  # [L, B, G, R, 2]

    def ranges(self, committed: Tensor) -> Tensor:
        return self.key_ranges


@dataclass(frozen=True)
class KVView:
    """The keys of one forward of T new tokens over `rows`.

    Rows hold `seq_lens` tokens, the first `committed` of them committed. New token t has
    position seq_lens + t and sees the ranges and the tail up to itself, within its last `window`
    positions. `lengths` and `num_visible` are the host's; upper bounds for captured rows."""

    cache: KVCache
    rows: tuple[int, ...]
    row_index: Tensor  # [B]
    seq_lens: Tensor  # [B]
    committed: Tensor  # [B]
    ranges: Tensor  # [B, R, 2] or [L, B, G, R, 2]
    lengths: tuple[int, ...]  # seq_lens on the host
    num_visible: tuple[int, ...]  # tokens in the ranges and in the tail before this forward
    num_new: int
    is_full: bool  # every cached token is visible, except those before the window
    window: int | None = None  # most tokens that a token sees, itself included; None: no limit
    offsets: Tensor | None = None  # [rows of the cache]; see `positions`
    is_of_prompt: bool = False  # new tokens are a part of a prompt, whose bits follow from no chunk

    @property
    def first_keys(self) -> tuple[int, ...]:
        """The first position that new tokens of a row may see, on the host."""
        return tuple(first_key(length, self.window) for length in self.lengths)

    @property
    def per_head(self) -> bool:
        return self.ranges.ndim == 5

    @property
    def num_weight_blocks(self) -> int:
        """Blocks of WEIGHTS_BLOCK positions in the longest row with its new tokens."""
        return -(-(max(self.lengths) + self.num_new) // WEIGHTS_BLOCK)

    @cached_property
    def all_ranges(self) -> Tensor:
        """The ranges, then the tail with the new tokens: [L or 1, B, G or 1, R+1, 2]."""
        ranges = self.ranges if self.per_head else self.ranges[None, :, None]
        start = self.committed
        if self.window is not None:
            start = torch.maximum(start, self.seq_lens + 1 - self.window)
        tail = torch.stack([start, self.seq_lens + self.num_new], dim=1)
        tail = tail[None, :, None, None].expand(len(ranges), -1, ranges.shape[2], 1, 2)
        return torch.cat([ranges, tail], dim=3)

    def layer_ranges(self, layer: int) -> Tensor:
        return self.all_ranges[layer if self.per_head else 0]

    def count_keys(self) -> Tensor:
        """Visible keys of each row, new tokens included: int64 [B]."""
        first_head = self.layer_ranges(0)[:, 0]  # every head sees the same number
        return (first_head[..., 1] - first_head[..., 0]).sum(dim=1)

    def reads(self, rows: BatchRows) -> Tensor:
        """Counts of a captured forward, int64 [B, 2]: a row's keys, and 1; zeros for ended rows."""
        return torch.stack([self.count_keys() * rows.active, rows.active], dim=1)

    def positions(self) -> Tensor:
        """Positions of new tokens in their text, [B, T]: those in the cache plus `offsets`."""
        positions = self.query_positions()
        if self.offsets is None:
            return positions
        return positions + self.offsets[self.row_index].unsqueeze(1)

    def query_positions(self) -> Tensor:
        """Positions of new tokens in the cache, [B, T]."""
        return self.seq_lens.unsqueeze(1) + torch.arange(self.num_new, device=self.seq_lens.device)

    def key_positions(self, layer: int = 0) -> Tensor:
        """Ascending cache positions of visible keys, new tokens included: [B, G or 1, N], padded
        with -1."""
        return list_positions(self.layer_ranges(layer), max(self.num_visible) + self.num_new)


def make_view(
    cache: KVCache,
    rows: Rows,
    visible: Visible,
    num_new: int,
    committed: Lengths | Sequence[int] | None = None,
    window: int | None = None,
    offsets: Tensor | None = None,
) -> KVView:
    """The view of `rows` under a rule. `committed` defaults to all tokens. Ranges by head must
    lie within the `window` already."""
    device = cache.seq_lens.device
    rows = BatchRows.of(rows, device)
    before = cache.lengths_of(rows)
    base = before if committed is None else Lengths.of(committed, device)
    start = base.tensor
    if rows.is_captured and committed is not None:
        start = torch.where(rows.active > 0, start, before.tensor)
    ranges = visible.ranges(start)
    if window is not None and ranges.ndim == 3:
        first_keys = (before.tensor + 1 - window).clamp(min=0)
        ranges = torch.maximum(ranges, first_keys.view(-1, 1, 1))
    if rows.is_captured:
        is_row = (-1, 1, 1) if ranges.ndim == 3 else (1, -1, 1, 1, 1)
        ranges = ranges * rows.active.view(is_row)
    settled = None if committed is None else base
    lengths, num_visible, is_full = host_numbers(
        cache, rows, visible, num_new, before, settled, window, ranges.ndim == 5
    )
    return KVView(
        cache,
        rows.numbers,
        rows.index,
        before.tensor,
        start,
        ranges,
        lengths,
        num_visible,
        num_new,
        is_full,
        window,
        offsets,
    )


def host_numbers(
    cache: KVCache,
    rows: BatchRows,
    visible: Visible,
    num_new: int,
    before: Lengths,
    committed: Lengths | None,
    window: int | None,
    per_head: bool,
) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    if rows.is_captured:
        lengths = (cache.tokens_per_row - num_new,) * len(rows)
        seen, is_full = _captured_bounds(lengths, rows, visible, committed is None, window)
    else:
        lengths = before.bounds
        settled = lengths if committed is None else committed.bounds
        seen, is_full = _exact_bounds(lengths, settled, visible, per_head, window)
    return lengths, seen, is_full


def _exact_bounds(
    lengths: tuple[int, ...],
    committed: tuple[int, ...],
    visible: Visible,
    per_head: bool,
    window: int | None,
) -> tuple[tuple[int, ...], bool]:
    first_keys = [first_key(length, window) for length in lengths]
    is_cut = any(first_keys)
    if is_cut and not per_head:
        visible_counts = num_within(visible, committed, first_keys)
    else:
        visible_counts = tuple([visible.num_visible(c) for c in committed])
    starts = zip(lengths, committed, first_keys, strict=True)
    tails = [length - max(c, first) for length, c, first in starts]
    num_visible = tuple([s + tail for s, tail in zip(visible_counts, tails, strict=True)])
    in_window = tuple([length - first for length, first in zip(lengths, first_keys, strict=True)])
    # Ranges of single heads are not cut at the window: heads could then see different numbers.
    return num_visible, num_visible == in_window and not (per_head and is_cut)


def _captured_bounds(
    lengths: tuple[int, ...],
    rows: BatchRows,
    visible: Visible,
    is_committed: bool,
    window: int | None,
) -> tuple[tuple[int, ...], bool]:
    """Bounds for captured rows of at most `lengths` tokens."""
    assert rows.max_tail is not None, "the rows are captured"
    longest = max(lengths)
    most = visible.most_visible(longest)
    num_visible = min(longest, most if is_committed else most + rows.max_tail)
    return (num_visible,) * len(rows), most == longest and window is None


def first_key(position: int, window: int | None) -> int:
    """The first position that a token at `position` sees."""
    return 0 if window is None else max(0, position + 1 - window)
