"""Int8Tiled: the layout of a KV pool in int8. Each token of a head has a float32 scale for its K
and one for its V.

Owns the order of these bytes and the quantisation. Because a scale belongs to one token, tokens are
appended and removed without any change to others. The error of a number is at most half its scale.

Shapes as in `layout`: a pool is K or V, N slots, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from magicdec.kv.layout import TILE

SCALE_BYTES = 4
LARGEST = 127
Places = tuple[slice | Tensor, ...]


class Int8Tiled:
    """Tiles of TILE tokens: first TILE * D numbers, then TILE scales. D is a multiple of 16.

    A number is a byte of sign and magnitude. 64 numbers form a group, which has two pairs of
    numbers for each of 16 columns: [4, 2, 4, 2] = (column / 4, pair, column % 4, number of the
    pair). In K, [D / 4, TILE / 16, 64], the columns are tokens and the pairs are adjacent
    dimensions. In V, [TILE / 4, D / 16, 64], it is the other way round."""

    block_multiple = TILE

    def bytes_per_token(self, head_dim: int, itemsize: int) -> int:
        return head_dim + SCALE_BYTES

    def read_keys(self, pool: Tensor, slots: Tensor) -> Tensor:
        found = _key_bytes(pool)[_key_places(slots)]
        scales = _scales(pool)[_scale_places(slots)].transpose(0, 1)
        return _widened(found.flatten(2), scales).transpose(0, 1)

    def read_key_blocks(self, layer: Tensor, blocks: Tensor, num_tokens: int) -> Tensor:
        heads, size = layer.shape[1:3]
        first = blocks.view(-1, 1, 1) * heads + torch.arange(heads, device=blocks.device).view(
            1, -1, 1
        )
        slots = first * size + torch.arange(num_tokens, device=blocks.device)
        return self.read_keys(layer.unsqueeze(0), slots.flatten()).view(*slots.shape, -1)

    def write_keys(self, pool: Tensor, slots: Tensor, keys: Tensor) -> None:
        found, scales = _quantised(keys)
        found = found.unflatten(2, (-1, 2, 2)).transpose(0, 1)  # [N, layers, D / 4, 2, 2]
        _key_bytes(pool)[_key_places(slots)] = found
        _scales(pool)[_scale_places(slots)] = scales

    def read_values(self, pool: Tensor, slots: Tensor) -> Tensor:
        found = _value_bytes(pool)[_value_places(slots)]
        scales = _scales(pool)[_scale_places(slots)].transpose(0, 1)
        return _widened(found.flatten(2), scales).transpose(0, 1)

    def write_values(self, pool: Tensor, slots: Tensor, values: Tensor) -> None:
        found, scales = _quantised(values)
        found = found.unflatten(2, (-1, 4, 4)).transpose(0, 1)  # [N, layers, D / 16, 4, 4]
        _value_bytes(pool)[_value_places(slots)] = found
        _scales(pool)[_scale_places(slots)] = scales

    def copy_keys(self, pool: Tensor, source: Tensor, target: Tensor) -> None:
        numbers, scales = _key_bytes(pool), _scales(pool)
        numbers[_key_places(target)] = numbers[_key_places(source)]
        scales[_scale_places(target)] = scales[_scale_places(source)]

    def copy_values(self, pool: Tensor, source: Tensor, target: Tensor) -> None:
        numbers, scales = _value_bytes(pool), _scales(pool)
        numbers[_value_places(target)] = numbers[_value_places(source)]
        scales[_scale_places(target)] = scales[_scale_places(source)]


def _key_places(slots: Tensor) -> Places:
    """Where the keys of slots [N] are in `_key_bytes`."""
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


def _widened(found: Tensor, scales: Tensor) -> Tensor:
    """Bytes [N, layers, D] and scales [N, layers] as float32 numbers."""
    signed = found.view(torch.uint8)
    magnitude = (signed & LARGEST).float()
    return torch.where(signed > LARGEST, -magnitude, magnitude) * scales.unsqueeze(2)


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
