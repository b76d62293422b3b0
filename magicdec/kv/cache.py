"""KVCache: the rows of the KV cache of layers with one window, their blocks and their lengths, on
the device and as the host knows them. Source: PagedAttention, arXiv 2309.06180, section 4.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from magicdec.kv.pool import CacheShape, KVPool

EVICTED = -1  # in `KVCache.blocks`: the row gave this block back; tokens after it stay


def upload(values: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor of host numbers. On CUDA it goes through pinned memory, because a copy from
    pageable memory would wait for the device."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


@dataclass(frozen=True)
class BatchRows:
    """The rows of the cache that a forward appends to, as device tensors.

    `max_tail` is None if the host knows all lengths. In a captured step it knows only that rows
    have at most `max_tail` uncommitted tokens before a forward. Ended rows of a captured batch
    (`active` 0) are computed, but read no context and keep their length."""

    numbers: tuple[int, ...]
    index: Tensor  # int64 [B], the same numbers
    active: Tensor  # int64 [B]: 1, or 0 for rows that have ended
    max_tail: int | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def is_captured(self) -> bool:
        return self.max_tail is not None

    @classmethod
    def of(cls, rows: Rows, device: torch.device, max_tail: int | None = None) -> BatchRows:
        if isinstance(rows, BatchRows):
            return rows
        index = upload(list(rows), device)
        return cls(tuple(rows), index, torch.ones_like(index), max_tail)


Rows = BatchRows | Sequence[int]


@dataclass(frozen=True)
class Lengths:
    """Token counts by row on the device, with upper bounds on the host, exact unless captured or
    between a verification and the reading of its result."""

    tensor: Tensor  # int64 [B]
    bounds: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Lengths | Sequence[int], device: torch.device) -> Lengths:
        if isinstance(lengths, Lengths):
            return lengths
        bounds = tuple(int(length) for length in lengths)
        return cls(upload(bounds, device), bounds)

    def plus(self, count: int) -> Lengths:
        return Lengths(self.tensor + count, tuple(bound + count for bound in self.bounds))


class KVCache(KVPool):
    """A pool whose blocks belong to rows through `block_table`.

    `beside`: the cache of other layers of the same rows, whose lengths are also those of this."""

    def __init__(
        self,
        shape: CacheShape,
        num_rows: int,
        blocks_per_row: int,
        dtype: torch.dtype,
        device: torch.device,
        beside: KVCache | None = None,
    ) -> None:
        super().__init__(shape, dtype, device)
        self.block_table = torch.zeros(num_rows, blocks_per_row, dtype=torch.int64, device=device)
        if beside is None:
            self.seq_lens = torch.zeros(num_rows, dtype=torch.int64, device=device)
            self.lengths = [0] * num_rows  # the same on the host, as it last knew them
        else:
            self.seq_lens = beside.seq_lens
            self.lengths = beside.lengths
        self.first_held = [0] * num_rows  # positions of a row before this one are gone
        self.blocks: list[list[int]] = [[] for _ in range(num_rows)]
        self.num_borrowed = [0] * num_rows  # first blocks of a row that it has of another
        self._free = list(range(shape.num_blocks - 1, -1, -1))

    @property
    def tokens_per_row(self) -> int:
        """Positions that a row's block table addresses."""
        return self.block_table.shape[1] * self.shape.block_size

    def allocate(self, row: int, num_tokens: int) -> None:
        """Give `row` blocks for `num_tokens`, filled with zeros: kernels may read masked slots,
        and 0 * NaN is NaN. Raises ValueError when the pool is exhausted."""
        num_blocks = -(-num_tokens // self.shape.block_size) - len(self.blocks[row])
        if num_blocks > len(self._free):
            raise ValueError(
                f"KV cache exhausted: row {row} needs {num_blocks} more blocks, "
                f"{len(self._free)} are free"
            )
        if num_blocks > 0:
            new = [self._free.pop() for _ in range(num_blocks)]
            first = len(self.blocks[row])
            index = upload(new, self.block_table.device)
            self.block_table[row, first : first + num_blocks] = index
            self.blocks[row] += new
            for pool in (self.k, self.v):
                pool[:, index] = 0  # torch has no `index_fill_` of FP8

    def reserve(self, count: int) -> list[int]:
        """Blocks that no row is given."""
        return [self._free.pop() for _ in range(count)]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def give_back(self, blocks: Sequence[int]) -> None:
        """Let rows have `blocks`, which none has."""
        self._free.extend(blocks)

    def adopt(self, row: int, blocks: Sequence[int]) -> None:
        """Let an empty row begin with `blocks`, which others may have too."""
        assert not self.blocks[row], "the row was released"
        self.blocks[row] += blocks
        if blocks:
            self.block_table[row, : len(blocks)] = upload(blocks, self.block_table.device)

    def fork(self, row: int, source: int, length: int, num_tokens: int) -> None:
        """Let an empty row begin with the blocks of the first `length` tokens of `source`, and room
        for `num_tokens` in all. The last of these is copied, so that its tokens can change."""
        num_borrowed = (length - 1) // self.shape.block_size
        borrowed = self.blocks[source][:num_borrowed]
        self.adopt(row, borrowed)
        self.num_borrowed[row] = num_borrowed
        self.allocate(row, num_tokens)
        self.copy_block(self.blocks[source][num_borrowed], self.blocks[row][num_borrowed])

    def release(self, row: int, kept: Collection[int] = ()) -> None:
        """Return the blocks of `row` to the pool, but for the `kept` ones, and those of the row
        that it forks."""
        own = self.blocks[row][self.num_borrowed[row] :]
        gone = (block for block in reversed(own) if block not in kept)
        self._free.extend(block for block in gone if block != EVICTED)
        self.blocks[row].clear()
        self.num_borrowed[row] = 0
        self.first_held[row] = 0
        self.truncate([row], [0])

    def hold(self, row: int, first: int, num_tokens: int) -> None:
        """Give `row` blocks for positions `first` to `num_tokens` - 1, and take those before it.
        Raises ValueError when the pool is exhausted."""
        num_before = first // self.shape.block_size
        num_gone = self.first_held[row] // self.shape.block_size
        blocks = self.blocks[row]
        is_moved = num_before > num_gone
        if is_moved:
            self.evict(row, min(num_gone, len(blocks)), min(num_before, len(blocks)))
            blocks += [EVICTED] * (num_before - len(blocks))  # of tokens that were never written
            self.first_held[row] = num_before * self.shape.block_size
        self.allocate(row, num_tokens)
        if is_moved:  # a kernel may read the first token in place of padding
            self.block_table[row, :num_before] = blocks[num_before]

    def evict(self, row: int, first: int, last: int) -> None:
        """Return blocks `first` to `last` - 1 of `row` to the pool. Their tokens keep their
        positions, and may not be read again."""
        blocks = self.blocks[row]
        assert EVICTED not in blocks[first:last] and last <= len(blocks), "a block goes back once"
        self._free.extend(reversed(blocks[first:last]))
        blocks[first:last] = [EVICTED] * (last - first)
        self.block_table[row, first:last] = 0  # a valid address, because a kernel may prefetch

    def truncate(self, rows: Rows, lengths: Lengths | Sequence[int]) -> None:
        """Remove tokens after the first `lengths`. This moves no data; shorter rows stay as they
        are."""
        rows = BatchRows.of(rows, self.seq_lens.device)
        if not isinstance(lengths, Lengths):
            held_lengths = [self.lengths[row] for row in rows.numbers]
            pairs = zip(lengths, held_lengths, strict=True)
            assert all(0 <= n <= h for n, h in pairs), "truncate cannot lengthen a row"
            lengths = Lengths.of(lengths, self.seq_lens.device)
        new_lengths = torch.minimum(self.seq_lens[rows.index], lengths.tensor)
        self.seq_lens.index_copy_(0, rows.index, new_lengths)
        if not rows.is_captured:
            for row, bound in zip(rows.numbers, lengths.bounds, strict=True):
                self.lengths[row] = min(self.lengths[row], bound)

    def advance(self, rows: Rows, num_tokens: int) -> None:
        """Add `num_tokens`, just written, to the lengths of `rows`."""
        rows = BatchRows.of(rows, self.seq_lens.device)
        self.seq_lens.index_add_(0, rows.index, rows.active, alpha=num_tokens)
        if not rows.is_captured:
            for row in rows.numbers:
                self.lengths[row] += num_tokens

    def lengths_of(self, rows: Rows) -> Lengths:
        rows = BatchRows.of(rows, self.seq_lens.device)
        return Lengths(self.seq_lens[rows.index], self.bounds_of(rows))

    def bounds_of(self, rows: BatchRows) -> tuple[int, ...]:
        if rows.is_captured:
            return (self.tokens_per_row,) * len(rows)
        return tuple([self.lengths[row] for row in rows.numbers])

    def set_host_lengths(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for row, length in zip(rows, lengths, strict=True):
            self.lengths[row] = length

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Slots int64 [B, G, N] of positions [B, N] or, by KV head, [B, G or 1, N] in `rows`
        [B]."""
        if positions.ndim == 2:
            positions = positions.unsqueeze(1)
        size = self.shape.block_size
        heads = self.shape.num_kv_heads
        blocks = self.block_table[rows.view(-1, 1, 1), positions // size]  # [B, G or 1, N]
        head = torch.arange(heads, device=positions.device).view(1, heads, 1)
        return (blocks * heads + head) * size + positions % size

    def first_keys(self, layer: int, rows: Tensor, num_tokens: int) -> Tensor:
        """A copy of a layer's first `num_tokens` keys of rows [B]: [B, G, num_tokens, D]."""
        size = self.shape.block_size
        read_blocks = self.shape.layout.read_key_blocks
        table = self.block_table[rows, : -(-num_tokens // size)]  # [B, blocks]
        if table.shape[1] == 1:
            keys = read_blocks(self.k[layer], table.flatten(), num_tokens)
        else:
            blocks = read_blocks(self.k[layer], table.flatten(), size).unflatten(0, table.shape)
            keys = blocks.transpose(1, 2).flatten(2, 3)[:, :, :num_tokens]
        return keys[..., : self.shape.head_dim]
