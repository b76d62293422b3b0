"""Layouts of a KV pool: how a block's numbers are stored, chosen by the backend that reads it.

Shapes: N slots, D head size. A pool is K or V, [layers, blocks, G, block_size, D]; the last
dimension is larger where a token has a scale. A slot is the address of one token of one head.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 64  # tokens of a tile (TILE of attention/cpp/native_problem.h and triton_kernels.py)
TokenIndex = tuple[slice | Tensor, ...]
"""An index of tokens."""


class KVLayout(Protocol):
    """A memory order of pools whose block size is a multiple of `block_multiple`."""

    block_multiple: int

    def token_size(self, head_dim: int) -> int:
        """Elements of a token of one head in a pool."""
        return head_dim

    def read_keys(self, pool: Tensor, slots: Tensor) -> Tensor:
        """A copy of the keys at `slots` [N] in all layers: [layers, N, D], or more dimensions."""

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


class Coded(KVLayout):
    """A layout of codes in tiles of TILE tokens: the tokens' bytes of codes, then their scales.
    Tokens are appended and removed without a change to others. What is read is float32.

    On CPUs, where the layout `is_paired`, the bytes of K are [bytes of a token / 4, TILE, 4], those
    of V [TILE / 4, bytes of a token, 4]: an entry of 32 bits has four bytes of one token's K, and
    one byte of four tokens' V. On GPUs both are [TILE, bytes of a token], so that programs load
    vectors of one token."""

    block_multiple: int = TILE

    def __init__(self, is_paired: bool) -> None:
        self.is_paired = is_paired

    def code_bytes(self, token_size: int) -> int:
        """Those of a token in a pool, of `token_size` bytes in all."""
        raise NotImplementedError

    def encode(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The codes [..., bytes] and scales [..., groups] of float32 numbers [..., D]."""
        raise NotImplementedError

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The numbers float32 [..., D]."""
        raise NotImplementedError

    def scales(self, pool: Tensor) -> Tensor:
        """[layers, tiles, groups, TILE]."""
        raise NotImplementedError

    def read_keys(self, pool: Tensor, slots: Tensor) -> Tensor:
        return self._read(*self._keys(pool, slots), pool, slots)

    def read_key_blocks(self, layer: Tensor, blocks: Tensor, num_tokens: int) -> Tensor:
        num_heads, size = layer.shape[1:3]
        head = torch.arange(num_heads, device=blocks.device).view(1, -1, 1)
        first = (blocks.view(-1, 1, 1) * num_heads + head) * size
        slots = first + torch.arange(num_tokens, device=blocks.device)
        return self.read_keys(layer.unsqueeze(0), slots.flatten()).view(*slots.shape, -1)

    def write_keys(self, pool: Tensor, slots: Tensor, entries: Tensor) -> None:
        self._write(*self._keys(pool, slots), pool, slots, entries)

    def read_values(self, pool: Tensor, slots: Tensor) -> Tensor:
        return self._read(*self._values(pool, slots), pool, slots)

    def write_values(self, pool: Tensor, slots: Tensor, entries: Tensor) -> None:
        self._write(*self._values(pool, slots), pool, slots, entries)

    def _read(self, codes: Tensor, place: TokenIndex, pool: Tensor, slots: Tensor) -> Tensor:
        """The numbers float32 [layers, N, D] of a place of `codes`."""
        scales = self.scales(pool)[:, slots // TILE, :, slots % TILE]  # [N, layers, groups]
        return self.decode(codes[place].flatten(2), scales.transpose(0, 1))

    def _write(
        self, codes: Tensor, place: TokenIndex, pool: Tensor, slots: Tensor, entries: Tensor
    ) -> None:
        encoded, scales = self.encode(entries.float())
        self.scales(pool)[:, slots // TILE, :, slots % TILE] = scales.transpose(0, 1)
        codes[place] = encoded.view(*encoded.shape[:2], *codes.shape[len(place) :])

    def _keys(self, pool: Tensor, slots: Tensor) -> tuple[Tensor, TokenIndex]:
        """The codes of keys [layers, tiles, TILE, ...], and where those at `slots` [N] are."""
        place = slice(None), slots // TILE, slots % TILE
        codes = self._codes(pool)
        if self.is_paired:
            return codes.unflatten(2, (-1, TILE, 4)).transpose(2, 3), place
        return codes.unflatten(2, (TILE, -1)), place

    def _values(self, pool: Tensor, slots: Tensor) -> tuple[Tensor, TokenIndex]:
        if not self.is_paired:
            return self._keys(pool, slots)
        codes = self._codes(pool).unflatten(2, (TILE // 4, -1, 4)).transpose(3, 4)
        return codes, (slice(None), slots // TILE, slots % TILE // 4, slots % 4)

    def _codes(self, pool: Tensor) -> Tensor:
        return _byte_tiles(pool)[..., : TILE * self.code_bytes(pool.shape[-1])]


class Float8(Coded):
    """FP8 codes (e4m3, arXiv 2209.05433) without scales, as other programs store them by default:
    what is larger than FP8's largest number becomes that (attention/cpp/native_fp8.h)."""

    def code_bytes(self, token_size: int) -> int:
        return token_size

    def encode(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        most = torch.finfo(torch.float8_e4m3fn).max
        codes = numbers.clamp(-most, most).to(torch.float8_e4m3fn)
        return codes, numbers.new_empty(*numbers.shape[:-1], 0)

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        return codes.float()

    def scales(self, pool: Tensor) -> Tensor:
        num_layers, num_tiles = _byte_tiles(pool).shape[:2]
        return torch.empty(num_layers, num_tiles, 0, TILE, device=pool.device)

    def fill_randomly(self, pool: Tensor, generator: torch.Generator) -> None:
        codes = pool.view(torch.uint8)
        codes.random_(0, 2 * 0x44 + 1, generator=generator)  # 0x44 is 3; the last bit is a sign
        codes.copy_(codes >> 1 | codes << 7)


SCALE_BYTES = 4
MOST_CODE = 127


class Int8(Coded):
    """int8 codes, with a float32 scale for the K and one for the V of each token and head, which
    maps its largest magnitude to MOST_CODE (attention/cpp/native_int8.h)."""

    def token_size(self, head_dim: int) -> int:
        return head_dim + SCALE_BYTES

    def code_bytes(self, token_size: int) -> int:
        return token_size - SCALE_BYTES

    def encode(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        most = numbers.abs().amax(-1, keepdim=True)
        inverse = torch.where(most > 0, MOST_CODE / most, 0)
        return (numbers * inverse).round().to(torch.int8), most / MOST_CODE

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        return codes * scales

    def scales(self, pool: Tensor) -> Tensor:
        codes = TILE * self.code_bytes(pool.shape[-1])
        return _byte_tiles(pool)[..., codes:].view(torch.float32).unflatten(2, (1, TILE))

    def fill_randomly(self, pool: Tensor, generator: torch.Generator) -> None:
        pool.random_(-MOST_CODE, MOST_CODE + 1, generator=generator)
        self.scales(pool).fill_(3 / MOST_CODE)


GROUP = 32  # dimensions that share a scale of int4 codes; the last ones of a head may be fewer
GROUP_BYTES = GROUP // 2 + 2
MIXED = 16  # dimensions of a key that are transformed together, before they are rounded


class Int4(Coded):
    """int4 codes from -8 to 7, two in a byte of uint8 pools, with a bfloat16 scale for each GROUP
    of dimensions of the K and V of each token and head, which maps its number of the largest
    magnitude to -8, as `--draft_weights int4` does (attention/cpp/native_int4.h). The codes of a
    key are of its Walsh-Hadamard transform in parts of MIXED dimensions, which spreads outliers
    (QuaRot, arXiv 2404.00456).

    Byte i of a group has dimension i in its low half and 16 + i in its high one. Heads are filled
    up with zeros to whole groups, so that more dimensions are read than were written."""

    def token_size(self, head_dim: int) -> int:
        return -(-head_dim // GROUP) * GROUP_BYTES

    def code_bytes(self, token_size: int) -> int:
        return token_size // GROUP_BYTES * GROUP // 2

    def write_keys(self, pool: Tensor, slots: Tensor, entries: Tensor) -> None:
        super().write_keys(pool, slots, _mixed(entries.float()))

    def read_keys(self, pool: Tensor, slots: Tensor) -> Tensor:
        return _mixed(super().read_keys(pool, slots)) / MIXED

    def encode(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        filled = F.pad(numbers, (0, -numbers.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
        largest = filled.gather(-1, filled.abs().argmax(-1, keepdim=True))
        scales = (largest / -8).bfloat16()
        divisors = torch.where(scales == 0, 1, scales.float())
        codes = (filled / divisors).round().clamp(-8, 7).to(torch.int8)
        low, high = (codes & 15).view(torch.uint8).unflatten(-1, (2, -1)).unbind(-2)
        return (low | high << 4).flatten(-2), scales.squeeze(-1)

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        grouped = codes.view(torch.int8).unflatten(-1, (-1, GROUP // 2))
        halves = torch.cat([(grouped << 4) >> 4, grouped >> 4], dim=-1)  # shifts keep the sign
        return (halves * scales.float().unsqueeze(-1)).flatten(-2)

    def scales(self, pool: Tensor) -> Tensor:
        codes = TILE * self.code_bytes(pool.shape[-1])
        return _byte_tiles(pool)[..., codes:].view(torch.bfloat16).unflatten(2, (-1, TILE))

    def fill_randomly(self, pool: Tensor, generator: torch.Generator) -> None:
        pool.random_(0, 256, generator=generator)
        self.scales(pool).fill_(3 / 8)


def _mixed(numbers: Tensor) -> Tensor:
    """The Walsh-Hadamard transform of each MIXED of the dimensions [..., D], filled up with zeros;
    its own inverse but for a factor MIXED."""
    parts = F.pad(numbers, (0, -numbers.shape[-1] % MIXED)).unflatten(-1, (-1, MIXED))
    half = 1
    while half < MIXED:
        a, b = parts.unflatten(-1, (-1, 2, half)).unbind(-2)
        parts = torch.stack([a + b, a - b], dim=-2).flatten(-3)
        half *= 2
    return parts.flatten(-2)


def _byte_tiles(pool: Tensor) -> Tensor:
    """[layers, tiles, bytes of one]."""
    return pool.view(pool.shape[0], -1, TILE * pool.shape[-1])


PLAIN = Plain()
TILED = Tiled()
FP8_TILED = Float8(is_paired=True)
INT8_TILED = Int8(is_paired=True)
INT4_TILED = Int4(is_paired=True)
# The layouts of codes by the dtype of their pools.
CODED = {torch.float8_e4m3fn: FP8_TILED, torch.int8: INT8_TILED, torch.uint8: INT4_TILED}
CODED_ON_GPUS = {dtype: type(layout)(is_paired=False) for dtype, layout in CODED.items()}
# The dtypes of pools by the name of what they store (`names.KV_DTYPES`).
POOL_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}
