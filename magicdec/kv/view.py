"""KVView: what attention reads in one forward.

A rule (`Visible`) names a few half-open ranges of the committed context, from the lengths alone.
The uncommitted tail (draft tokens and the forward's own tokens) is always visible as well. Tokens
outside the ranges are not read at all; they are not masked. The nodes of a draft tree (`tree`) see
only their ancestors of the tree.

The sliding window of a model limits every rule: with a window of W tokens, a token at position p
sees only positions p - W + 1 to p. Keys that no token of a forward sees are not read either. Where
some of its tokens see a key and others do not, the backend masks (`attention.backend`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from magicdec.kv.cache import BatchRows, KVCache, Lengths, Rows
from magicdec.kv.tree import DraftTree


class Visible(Protocol):
    """Which committed tokens a forward reads: a policy, or a choice that a policy has made."""

    def ranges(self, committed: Tensor) -> Tensor:
        """Visible token ranges (start, stop) of rows with `committed` [B] tokens: [B, R, 2], or
        [L, B, G, R, 2] where each layer and KV head has its own. They are disjoint and ascending
        and may be empty. Every layer and head of a row sees the same number of tokens."""

    def num_visible(self, committed: int) -> int:
        """The number of tokens in the ranges of a row with `committed` tokens, computed on the
        host."""

    def most_visible(self, committed: int) -> int:
        """An upper bound of `num_visible` for rows of at most `committed` tokens."""
        return self.num_visible(committed)


@dataclass(frozen=True)
class SinksAndWindow(Visible):
    """The first `num_sink_tokens` tokens and the newest ones are visible, at most `budget` in
    all."""

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
    """As `Visible.num_visible` for each row, but counts only tokens from `first_keys` on."""
    ranges = visible.ranges(torch.tensor(committed))  # on the CPU: the host reads the result
    ranges = ranges.clamp(min=torch.tensor(first_keys).view(-1, 1, 1))
    return tuple((ranges[..., 1] - ranges[..., 0]).sum(dim=1).tolist())


def list_cells(ranges: Tensor, size: int) -> Tensor:
    """The first `size` cells in the ranges [B, G or 1, R, 2] of each row: [B, G or 1, size]. Padded
    with -1."""
    stops = (ranges[..., 1] - ranges[..., 0]).cumsum(2)  # where each range ends among the keys
    index = torch.arange(size, device=stops.device).expand(*stops.shape[:2], size).contiguous()
    which = torch.searchsorted(stops, index, right=True)  # the range that key i falls in
    inside = which < ranges.shape[2]
    which = which.clamp(max=ranges.shape[2] - 1)
    before = torch.cat([torch.zeros_like(stops[..., :1]), stops[..., :-1]], dim=2)
    position = ranges[..., 0].gather(2, which) + index - before.gather(2, which)
    return torch.where(inside, position, -1)


Nodes = tuple[Tensor | None, Tensor | None]
NO_NODES: Nodes = (None, None)
WEIGHTS_BLOCK = 16  # keys of a block whose attention weights are summed


@dataclass(frozen=True)
class FullView(Visible):
    """Every committed token is visible, as for the target itself."""

    def ranges(self, committed: Tensor) -> Tensor:
        return torch.stack([torch.zeros_like(committed), committed], dim=1).unsqueeze(1)

    def num_visible(self, committed: int) -> int:
        return committed


FULL = FullView()


class ChosenRanges(Visible):
    """What each layer and KV head sees of one batch is chosen already, whatever the lengths."""

    key_ranges: Tensor  # [L, B, G, R, 2]

    def ranges(self, committed: Tensor) -> Tensor:
        return self.key_ranges


@dataclass(frozen=True)
class KVView:
    """What attention reads for one forward of T new tokens over `rows`.

    Rows hold `seq_lens` tokens before the forward, of which the first `committed` are committed.
    New token t of a row has position seq_lens + t. It sees the ranges and every tail token up to
    itself, but only the last `window` positions of these. With a `tree`, the new tokens are its
    last T nodes, and `tree` says what positions and cells they have. A cell is the place of a token
    in its row of the cache; without a tree it equals the position.

    `lengths` and `num_visible` are the host's numbers. They are exact, except for captured rows,
    where they are upper bounds.
    """

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
    tree: DraftTree | None = None
    offsets: Tensor | None = None  # [rows of the cache]; see `positions`

    @property
    def num_nodes(self) -> int:
        """The number of nodes of the tree; 0 without one."""
        return 0 if self.tree is None else self.tree.num_nodes

    @property
    def nodes(self) -> Nodes:
        """Base and parents of the tree for native code; `NO_NODES` without one."""
        return NO_NODES if self.tree is None else self.tree.tensors

    @property
    def num_tail(self) -> int:
        """The number of nodes of the tree. Without a tree, the number of new tokens."""
        return self.num_nodes or self.num_new

    @property
    def num_cached(self) -> int:
        """The nodes of the tree that the rows hold before the forward. Without a tree, none."""
        return 0 if self.tree is None else self.tree.num_cached(self.num_new)

    @property
    def first_keys(self) -> tuple[int, ...]:
        """The first position of each row that its new tokens may see, on the host."""
        return tuple(first_key(length - self.num_cached, self.window) for length in self.lengths)

    @property
    def per_head(self) -> bool:
        """Whether each layer and KV head has ranges of its own."""
        return self.ranges.ndim == 5

    @property
    def num_weight_blocks(self) -> int:
        """The number of blocks of WEIGHTS_BLOCK positions that the longest row has, its new tokens
        included."""
        return -(-(max(self.lengths) - self.num_cached + self.num_tail) // WEIGHTS_BLOCK)

    @cached_property
    def all_ranges(self) -> Tensor:
        """The ranges, with the tail as the last one, but without the nodes of a tree: [L or 1, B, G
        or 1, R+1, 2]."""
        ranges = self.ranges if self.per_head else self.ranges[None, :, None]
        start, before = self.committed, self.seq_lens if self.tree is None else self.tree.base
        if self.window is not None:
            start = torch.maximum(start, before + 1 - self.window)
        tail = torch.stack(
            [start, before if self.tree is not None else before + self.num_new], dim=1
        )
        tail = tail[None, :, None, None].expand(len(ranges), -1, ranges.shape[2], 1, 2)
        return torch.cat([ranges, tail], dim=3)

    def layer_ranges(self, layer: int) -> Tensor:
        """The ranges that a layer sees, with the tail and the new tokens, but without the nodes of
        a tree: [B, G, R+1, 2], or [B, 1, R+1, 2] if all heads see the same."""
        return self.all_ranges[layer if self.per_head else 0]

    def count_keys(self) -> Tensor:
        """The number of visible keys of each row, its new tokens included: int64 [B]."""
        first_head = self.layer_ranges(0)[:, 0]  # every head sees the same number
        keys = (first_head[..., 1] - first_head[..., 0]).sum(dim=1)
        return keys + self.num_nodes if self.num_nodes else keys

    def reads(self, rows: BatchRows) -> Tensor:
        """What is counted of a captured forward, int64 [B, 2]: the keys that each row reads, and 1;
        two zeros for rows that have ended."""
        return torch.stack([self.count_keys() * rows.active, rows.active], dim=1)

    def positions(self) -> Tensor:
        """Positions of the new tokens in their text, [B, T]. They differ by `offsets` from those in
        the cache if it holds only selected tokens."""
        positions = self.query_positions()
        if self.offsets is None:
            return positions
        return positions + self.offsets[self.row_index].unsqueeze(1)

    def query_positions(self) -> Tensor:
        """Positions of the new tokens, [B, T]."""
        if self.tree is not None:
            return self.tree.positions[:, -self.num_new :]
        return self.seq_lens.unsqueeze(1) + torch.arange(self.num_new, device=self.seq_lens.device)

    def query_cells(self) -> Tensor:
        """Cells of the new tokens, [B, T]."""
        if self.tree is not None:
            return self.tree.node_cells[:, -self.num_new :]
        return self.query_positions()

    def key_positions(self, layer: int = 0) -> Tensor:
        """The positions of the tokens in `key_cells`."""
        cells = self.key_cells(layer)
        return cells if self.tree is None else self.tree.positions_of(cells)

    def key_cells(self, layer: int = 0) -> Tensor:
        """The cells of all visible keys, new tokens included, in ascending order: [B, G, N], or [B,
        1, N] if all heads see the same. Padded with -1 to the longest row. The nodes of a tree come
        last, after the padding."""
        if self.tree is None:
            return list_cells(self.layer_ranges(layer), max(self.num_visible) + self.num_new)
        before = list_cells(self.layer_ranges(layer), self.num_shared(max(self.num_visible)))
        nodes = self.tree.node_cells.unsqueeze(1).expand(-1, before.shape[1], -1)
        return torch.cat([before, nodes], dim=2)

    def num_shared(self, num_visible: int) -> int:
        """Of `num_visible` tokens that a row sees before the forward, those that each of its new
        tokens sees, if there is no sliding window."""
        return num_visible + self.num_new - self.num_tail


def make_view(
    cache: KVCache,
    rows: Rows,
    visible: Visible,
    num_new: int,
    committed: Lengths | Sequence[int] | None = None,
    window: int | None = None,
    tree: DraftTree | None = None,
    offsets: Tensor | None = None,
) -> KVView:
    """The view of `rows` under a rule. `committed` defaults to all tokens that the rows hold, or
    all before the `tree`. A rule whose heads have ranges of their own must keep them within the
    `window` itself."""
    device = cache.seq_lens.device
    rows = BatchRows.of(rows, device)
    lengths_held = cache.lengths_of(rows)
    before = lengths_held if tree is None else lengths_held.plus(-tree.num_cached(num_new))
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
        cache, rows, visible, num_new, before, settled, window, ranges.ndim == 5, tree
    )
    return KVView(
        cache, rows.numbers, rows.index, lengths_held.tensor, start, ranges,
        lengths, num_visible, num_new, is_full, window, tree, offsets,
    )  # fmt: skip


def host_numbers(
    cache: KVCache, rows: BatchRows, visible: Visible, num_new: int, before: Lengths,
    committed: Lengths | None, window: int | None, per_head: bool, tree: DraftTree | None = None,
) -> tuple[tuple[int, ...], tuple[int, ...], bool]:  # fmt: skip
    """`lengths`, `num_visible` and `is_full` of a view of rows that hold `before` tokens."""
    num_tail = num_new if tree is None else tree.num_nodes
    if rows.is_captured:
        bounds = (cache.tokens_per_row - num_tail,) * len(rows)
        seen, is_full = _captured_bounds(bounds, rows, visible, committed is None, window)
    else:
        bounds = before.bounds
        settled = bounds if committed is None else committed.bounds
        seen, is_full = _exact_bounds(bounds, settled, visible, per_head, window)
    lengths = tuple(length + num_tail - num_new for length in bounds)
    return lengths, tuple(count + num_tail - num_new for count in seen), is_full


def _exact_bounds(
    lengths: tuple[int, ...], committed: tuple[int, ...], visible: Visible, per_head: bool,
    window: int | None,
) -> tuple[tuple[int, ...], bool]:  # fmt: skip
    """The number of tokens that each row of these lengths sees, and whether these are all in its
    window."""
    first_keys = tuple(first_key(length, window) for length in lengths)
    is_cut = any(first_keys)
    if is_cut and not per_head:
        visible_counts = num_within(visible, committed, first_keys)
    else:
        visible_counts = tuple(visible.num_visible(c) for c in committed)
    starts = zip(lengths, committed, first_keys, strict=True)
    tails = [length - max(c, first) for length, c, first in starts]
    num_visible = tuple(s + tail for s, tail in zip(visible_counts, tails, strict=True))
    in_window = tuple(length - first for length, first in zip(lengths, first_keys, strict=True))
    # Ranges of single heads are not cut at the window: heads could then see different numbers.
    return num_visible, num_visible == in_window and not (per_head and is_cut)


def _captured_bounds(
    lengths: tuple[int, ...], rows: BatchRows, visible: Visible, is_committed: bool,
    window: int | None,
) -> tuple[tuple[int, ...], bool]:  # fmt: skip
    """The same for captured rows, whose lengths are at most these."""
    assert rows.max_tail is not None, "the rows are captured"
    longest = max(lengths)
    most = visible.most_visible(longest)
    num_visible = min(longest, most if is_committed else most + rows.max_tail)
    return (num_visible,) * len(rows), most == longest and window is None


def first_key(position: int, window: int | None) -> int:
    """The first position that a token at `position` sees."""
    return 0 if window is None else max(0, position + 1 - window)
