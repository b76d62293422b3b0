"""Layouts of a KV pool: how a block's numbers are stored, chosen by the backend that reads it.

Shapes: N slots, D head size. A pool is K or V, [layers, blocks, G, block_size, D]; the last
dimension is larger where a token has a scale. A slot is the address of one token of one head.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

TILE = 64  # tokens of a tile (TILE of attention/cpp/native_problem.h)


class KVLayout(Protocol):
    """A memory order of pools whose block size is a multiple of `block_multiple`."""

    block_multiple: int

    def token_size(self, head_dim: int) -> int:
        """Elements of a token of one head in a pool."""
        return head_dim

    def read_keys(self, pool: Tensor, slots: Tensor) -> Tensor:
        """A copy of the keys at `slots` [N] in all layers: [layers, N, D]."""

    def read_values(self, pool: Tensor, slots: Tensor) -> Tensor: ...

    def read_key_blocks(self, layer: Tensor, blocks: Tensor, num_tokens: int) -> Tensor:
        """A copy of the first `num_tokens` keys of blocks [N] of a layer: [N, G, num_tokens, D].
        Much faster than by slots."""

    def write_keys(self, pool: Tensor, slots: Tensor, entries: Tensor) -> None:
        """Replace the keys at `slots` [N] by `entries` [layers, N, D]."""

    def write_values(self, pool: Tensor, slots: Tensor, entries: Tensor) -> None: ...

    def fill_randomly(self, pool: Tensor, generator: torch.Generator) -> None:
        """Write random numbers of about -3 to 3."""
        pool.normal_(generator=generator)


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


SCALE_BYTES = 4
MOST_CODE = 127


class Int8Tiled(KVLayout):
    """The layout of int8 codes in tiles of TILE tokens: TILE * D codes, then TILE float32 scales,
    of which each token has one for its K and one for its V. Tokens are appended and removed
    without a change to others; a number is at most half its scale from what was written.

    In K the codes are [D / 4, TILE, 4], in V [TILE / 4, D, 4]: four codes are an entry of 32 bits
    (attention/cpp/native_int8.h). What is read is float32."""

    block_multiple = TILE

    def token_size(self, head_dim: int) -> int:
        return head_dim + SCALE_BYTES

    def read_keys(self, pool: Tensor, slots: Tensor) -> Tensor:
        return _widened(_key_quads(pool)[:, slots // TILE, :, slots % TILE], pool, slots)

    def read_key_blocks(self, layer: Tensor, blocks: Tensor, num_tokens: int) -> Tensor:
        num_heads, size = layer.shape[1:3]
        head = torch.arange(num_heads, device=blocks.device).view(1, -1, 1)
        first = (blocks.view(-1, 1, 1) * num_heads + head) * size
        slots = first + torch.arange(num_tokens, device=blocks.device)
        return self.read_keys(layer.unsqueeze(0), slots.flatten()).view(*slots.shape, -1)

    def write_keys(self, pool: Tensor, slots: Tensor, entries: Tensor) -> None:
        codes = _write_scales(pool, slots, entries)
        _key_quads(pool)[:, slots // TILE, :, slots % TILE] = codes.unflatten(2, (-1, 4))

    def read_values(self, pool: Tensor, slots: Tensor) -> Tensor:
        quads = _value_quads(pool)[:, slots // TILE, slots % TILE // 4, :, slots % 4]
        return _widened(quads, pool, slots)

    def write_values(self, pool: Tensor, slots: Tensor, entries: Tensor) -> None:
        codes = _write_scales(pool, slots, entries)
        _value_quads(pool)[:, slots // TILE, slots % TILE // 4, :, slots % 4] = codes

    def fill_randomly(self, pool: Tensor, generator: torch.Generator) -> None:
        pool.random_(-MOST_CODE, MOST_CODE + 1, generator=generator)
        _scales(pool).fill_(3 / MOST_CODE)


def _write_scales(pool: Tensor, slots: Tensor, entries: Tensor) -> Tensor:
    """Writes the scales of entries [layers, N, D], and returns their codes, int8 [N, layers, D]."""
    numbers = entries.float()
    most = numbers.abs().amax(2)
    _scales(pool)[:, slots // TILE, slots % TILE] = most / MOST_CODE
    inverse = torch.where(most > 0, MOST_CODE / most, 0)
    return (numbers * inverse.unsqueeze(2)).round().to(torch.int8).transpose(0, 1)


def _widened(codes: Tensor, pool: Tensor, slots: Tensor) -> Tensor:
    """The numbers float32 [layers, N, D] of codes [N, layers, ...]."""
    scales = _scales(pool)[:, slots // TILE, slots % TILE]
    return codes.flatten(2).transpose(0, 1) * scales.unsqueeze(2)


def _key_quads(pool: Tensor) -> Tensor:
    return _codes(pool).unflatten(2, (-1, TILE, 4))


def _value_quads(pool: Tensor) -> Tensor:
    return _codes(pool).unflatten(2, (TILE // 4, -1, 4))


def _codes(pool: Tensor) -> Tensor:
    return _byte_tiles(pool)[..., : -TILE * SCALE_BYTES]


def _scales(pool: Tensor) -> Tensor:
    """float32 [layers, tiles, TILE]."""
    return _byte_tiles(pool)[..., -TILE * SCALE_BYTES :].view(torch.float32)


def _byte_tiles(pool: Tensor) -> Tensor:
    """[layers, tiles, bytes of one]."""
    return pool.view(pool.shape[0], -1, TILE * pool.shape[-1])


PLAIN = Plain()
TILED = Tiled()
INT8_TILED = Int8Tiled()
