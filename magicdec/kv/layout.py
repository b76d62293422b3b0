"""Layouts of a KV pool: the memory order of a block's numbers, chosen by the backend that reads it.

Shapes: N slots, D head size. A pool is K or V, [layers, blocks, G, block_size, D]; a slot is the
address of one token of one head.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

TILE = 64  # tokens of a tile (TILE of attention/cpp/native_problem.h)


class KVLayout(Protocol):
    """A memory order of pools whose block size is a multiple of `block_multiple`."""

    block_multiple: int

    def read_keys(self, pool: Tensor, slots: Tensor) -> Tensor:
        """A copy of the keys at `slots` [N] in all layers: [layers, N, D]."""

    def read_values(self, pool: Tensor, slots: Tensor) -> Tensor: ...

    def read_key_blocks(self, layer: Tensor, blocks: Tensor, num_tokens: int) -> Tensor:
        """A copy of the first `num_tokens` keys of blocks [N] of a layer: [N, G, num_tokens, D].
        Much faster than by slots."""

    def write_keys(self, pool: Tensor, slots: Tensor, entries: Tensor) -> None:
        """Replace the keys at `slots` [N] by `entries` [layers, N, D]."""

    def write_values(self, pool: Tensor, slots: Tensor, entries: Tensor) -> None: ...


class Plain(KVLayout):
    """The layout with a token's D numbers adjacent: [blocks, G, block_size, D]."""

    block_multiple = 1

    def read_keys(self, pool: Tensor, slots: Tensor) -> Tensor:
        return _tokens(pool).index_select(1, slots)

    def write_keys(self, pool: Tensor, slots: Tensor, entries: Tensor) -> None:
        _tokens(pool).index_copy_(1, slots, entries)

    read_values = read_keys
    write_values = write_keys

    def read_key_blocks(self, layer: Tensor, blocks: Tensor, num_tokens: int) -> Tensor:
        return layer[:, :, :num_tokens].index_select(0, blocks)


class Tiled(KVLayout):
    """The layout of tiles of TILE tokens for dot products of pairs of 16-bit numbers, without
    shuffles: K tiles [D / 2, TILE, 2] pair dimensions, V tiles [TILE / 2, D, 2] pair tokens."""

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


PLAIN = Plain()
TILED = Tiled()
