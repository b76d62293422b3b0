"""KVPolicy: which cached tokens a forward may read, as arithmetic on lengths; and KVView, the
answer for one batch.

A policy names at most a few half-open ranges of the committed context; the uncommitted tail (draft
tokens in flight and the forward's own tokens) is always visible on top of them. What a policy
leaves out is not read; nothing is masked away.

A model with a sliding window of W tokens bounds all of this from below: a token at position p sees
p - W + 1 .. p and nothing before, whatever the policy. What no token of a forward sees is not read
either; between the first and the last of them the backend masks (`attention.backend`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from magicdec.config.sections import KVSection
from magicdec.kv.cache import KVCache
from magicdec.kv.device_rows import DeviceRows, Lengths, Rows, upload
from magicdec.names import KV_POLICIES, load_named

MASS_BLOCK = 16  # keys, from a multiple of it on, whose attention probability is summed up


class Visible(Protocol):
    """Which committed tokens a forward reads: a policy, or the choice one has made."""

    def ranges(self, committed: Tensor) -> Tensor:
        """Visible token ranges (start, stop) of rows with `committed` [B] tokens, disjoint and
        ascending, some perhaps empty: [B, R, 2], or [L, B, G, R, 2] where each layer and KV head
        has its own, as many tokens in each."""
        ...

    def num_visible(self, committed: int) -> int:
        """Committed tokens a row of that length reads: the sum of its ranges, computed on the
        host."""
        ...

    def most_visible(self, committed: int) -> int:
        """No row of at most that many committed tokens reads more."""
        ...


class KVPolicy(Protocol):
    """Implementations are dataclasses: their repr goes into the record. `reader` names how a draft
    reads under it (`names.DRAFT_READERS`)."""

    reader: ClassVar[str]

    @classmethod
    def build(cls, kv: KVSection) -> KVPolicy: ...


class RangePolicy(KVPolicy, Visible, Protocol):
    """A policy whose choice is arithmetic on lengths."""


def make_policy(kv: KVSection) -> KVPolicy:
    """The policy that a run's KV section names."""
    policy: KVPolicy = load_named(KV_POLICIES, kv.policy).build(kv)
    return policy


@dataclass(frozen=True)
class KVView:
    """What attention reads for one forward of T new tokens over `rows`.

    Rows hold `seq_lens` tokens before the forward, the first `committed` of them settled. New token
    t of a row stands at position seq_lens + t and sees the policy's ranges of the committed tokens
    and every tail token up to itself, of all these the last `window` positions.

    Of `DeviceRows` the host knows no lengths: `lengths` and `num_visible` are then what no row
    exceeds.
    """

    cache: KVCache
    rows: tuple[int, ...]
    row_index: Tensor  # [B]
    seq_lens: Tensor  # [B]
    committed: Tensor  # [B]
    ranges: Tensor  # [B, R, 2] or [L, B, G, R, 2]
    lengths: tuple[int, ...]  # seq_lens on the host
    num_visible: tuple[int, ...]  # policy tokens plus tail before this forward, on the host
    num_new: int
    is_full: bool  # every cached token of every row is visible, but for those before the window
    window: int | None = None  # tokens that a new one sees at most, itself included; None: all

    @property
    def first_keys(self) -> tuple[int, ...]:
        """The first position that any new token of each row may see, on the host."""
        return tuple(first_key(length, self.window) for length in self.lengths)

    @property
    def per_head(self) -> bool:
        """Each layer and KV head has ranges of its own."""
        return self.ranges.ndim == 5

    @property
    def num_mass_blocks(self) -> int:
        """Blocks of MASS_BLOCK positions that hold all keys of the longest row, new ones
        included."""
        return -(-(max(self.lengths) + self.num_new) // MASS_BLOCK)

    @cached_property
    def _visible(self) -> Tensor:
        """All ranges with the tail as the last: [L or 1, B, G or 1, R+1, 2]."""
        ranges = self.ranges if self.per_head else self.ranges[None, :, None]
        start = self.committed
        if self.window is not None:
            start = torch.maximum(start, self.seq_lens + 1 - self.window)
        tail = torch.stack([start, self.seq_lens + self.num_new], dim=1)
        tail = tail[None, :, None, None].expand(len(ranges), -1, ranges.shape[2], 1, 2)
        return torch.cat([ranges, tail], dim=3)

    def layer_ranges(self, layer: int) -> Tensor:
        """What a layer sees, tail and new tokens included: [B, G, R+1, 2], or [B, 1, R+1, 2] where
        the heads see the same."""
        return self._visible[layer if self.per_head else 0]

    def count_keys(self) -> Tensor:
        """Visible keys of each row, its new tokens included: int64 [B]."""
        first_head = self.layer_ranges(0)[:, 0]  # every head sees as many
        return (first_head[..., 1] - first_head[..., 0]).sum(dim=1)

    def query_positions(self) -> Tensor:
        """Positions of the new tokens, [B, T]."""
        return self.seq_lens.unsqueeze(1) + torch.arange(self.num_new, device=self.seq_lens.device)

    def key_positions(self, layer: int = 0) -> Tensor:
        """Positions of all visible keys, new tokens included, ascending: [B, G, N], or [B, 1, N]
        where the heads see the same; padded with -1 to the longest row."""
        size = max(self.num_visible) + self.num_new
        ranges = self.layer_ranges(layer)
        stops = (ranges[..., 1] - ranges[..., 0]).cumsum(2)  # where each range ends among the keys
        index = torch.arange(size, device=stops.device).expand(*stops.shape[:2], size).contiguous()
        which = torch.searchsorted(stops, index, right=True)  # the range that key i falls in
        inside = which < ranges.shape[2]
        which = which.clamp(max=ranges.shape[2] - 1)
        before = torch.cat([torch.zeros_like(stops[..., :1]), stops[..., :-1]], dim=2)
        position = ranges[..., 0].gather(2, which) + index - before.gather(2, which)
        return torch.where(inside, position, -1)


def make_view(
    cache: KVCache,
    rows: Rows,
    policy: Visible,
    num_new: int,
    committed: Lengths | None = None,
    window: int | None = None,
) -> KVView:
    """The view of `rows` under `policy`. `committed` defaults to all that the rows hold. With a
    `window` a policy whose heads have ranges of their own keeps within it by itself."""
    if isinstance(rows, DeviceRows):
        return _device_view(cache, rows, policy, num_new, committed, window)
    lengths = tuple(cache.lengths[row] for row in rows)
    settled = lengths if committed is None else tuple(int(c) for c in committed)
    device = cache.seq_lens.device
    row_index = upload(list(rows), device)
    settled_tensor = upload(settled, device)
    ranges = policy.ranges(settled_tensor)
    seen = tuple(policy.num_visible(c) for c in settled)
    first_keys = tuple(first_key(length, window) for length in lengths)
    if any(first_keys) and ranges.ndim == 3:
        ranges = ranges.clamp(min=upload(first_keys, device).view(-1, 1, 1))
        seen = num_within(policy, settled, first_keys)
    starts = zip(lengths, settled, first_keys, strict=True)
    tails = [length - max(c, first) for length, c, first in starts]
    num_visible = tuple(s + tail for s, tail in zip(seen, tails, strict=True))
    in_window = tuple(length - first for length, first in zip(lengths, first_keys, strict=True))
    # Ranges of each head are not cut at the window: as many need not be the same.
    is_cut = ranges.ndim == 5 and any(first_keys)
    return KVView(
        cache=cache,
        rows=tuple(rows),
        row_index=row_index,
        seq_lens=cache.seq_lens[row_index],
        committed=settled_tensor,
        ranges=ranges,
        lengths=lengths,
        num_visible=num_visible,
        num_new=num_new,
        is_full=num_visible == in_window and not is_cut,
        window=window,
    )


def _device_view(
    cache: KVCache,
    rows: DeviceRows,
    policy: Visible,
    num_new: int,
    committed: Lengths | None,
    window: int | None,
) -> KVView:
    """As `make_view`, by tensors alone; rows that are not active see nothing but new tokens."""
    seq_lens = cache.seq_lens[rows.index]
    settled = seq_lens
    if committed is not None:
        assert isinstance(committed, Tensor), "the host knows no length of such rows"
        settled = torch.where(rows.active, committed, seq_lens)
    ranges = policy.ranges(settled)
    if window is not None and ranges.ndim == 3:
        first_keys = (seq_lens + 1 - window).clamp(min=0)
        ranges = torch.maximum(ranges, first_keys.view(-1, 1, 1))
    is_row = (-1, 1, 1) if ranges.ndim == 3 else (1, -1, 1, 1, 1)
    longest = cache.tokens_per_row - num_new
    most = policy.most_visible(longest)
    in_view = min(longest, most if committed is None else most + rows.max_tail)
    return KVView(
        cache=cache,
        rows=rows.numbers,
        row_index=rows.index,
        seq_lens=seq_lens,
        committed=settled,
        ranges=ranges * rows.active.view(is_row),
        lengths=(longest,) * len(rows),
        num_visible=(in_view,) * len(rows),
        num_new=num_new,
        is_full=most == longest and window is None,
        window=window,
    )


def first_key(position: int, window: int | None) -> int:
    """The first position that a token at `position` sees."""
    return 0 if window is None else max(0, position + 1 - window)


def num_within(
    policy: Visible, committed: Sequence[int], first_keys: Sequence[int]
) -> tuple[int, ...]:
    """As the policy's `num_visible`, a number a row, of the tokens from `first_keys` on."""
    ranges = policy.ranges(torch.tensor(committed))  # on the host, as this is asked
    ranges = ranges.clamp(min=torch.tensor(first_keys).view(-1, 1, 1))
    return tuple((ranges[..., 1] - ranges[..., 0]).sum(dim=1).tolist())
