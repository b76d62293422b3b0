"""Layouts of a KV pool: the order in memory of the numbers of a block.

Owns the layouts of floating-point numbers (`int8_layout` has that of int8), and reading and writing
tokens in them. A backend chooses the layout that its kernel reads fastest
(`AttentionBackend.layout`). No other code depends on the choice.

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
        ...

    def read_keys(self, pool: Tensor, slots: Tensor) -> Tensor:
        """A copy of the keys at `slots` [N] in all layers of the pool: [layers, N, D]."""
        ...

    def read_values(self, pool: Tensor, slots: Tensor) -> Tensor: ...

    def read_key_blocks(self, layer: Tensor, blocks: Tensor, num_tokens: int) -> Tensor:
        """A copy of the first `num_tokens` tokens' K of blocks [N] of one layer of the pool: [N, G,
        num_tokens, D]. Much faster than reading as many slots."""
        ...

    def write_keys(self, pool: Tensor, slots: Tensor, keys: Tensor) -> None:
        """Replace the keys at `slots` [N] by `keys` [layers, N, D]."""
        ...

    def write_values(self, pool: Tensor, slots: Tensor, values: Tensor) -> None: ...

    def copy_keys(self, pool: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy the keys at slots `source` [N] of all layers to slots `target` [N] of the same pool,
        without a change of any bit."""
        ...

    def copy_values(self, pool: Tensor, source: Tensor, target: Tensor) -> None: ...


class Plain:
    """The D numbers of a token are adjacent: [blocks, G, block_size, D]."""

    block_multiple = 1

    def bytes_per_token(self, head_dim: int, itemsize: int) -> int:
        return head_dim * itemsize

    def read_keys(self, pool: Tensor, slots: Tensor) -> Tensor:
        return _tokens(pool).index_select(1, slots)

    def write_keys(self, pool: Tensor, slots: Tensor, keys: Tensor) -> None:
        _tokens(pool).index_copy_(1, slots, keys)

    def copy_keys(self, pool: Tensor, source: Tensor, target: Tensor) -> None:
        self.write_keys(pool, target, self.read_keys(pool, source))

    read_values, write_values, copy_values = read_keys, write_keys, copy_keys

    def read_key_blocks(self, layer: Tensor, blocks: Tensor, num_tokens: int) -> Tensor:
        return layer[:, :, :num_tokens].index_select(0, blocks)


class Tiled:
    """Tiles of TILE tokens for dot products of pairs of 16-bit numbers. A tile of K is
    [D / 2, TILE, 2]: the last index is one of two adjacent dimensions. A tile of V is
    [TILE / 2, D, 2]: the last index is one of two adjacent tokens. The products then need no
    shuffle. The size is that of the plain layout."""

    block_multiple = TILE

    def bytes_per_token(self, head_dim: int, itemsize: int) -> int:
        return head_dim * itemsize

    def read_keys(self, pool: Tensor, slots: Tensor) -> Tensor:
        found = _key_tiles(pool)[:, slots // TILE, :, slots % TILE]  # [N, layers, D / 2, 2]
        return found.flatten(2).transpose(0, 1)

    def read_key_blocks(self, layer: Tensor, blocks: Tensor, num_tokens: int) -> Tensor:
        assert layer.dtype.itemsize == 2, "a pair of numbers is copied as one of 4 bytes"
        pairs = layer[:, :, : -(-num_tokens // TILE) * TILE].view(torch.int32)
        tiles = pairs.view(*layer.shape[:2], -1, layer.shape[-1] // 2, TILE).transpose(3, 4)
        keys = tiles.index_select(0, blocks).flatten(2, 3)  # [N, G, tokens, D / 2]
        return keys.view(layer.dtype)[:, :, :num_tokens]

    def write_keys(self, pool: Tensor, slots: Tensor, keys: Tensor) -> None:
        tiles = _key_tiles(pool)
        tiles[:, slots // TILE, :, slots % TILE] = keys.unflatten(2, (-1, 2)).transpose(0, 1)

    def read_values(self, pool: Tensor, slots: Tensor) -> Tensor:
        return _value_pairs(pool)[:, slots // 2, :, slots % 2].transpose(0, 1)

    def write_values(self, pool: Tensor, slots: Tensor, values: Tensor) -> None:
        _value_pairs(pool)[:, slots // 2, :, slots % 2] = values.transpose(0, 1)

    def copy_keys(self, pool: Tensor, source: Tensor, target: Tensor) -> None:
        self.write_keys(pool, target, self.read_keys(pool, source))

    def copy_values(self, pool: Tensor, source: Tensor, target: Tensor) -> None:
        self.write_values(pool, target, self.read_values(pool, source))


def _tokens(pool: Tensor) -> Tensor:
    return pool.view(pool.shape[0], -1, pool.shape[-1])


def _key_tiles(pool: Tensor) -> Tensor:
    return pool.view(pool.shape[0], -1, pool.shape[-1] // 2, TILE, 2)


def _value_pairs(pool: Tensor) -> Tensor:
    return pool.view(pool.shape[0], -1, pool.shape[-1], 2)


PLAIN, TILED = Plain(), Tiled()
