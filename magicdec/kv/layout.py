"""Layouts of a KV pool: the order in memory of the numbers of a block.

Owns the layouts, the quantisation of int8, and reading and writing tokens. A backend chooses the
layout that its kernel reads fastest (`AttentionBackend.layout`). No other code depends on the
choice. In int8, each token of a head has a float32 scale for its K and one for its V. Because a
scale belongs to one token, tokens are appended and removed without any change to others. The error
of a number is at most half its scale.

Shapes: N slots, D head size. A pool is K or V, [layers, blocks, G, block_size, D]; the last
dimension is larger if a token has scales. A slot is the address of one token of one head
(`pool.py`).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

TILE = 64  # tokens of a tile (TILE of attention/cpp/native_problem.h)


class Layout(Protocol):
    """The block size of a pool in this layout is a multiple of `block_multiple`."""

    block_multiple: int

    def bytes_per_token(self, head_dim: int, itemsize: int) -> int:
        """The bytes of one token of one head in a pool of K or V, for numbers of `itemsize`
        bytes."""
        return head_dim * itemsize

    def read_keys(self, pool: Tensor, slots: Tensor) -> Tensor:
        """A copy of the keys at `slots` [N] in all layers of the pool: [layers, N, D]."""

    def read_values(self, pool: Tensor, slots: Tensor) -> Tensor: ...

    def read_key_blocks(self, layer: Tensor, blocks: Tensor, num_tokens: int) -> Tensor:
        """A copy of the first `num_tokens` tokens' K of blocks [N] of one layer of the pool: [N, G,
        num_tokens, D]. Much faster than reading as many slots."""

    def write_keys(self, pool: Tensor, slots: Tensor, entries: Tensor) -> None:
        """Replace the keys at `slots` [N] by `entries` [layers, N, D]."""

    def write_values(self, pool: Tensor, slots: Tensor, entries: Tensor) -> None: ...

    def copy_keys(self, pool: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy the keys at slots `source` [N] of all layers to slots `target` [N] of the same pool,
        without a change of any bit."""
        self.write_keys(pool, target, self.read_keys(pool, source))

    def copy_values(self, pool: Tensor, source: Tensor, target: Tensor) -> None:
        self.write_values(pool, target, self.read_values(pool, source))


class Plain(Layout):
    """The D numbers of a token are adjacent: [blocks, G, block_size, D]."""

    block_multiple = 1

    def read_keys(self, pool: Tensor, slots: Tensor) -> Tensor:
        return _tokens(pool).index_select(1, slots)

    def write_keys(self, pool: Tensor, slots: Tensor, entries: Tensor) -> None:
        _tokens(pool).index_copy_(1, slots, entries)

    read_values, write_values = read_keys, write_keys

    def read_key_blocks(self, layer: Tensor, blocks: Tensor, num_tokens: int) -> Tensor:
        return layer[:, :, :num_tokens].index_select(0, blocks)


class Tiled(Layout):
    """Tiles of TILE tokens for dot products of pairs of 16-bit numbers. A tile of K is
    [D / 2, TILE, 2]: the last index is one of two adjacent dimensions. A tile of V is
    [TILE / 2, D, 2]: the last index is one of two adjacent tokens. The products then need no
    shuffle. The size is that of the plain layout."""

    block_multiple = TILE

    def read_keys(self, pool: Tensor, slots: Tensor) -> Tensor:
        pairs = _key_tiles(pool)[:, slots // TILE, :, slots % TILE]  # [N, layers, D / 2, 2]
        return pairs.flatten(2).transpose(0, 1)

    def read_key_blocks(self, layer: Tensor, blocks: Tensor, num_tokens: int) -> Tensor:
        assert layer.dtype.itemsize == 2, "a pair of numbers is copied as one of 4 bytes"
        pairs = layer[:, :, : -(-num_tokens // TILE) * TILE].view(torch.int32)
        tiles = pairs.view(*layer.shape[:2], -1, layer.shape[-1] // 2, TILE).transpose(3, 4)
        keys = tiles.index_select(0, blocks).flatten(2, 3)  # [N, G, tokens, D / 2]
        return keys.view(layer.dtype)[:, :, :num_tokens]

    def write_keys(self, pool: Tensor, slots: Tensor, entries: Tensor) -> None:
        tiles = _key_tiles(pool)
        tiles[:, slots // TILE, :, slots % TILE] = entries.unflatten(2, (-1, 2)).transpose(0, 1)

    def read_values(self, pool: Tensor, slots: Tensor) -> Tensor:
        return _value_pairs(pool)[:, slots // 2, :, slots % 2].transpose(0, 1)

    def write_values(self, pool: Tensor, slots: Tensor, entries: Tensor) -> None:
        _value_pairs(pool)[:, slots // 2, :, slots % 2] = entries.transpose(0, 1)


def _tokens(pool: Tensor) -> Tensor:
    return pool.view(pool.shape[0], -1, pool.shape[-1])


def _key_tiles(pool: Tensor) -> Tensor:
    return pool.view(pool.shape[0], -1, pool.shape[-1] // 2, TILE, 2)


def _value_pairs(pool: Tensor) -> Tensor:
    return pool.view(pool.shape[0], -1, pool.shape[-1], 2)


PLAIN, TILED = Plain(), Tiled()


SCALE_BYTES = 4
LARGEST = 127
Places = tuple[slice | Tensor, ...]


class Int8Tiled(Layout):
    """Tiles of TILE tokens: first TILE * D numbers, then TILE scales. D is a multiple of 16.

    A number is a byte of sign and magnitude. 64 numbers form a group, which has two pairs of
    numbers for each of 16 columns: [4, 2, 4, 2] = (column / 4, pair, column % 4, number of the
    pair). In K, [D / 4, TILE / 16, 64], the columns are tokens and the pairs are adjacent
    dimensions. In V, [TILE / 4, D / 16, 64], it is the other way round."""

    block_multiple = TILE

    def bytes_per_token(self, head_dim: int, itemsize: int) -> int:
        return head_dim + SCALE_BYTES

    def read_keys(self, pool: Tensor, slots: Tensor) -> Tensor:
        return _widened(_key_bytes(pool)[_key_places(slots)], pool, slots)

    def read_key_blocks(self, layer: Tensor, blocks: Tensor, num_tokens: int) -> Tensor:
        heads, size = layer.shape[1:3]
        head = torch.arange(heads, device=blocks.device).view(1, -1, 1)
        first = (blocks.view(-1, 1, 1) * heads + head) * size
        slots = first + torch.arange(num_tokens, device=blocks.device)
        return self.read_keys(layer.unsqueeze(0), slots.flatten()).view(*slots.shape, -1)

    def write_keys(self, pool: Tensor, slots: Tensor, entries: Tensor) -> None:
        numbers, scales = _quantised(entries)
        _scales(pool)[_scale_places(slots)] = scales
        numbers = numbers.unflatten(2, (-1, 2, 2)).transpose(0, 1)  # [N, layers, D / 4, 2, 2]
        _key_bytes(pool)[_key_places(slots)] = numbers

    def read_values(self, pool: Tensor, slots: Tensor) -> Tensor:
        return _widened(_value_bytes(pool)[_value_places(slots)], pool, slots)

    def write_values(self, pool: Tensor, slots: Tensor, entries: Tensor) -> None:
        numbers, scales = _quantised(entries)
        _scales(pool)[_scale_places(slots)] = scales
        numbers = numbers.unflatten(2, (-1, 4, 4)).transpose(0, 1)  # [N, layers, D / 16, 4, 4]
        _value_bytes(pool)[_value_places(slots)] = numbers

    def copy_keys(self, pool: Tensor, source: Tensor, target: Tensor) -> None:
        for numbers, find in ((_key_bytes(pool), _key_places), (_scales(pool), _scale_places)):
            numbers[find(target)] = numbers[find(source)]

    def copy_values(self, pool: Tensor, source: Tensor, target: Tensor) -> None:
        for numbers, find in ((_value_bytes(pool), _value_places), (_scales(pool), _scale_places)):
            numbers[find(target)] = numbers[find(source)]


def _key_places(slots: Tensor) -> Places:
    """The index of the keys of slots [N] in `_key_bytes`."""
    tile, lane, every = slots // TILE, slots % TILE, slice(None)
    return every, tile, every, lane // 16, lane % 16 // 4, every, lane % 4


def _value_places(slots: Tensor) -> Places:
    tile, lane, every = slots // TILE, slots % TILE, slice(None)
    return every, tile, lane // 4, every, every, lane % 4 // 2, every, lane % 2


def _scale_places(slots: Tensor) -> Places:
    return slice(None), slots // TILE, slots % TILE


def _quantised(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers [layers, N, D] as bytes of the same shape, and their scales [layers, N]."""
    wide = numbers.float()
    scales = wide.abs().amax(2) / LARGEST
    inverse = torch.where(scales > 0, 1 / scales, 0).unsqueeze(2)
    magnitude = (wide.abs() * inverse).round().to(torch.uint8)
    return (magnitude + (wide < 0).to(torch.uint8) * 128).view(torch.int8), scales


def _widened(numbers: Tensor, pool: Tensor, slots: Tensor) -> Tensor:
    """The bytes [N, layers, ...] at slots [N] of a pool as float32 numbers [layers, N, D]."""
    signed = numbers.flatten(2).transpose(0, 1).view(torch.uint8)
    magnitude = (signed & LARGEST).float()
    scales = _scales(pool)[_scale_places(slots)].unsqueeze(2)
    return torch.where(signed > LARGEST, -magnitude, magnitude) * scales


def _tiles(pool: Tensor) -> Tensor:
    """[layers, tiles, bytes of one]."""
    return pool.view(pool.shape[0], -1, TILE * pool.shape[-1])


def _numbers(pool: Tensor) -> Tensor:
    return _tiles(pool)[..., : -TILE * SCALE_BYTES]


def _key_bytes(pool: Tensor) -> Tensor:
    return _numbers(pool).unflatten(2, (-1, TILE // 16, 4, 2, 4, 2))


def _value_bytes(pool: Tensor) -> Tensor:
    return _numbers(pool).unflatten(2, (TILE // 4, -1, 4, 2, 4, 2))


def _scales(pool: Tensor) -> Tensor:
    """float32 [layers, tiles, TILE]."""
    return _tiles(pool)[..., -TILE * SCALE_BYTES :].view(torch.float32)


INT8_TILED = Int8Tiled()
