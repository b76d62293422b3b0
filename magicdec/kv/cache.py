"""KVCache: a pool of KV blocks, a block table and a length per row. `append` and `truncate` are all
that changes it.

Owns storage and its addressing. Must not know who reads it (a policy says what is visible, a
backend reads it) nor why. Source: PagedAttention (Kwon et al. 2023), section 4.

Shapes: B rows of a forward, T new tokens, G KV heads on this rank, D head size. A *slot* is an
index into the pool seen as [num_blocks * G * block_size, D], the address of one token of one head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from magicdec.kernels.huge_pages import use_huge_pages
from magicdec.kv.layout import PLAIN, Layout
from magicdec.kv.rows import BatchRows, Lengths, Rows, upload

EVICTED = -1  # in `KVCache.blocks`: the row gave this block back, tokens after it stay


@dataclass(frozen=True)
class CacheShape:
    """Sizes of a rank's cache. `block_size` and `layout` are the attention backend's choice."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    layout: Layout = PLAIN


class KVCache:
    """Per layer K and V pools [num_blocks, G, block_size, D], in the order of `shape.layout`; rows
    own blocks through `block_table`."""

    def __init__(
        self,
        shape: CacheShape,
        num_rows: int,
        blocks_per_row: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shape = shape
        assert shape.block_size % shape.layout.block_multiple == 0, "blocks of whole tiles"
        pool = (
            shape.num_layers,
            shape.num_blocks,
            shape.num_kv_heads,
            shape.block_size,
            shape.layout.bytes_per_token(shape.head_dim, dtype.itemsize) // dtype.itemsize,
        )
        # Zeros, not empty: a kernel may read a masked slot that was never written, and 0 * nan is
        # nan.
        self.k, self.v = (torch.empty(pool, dtype=dtype, device=device) for _ in "kv")
        for tensor in (self.k, self.v):
            use_huge_pages(tensor)
            tensor.zero_()
        self.block_table = torch.zeros(num_rows, blocks_per_row, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.lengths = [
            0
        ] * num_rows  # the same on the host: bounds for slicing without asking the device
        self.blocks: list[list[int]] = [[] for _ in range(num_rows)]
        self._free = list(range(shape.num_blocks - 1, -1, -1))

    @property
    def num_bytes(self) -> int:
        return 2 * self.k.numel() * self.k.element_size()

    @property
    def bytes_per_token(self) -> int:
        """Of K and V of one token in all layers and heads."""
        return self.num_bytes // (self.shape.num_blocks * self.shape.block_size)

    @property
    def tokens_per_row(self) -> int:
        """Positions that a row's table addresses."""
        return self.block_table.shape[1] * self.shape.block_size

    def allocate(self, row: int, num_tokens: int) -> None:
        """Give `row` enough blocks for `num_tokens`. Raises ValueError when the pool is
        exhausted."""
        needed = -(-num_tokens // self.shape.block_size) - len(self.blocks[row])
        if needed > len(self._free):
            raise ValueError(
                f"KV cache exhausted: row {row} needs {needed} more blocks, "
                f"{len(self._free)} are free"
            )
        if needed > 0:
            new, first = [self._free.pop() for _ in range(needed)], len(self.blocks[row])
            self.block_table[row, first : first + needed] = upload(new, self.block_table.device)
            self.blocks[row] += new

    def release(self, row: int) -> None:
        """Return all blocks of `row` to the pool."""
        self._free.extend(block for block in reversed(self.blocks[row]) if block != EVICTED)
        self.blocks[row].clear()
        self.truncate([row], [0])

    def evict(self, row: int, first: int, last: int) -> None:
        """Return blocks `first` to `last` - 1 of `row`, counted along its tokens, to the pool.
        Their tokens keep their positions and may not be read again."""
        blocks = self.blocks[row]
        assert EVICTED not in blocks[first:last] and last <= len(blocks), "evicted once"
        self._free.extend(reversed(blocks[first:last]))
        blocks[first:last] = [EVICTED] * (last - first)
        self.block_table[row, first:last] = 0  # an address, should a kernel look ahead

    def truncate(self, rows: Rows, lengths: Lengths | Sequence[int]) -> None:
        """Forget what `rows` hold past `lengths` tokens. The only undo; it moves no data. A row
        that holds fewer is left as it is."""
        rows = BatchRows.of(rows, self.seq_lens.device)
        if not isinstance(lengths, Lengths):
            held = [self.lengths[row] for row in rows.numbers]
            pairs = zip(lengths, held, strict=True)
            assert all(0 <= n <= h for n, h in pairs), "truncate cannot lengthen a row"
            lengths = Lengths.of(lengths, self.seq_lens.device)
        kept = torch.minimum(self.seq_lens[rows.index], lengths.tensor)
        self.seq_lens.index_copy_(0, rows.index, kept)
        if not rows.is_captured:
            for row, bound in zip(rows.numbers, lengths.bounds, strict=True):
                self.lengths[row] = min(self.lengths[row], bound)

    def advance(self, rows: Rows, num_tokens: int) -> None:
        """Count `num_tokens` that were just written to each of `rows`."""
        rows = BatchRows.of(rows, self.seq_lens.device)
        self.seq_lens.index_add_(0, rows.index, rows.active, alpha=num_tokens)
        if not rows.is_captured:
            for row in rows.numbers:
                self.lengths[row] += num_tokens

    def lengths_of(self, rows: Rows) -> Lengths:
        """Tokens that `rows` hold now."""
        rows = BatchRows.of(rows, self.seq_lens.device)
        if rows.is_captured:
            bounds = (self.tokens_per_row,) * len(rows)
        else:
            bounds = tuple(self.lengths[row] for row in rows.numbers)
        return Lengths(self.seq_lens[rows.index], bounds)

    def set_host_lengths(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Bring the host's copy up to date with lengths that were read from the device."""
        for row, length in zip(rows, lengths, strict=True):
            self.lengths[row] = length

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Slots of token positions [B, N], or [B, G or 1, N] by KV head, of `rows` [B]: int64 [B,
        G, N]."""
        if positions.ndim == 2:
            positions = positions.unsqueeze(1)
        size, heads = self.shape.block_size, self.shape.num_kv_heads
        blocks = self.block_table[rows.view(-1, 1, 1), positions // size]  # [B, G or 1, N]
        head = torch.arange(heads, device=positions.device).view(1, heads, 1)
        return (blocks * heads + head) * size + positions % size

    def read_keys(self, slots: Tensor) -> Tensor:
        """Copies of all layers' K at `slots` [B, G, N]: [B, layers, G, N, D]."""
        keys = self.shape.layout.read_keys(self.k, slots.flatten())
        return keys.view(-1, *slots.shape, self.shape.head_dim).transpose(0, 1)

    def write_keys(self, slots: Tensor, keys: Tensor) -> None:
        """Replace all layers' K at `slots` [B, G, N] by keys [B, layers, G, N, D]."""
        flat = keys.transpose(0, 1).reshape(self.shape.num_layers, -1, self.shape.head_dim)
        self.shape.layout.write_keys(self.k, slots.flatten(), flat)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [B, T, G, D] at `slots` [B, G, T]."""
        flat, tokens = slots.transpose(1, 2).flatten(), (1, -1, self.shape.head_dim)
        layout, one = self.shape.layout, slice(layer, layer + 1)
        layout.write_keys(self.k[one], flat, k.reshape(tokens))
        layout.write_values(self.v[one], flat, v.reshape(tokens))

    def copy_from(self, other: KVCache, source: Tensor, target: Tensor) -> None:
        """Copy K and V of all layers from `other`'s slots `source` to this cache's slots `target`,
        of one shape."""
        read, write, source, target = (
            other.shape.layout, self.shape.layout, source.flatten(), target.flatten(),
        )  # fmt: skip
        write.write_keys(self.k, target, read.read_keys(other.k, source))
        write.write_values(self.v, target, read.read_values(other.v, source))

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of K and V at `slots` [B, G, N]: two [B, G, N, D]."""
        flat, shape = slots.flatten(), (*slots.shape, self.shape.head_dim)
        layout, one = self.shape.layout, slice(layer, layer + 1)
        keys, values = layout.read_keys(self.k[one], flat), layout.read_values(self.v[one], flat)
        return keys.view(shape), values.view(shape)
