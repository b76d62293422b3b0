"""The fast backend for any device: two batched matrix products around a softmax, with the query
heads of a KV head packed into one matrix.

Visible tokens that are contiguous in memory (a full view or sliding window) are read in place,
others copied. Long chunks use torch's fused attention, which stores no scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.attention.backend import AttentionBackend, CallSize, sum_blocks, visible_mask
from magicdec.attention.sinks import fused_attention, softmax_with_sinks
from magicdec.config.capabilities import MOST_WATCHED, Capabilities
from magicdec.kv.view import KVView

# The fused kernel, which never stores the scores, is used for this many new tokens and more.
FUSED_FROM = 32


@dataclass(frozen=True)
class RowRange:
    """Rows `first` to `last` - 1 of a batch, read with one call; in place from key `first_key`
    if `slots` is None."""

    first: int
    last: int
    block: int
    first_key: int
    num_keys: int
    positions: Tensor  # of the keys, [rows, G or 1, num_keys], -1 for padding
    slots: Tensor | None
    num_unmasked: int  # number of leading keys that every new token of every row sees
    # bool [rows, G or 1, T, num_keys - num_unmasked]; None if every token sees every key
    mask: Tensor | None


class GroupedBackend(AttentionBackend):
    """The backend with a row as one block, one strided matrix for the GEMM. Keys of rows with
    several blocks (rolling caches) are copied."""

    capabilities = Capabilities("grouped", can_be_recorded=False, rounds_scores=True)

    def __init__(self) -> None:
        self._new: Tensor | None = None
        self._runs: list[RowRange] | None = None  # None if the layers read different keys

    @staticmethod
    def working_bytes(size: CallSize) -> int:
        """The scores, and weights in two dtypes; for the fused kernel the mask."""
        if size.T >= FUSED_FROM:
            return size.mask_bytes
        return size.B * size.num_heads * size.T * size.S * (2 * size.dtype_bytes + 4)

    def block_size(self, max_tokens: int) -> int:
        return max_tokens

    def plan(self, view: KVView) -> None:
        self._new = view.cache.slots(view.row_index, view.query_positions())
        has_one_block = all(len(view.cache.blocks[row]) == 1 for row in view.rows)
        in_place = view.is_full and has_one_block
        self._runs = None
        if in_place:
            self._runs = list(_dense_runs(view))
        elif not view.per_head:
            self._runs = [_gathered_run(0, view)]

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView) -> Tensor:
        sinks = self.layer_sinks(layer)
        outputs = [
            _fused(layer, q[r.first : r.last], r, view, sinks)
            if q.shape[1] >= FUSED_FROM
            else _attend(layer, q[r.first : r.last], r, view, sinks)[0]
            for r in self._write(layer, k, v, view)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def run_with_weights(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView
    ) -> tuple[Tensor, Tensor]:
        assert q.shape[1] <= MOST_WATCHED < FUSED_FROM, "refused before the run"
        outputs = []
        masses = []
        for r in self._write(layer, k, v, view):
            out, weights = _attend(layer, q[r.first : r.last], r, view, self.layer_sinks(layer))
            outputs.append(out)
            masses.append(sum_blocks(weights.sum(dim=2), r.positions, view.num_weight_blocks))
        return torch.cat(outputs), torch.cat(masses)

    def _write(self, layer: int, k: Tensor, v: Tensor, view: KVView) -> list[RowRange]:
        assert self._new is not None, "plan before run"
        view.cache.write(layer, self._new, k, v)
        return [_gathered_run(layer, view)] if self._runs is None else self._runs


def _dense_runs(view: KVView) -> Iterator[RowRange]:
    """Runs of neighbouring rows in neighbouring blocks."""
    blocks = [view.cache.blocks[row] for row in view.rows]
    first = 0
    for i in range(1, len(blocks) + 1):
        if i == len(blocks) or blocks[i][0] != blocks[i - 1][0] + 1:
            lengths = view.lengths[first:i]
            first_key = min(view.first_keys[first:i])
            stop = max(lengths) + view.num_new
            keys = torch.arange(first_key, stop, device=view.seq_lens.device)
            keys = keys.expand(i - first, 1, -1)
            unmasked, mask = _mask(view, first, i, keys, min(lengths), max(lengths))
            block = blocks[first][0]
            num_keys = stop - first_key
            yield RowRange(first, i, block, first_key, num_keys, keys, None, unmasked, mask)
            first = i


def _gathered_run(layer: int, view: KVView) -> RowRange:
    keys = view.key_positions(layer)  # [B, G or 1, N]
    least = min(view.num_visible)
    most = max(view.num_visible)
    unmasked, mask = _mask(view, 0, len(view.rows), keys, least, most)
    slots = view.cache.slots(view.row_index, keys.clamp(min=0))
    return RowRange(0, len(view.rows), 0, 0, keys.shape[2], keys, slots, unmasked, mask)


def _mask(
    view: KVView, first: int, last: int, keys: Tensor, least: int, most: int
) -> tuple[int, Tensor | None]:
    """The number of leading keys that every new token sees, and the mask of the rest.

    `least` and `most` are the old tokens visible in the shortest and longest row. Only under a
    window are keys before `least` masked, or masks different by head."""
    longest = max(view.lengths[first:last]) + view.num_new
    is_cut = view.window is not None and view.window < longest
    if view.num_new == 1 and least == most and not (is_cut and view.per_head):
        return keys.shape[2], None
    if is_cut:
        return 0, visible_mask(view, keys, first, last)
    return least, visible_mask(view, keys[:, :1, least:], first, last)


def _keys(layer: int, run: RowRange, view: KVView) -> tuple[Tensor, Tensor]:
    """K and V of a run: [rows, G, num_keys, D]."""
    cache = view.cache
    if run.slots is not None:
        return cache.read(layer, run.slots)
    place = slice(run.block, run.block + run.last - run.first)
    keys = slice(run.first_key, run.first_key + run.num_keys)
    return cache.k[layer, place, :, keys], cache.v[layer, place, :, keys]


def _attend(
    layer: int, q: Tensor, run: RowRange, view: KVView, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention over a run: q [rows, T, H, D] -> output [rows, T, H, D] and weights float32
    [rows, G, H/G * T, num_keys]. `sinks` [H]: see `AttentionBackend`."""
    k, v = _keys(layer, run, view)
    rows, num_new, num_heads, size = q.shape
    groups = k.shape[1]
    packed = (q * size**-0.5).view(rows, num_new, groups, -1, size).permute(0, 2, 3, 1, 4)
    packed = packed.reshape(rows, groups, -1, size)  # [rows, G, H/G * T, D]
    scores = torch.matmul(packed, k.transpose(-1, -2))
    if run.mask is not None:
        tail = scores.view(rows, groups, -1, num_new, run.num_keys)[..., run.num_unmasked :]
        tail.masked_fill_(~run.mask.unsqueeze(2), float("-inf"))
    if sinks is not None:
        sinks = sinks.repeat_interleave(num_new).view(groups, -1)
    weights = softmax_with_sinks(scores, sinks)
    out = torch.matmul(weights.to(v.dtype), v).view(rows, groups, -1, num_new, size)
    return out.permute(0, 3, 1, 2, 4).reshape(rows, num_new, num_heads, size), weights


def _fused(layer: int, q: Tensor, run: RowRange, view: KVView, sinks: Tensor | None) -> Tensor:
    k, v = _keys(layer, run, view)
    mask = run.mask
    if mask is not None:
        mask = F.pad(mask, (run.num_unmasked, 0), value=True)
        if mask.shape[1] > 1:
            mask = mask.repeat_interleave(q.shape[2] // k.shape[1], dim=1)
    return fused_attention(q, k, v, mask, sinks)
