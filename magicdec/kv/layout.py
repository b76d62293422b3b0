"""Layouts of a KV cache's storage: in which order a block's numbers lie in memory.

Owns the orders of floating-point numbers (`int8_layout` has that of int8) and reading and writing
tokens in them. A backend asks for the one its kernel reads fastest (`AttentionBackend.layout`);
nobody else needs to know which it is.

Shapes: a pool is one of K or V, [layers, blocks, G, block_size, D], or what a token takes for D; a
slot is the address of one token of one head (`cache.py`); N slots, D head size.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

TILE = 64  # tokens of a tile (TILE of attention/native.cpp)


class Layout(Protocol):
    """`block_multiple` divides the block size of a cache laid out so."""

    block_multiple: int

    def bytes_per_token(self, head_dim: int, itemsize: int) -> int:
        """Of one token of one head in a pool of K or V, for numbers of `itemsize` bytes."""
        ...

    def read_keys(self, pool: Tensor, slots: Tensor) -> Tensor:
        """A copy of K at slots [N] in all layers of the pool: [layers, N, D]."""
        ...

    def read_values(self, pool: Tensor, slots: Tensor) -> Tensor: ...

    def write_keys(self, pool: Tensor, slots: Tensor, keys: Tensor) -> None:
        """Replace K at slots [N] by `keys` [layers, N, D]."""
        ...

    def write_values(self, pool: Tensor, slots: Tensor, values: Tensor) -> None: ...


class Plain:
    """A token's D numbers follow each other: [blocks, G, block_size, D] as the shape says."""

    block_multiple = 1

    def bytes_per_token(self, head_dim: int, itemsize: int) -> int:
        return head_dim * itemsize

    def read_keys(self, pool: Tensor, slots: Tensor) -> Tensor:
        return _tokens(pool).index_select(1, slots)

    def write_keys(self, pool: Tensor, slots: Tensor, keys: Tensor) -> None:
        _tokens(pool).index_copy_(1, slots, keys)

    read_values, write_values = read_keys, write_keys


class Tiled:
    """Tiles of TILE tokens, laid out for dot products of pairs of 16-bit numbers: K as [D / 2,
    TILE, 2], the token after the pair of dimensions, and V as [TILE / 2, D, 2], the dimension after
    the pair of tokens. As many numbers as in the plain order, and K and V need no shuffle between
    memory and the product."""

    block_multiple = TILE

    def bytes_per_token(self, head_dim: int, itemsize: int) -> int:
        return head_dim * itemsize

    def read_keys(self, pool: Tensor, slots: Tensor) -> Tensor:
        found = _key_tiles(pool)[:, slots // TILE, :, slots % TILE]  # [N, layers, D / 2, 2]
        return found.flatten(2).transpose(0, 1)

    def write_keys(self, pool: Tensor, slots: Tensor, keys: Tensor) -> None:
        tiles = _key_tiles(pool)
        tiles[:, slots // TILE, :, slots % TILE] = keys.unflatten(2, (-1, 2)).transpose(0, 1)

    def read_values(self, pool: Tensor, slots: Tensor) -> Tensor:
        return _value_pairs(pool)[:, slots // 2, :, slots % 2].transpose(0, 1)

    def write_values(self, pool: Tensor, slots: Tensor, values: Tensor) -> None:
        _value_pairs(pool)[:, slots // 2, :, slots % 2] = values.transpose(0, 1)


def _tokens(pool: Tensor) -> Tensor:
    return pool.view(pool.shape[0], -1, pool.shape[-1])


def _key_tiles(pool: Tensor) -> Tensor:
    return pool.view(pool.shape[0], -1, pool.shape[-1] // 2, TILE, 2)


def _value_pairs(pool: Tensor) -> Tensor:
    return pool.view(pool.shape[0], -1, pool.shape[-1], 2)


PLAIN, TILED = Plain(), Tiled()
