"""KVPool: the memory of a KV cache, blocks of K and V by layer in a backend's layout.

Shapes: B rows, T new tokens, N tokens, G KV heads on this rank, D head size. A *slot* is an index
into [num_blocks * G * block_size, D]: one token of one head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from magicdec.kernels.build import use_huge_pages
from magicdec.kv.layout import PLAIN, KVLayout


@dataclass(frozen=True)
class CacheShape:
    """Sizes of a rank's cache. The attention backend chooses `block_size` and `layout`."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    layout: KVLayout = PLAIN


class HostBlocks:
    """Room for blocks in host memory, which is pinned beside a GPU. Copies are in the order of the
    device's own work, so that nobody waits for them."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self._tensors = list[tuple[Tensor, Tensor]]()  # [num_blocks, ...], [num_places, ...]

    @property
    def num_bytes(self) -> int:
        return sum(host.nbytes for _, host in self._tensors)

    def add(self, tensor: Tensor) -> None:
        """Keep what `tensor` [num_blocks, ...] has of blocks that leave."""
        shape = self.num_places, *tensor.shape[1:]
        pinned = tensor.device.type == "cuda"
        self._tensors.append((tensor, torch.empty(shape, dtype=tensor.dtype, pin_memory=pinned)))

    def save(self, block: int, place: int) -> None:
        for tensor, host in self._tensors:
            host[place].copy_(tensor[block], non_blocking=True)

    def load(self, place: int, block: int) -> None:
        for tensor, host in self._tensors:
            tensor[block].copy_(host[place], non_blocking=True)


class KVPool:
    """The tensors `k` and `v` [layers, num_blocks, G, block_size, D] in `shape.layout`, whose
    numbers have `dtype`; codes, int8 or two of 4 bits in uint8, are read as float32."""

    def __init__(self, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        assert shape.block_size % shape.layout.block_multiple == 0, "blocks of whole tiles"
        pool = (
            shape.num_layers,
            shape.num_blocks,
            shape.num_kv_heads,
            shape.block_size,
            shape.layout.token_size(shape.head_dim),
        )
        # Filled with zeros: a kernel may read a masked slot that was never written, and 0 * nan is
        # nan.
        self.k, self.v = (torch.empty(pool, dtype=dtype, device=device) for _ in "kv")
        for tensor in (self.k, self.v):
            use_huge_pages(tensor)
            tensor.zero_()
        # What else is kept of the tokens of each block, [num_blocks, block_size, ...].
        self.attached = list[Tensor]()
        self.host: HostBlocks | None = None

    def attach(self, tensor: Tensor) -> None:
        """Let `tensor` [num_blocks, block_size, ...] go with the blocks."""
        self.attached.append(tensor)
        if self.host is not None:
            self.host.add(tensor)

    def offload(self, num_places: int) -> None:
        """Have room for so many blocks in host memory."""
        self.host = HostBlocks(num_places)
        for tensor in (self.k.transpose(0, 1), self.v.transpose(0, 1), *self.attached):
            self.host.add(tensor)

    @property
    def num_bytes(self) -> int:
        return 2 * self.k.numel() * self.k.element_size()

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's K and V in all layers and heads of this rank."""
        return self.num_bytes // (self.shape.num_blocks * self.shape.block_size)

    def read_keys(self, slots: Tensor) -> Tensor:
        """Copies of all layers' K at `slots` [B, G, N]: [B, layers, G, N, D]."""
        keys = self.without_filling(self.shape.layout.read_keys(self.k, slots.flatten()))
        return keys.view(-1, *slots.shape, self.shape.head_dim).transpose(0, 1)

    def write_keys(self, slots: Tensor, keys: Tensor) -> None:
        """Replace all layers' K at `slots` [B, G, N] by keys [B, layers, G, N, D]."""
        flat = keys.transpose(0, 1).reshape(self.shape.num_layers, -1, self.shape.head_dim)
        self.shape.layout.write_keys(self.k, slots.flatten(), flat)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [B, T, G, D] at `slots` [B, G, T]."""
        flat = slots.transpose(1, 2).flatten()
        tokens = (1, -1, self.shape.head_dim)
        layout = self.shape.layout
        one = slice(layer, layer + 1)
        layout.write_keys(self.k[one], flat, k.reshape(tokens))
        layout.write_values(self.v[one], flat, v.reshape(tokens))

    def copy_from(self, other: KVPool, source: Tensor, target: Tensor) -> None:
        """Copy all layers' K and V from slots `source` of `other`, maybe this pool, to slots
        `target`. All are read before any is written. Sources of a repeated target must be equal."""
        source_layout = other.shape.layout
        layout = self.shape.layout
        source = source.flatten()
        target = target.flatten()
        keys = source_layout.read_keys(other.k, source)
        values = source_layout.read_values(other.v, source)
        layout.write_keys(self.k, target, self.without_filling(keys))
        layout.write_values(self.v, target, self.without_filling(values))

    def copy_block(self, source: int, target: int) -> None:
        """Copy all layers' K and V of a block to another, in any layout, and what is attached."""
        for pool in (self.k, self.v):
            pool[:, target].copy_(pool[:, source])
        for tensor in self.attached:
            tensor[target].copy_(tensor[source])

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of K and V at `slots` [B, G, N]: two [B, G, N, D]."""
        flat = slots.flatten()
        shape = (*slots.shape, self.shape.head_dim)
        layout = self.shape.layout
        one = slice(layer, layer + 1)
        keys = self.without_filling(layout.read_keys(self.k[one], flat))
        values = self.without_filling(layout.read_values(self.v[one], flat))
        return keys.view(shape), values.view(shape)

    def without_filling(self, entries: Tensor) -> Tensor:
        """The numbers [..., D] of entries that a layout may have filled up."""
        return entries[..., : self.shape.head_dim]
