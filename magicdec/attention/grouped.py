"""The portable fast backend: two batched matrix products around a softmax, query heads of a KV head
packed together.

Reads the cache in place where a row's visible tokens are one run of memory (full view, or all of a
sliding window), and gathers them into a small buffer where they are not (a budgeted view). Long
chunks (prefill) go through torch's fused kernel instead: there scores would be large.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.attention.backend import (
    AttentionBackend,
    CallSize,
    check_mass,
    sum_blocks,
    visible_mask,
)
from magicdec.config.capabilities import Capabilities, capabilities_of
from magicdec.kv.layout import PLAIN, Layout
from magicdec.kv.view import KVView
from magicdec.names import AUTO_BACKENDS, REFERENCE_BACKEND

FUSED_FROM = 32  # new tokens from which the fused kernel is used: it never writes the scores out


@dataclass(frozen=True)
class Run:
    """Rows `first` to `last` of a batch that are read with one call. `slots` is None where they are
    read in place, from `first_key` on."""

    first: int
    last: int
    block: int
    first_key: int
    num_keys: int
    positions: Tensor  # of the keys, [rows, G or 1, num_keys], -1 for padding
    slots: Tensor | None
    num_unmasked: int  # leading keys that every new token of every row sees
    mask: Tensor | None  # bool [rows, G or 1, T, num_keys - num_unmasked]; None: all see all


class GroupedBackend(AttentionBackend):
    """One block holds a row, so that a row's cache is one strided matrix for the GEMM. Rows of
    several blocks (a rolling cache chooses its own block size) are gathered."""

    capabilities = Capabilities("grouped", can_be_recorded=False, rounds_scores=True)

    def __init__(self) -> None:
        self._new: Tensor | None = None
        self._runs: list[Run] | None = None  # None where every layer reads keys of its own

    @staticmethod
    def working_bytes(size: CallSize) -> int:
        """Scores, weights, and these once more; torch's fused kernel has a mask instead."""
        if size.T >= FUSED_FROM:
            return size.mask_bytes
        return size.B * size.num_heads * size.T * size.S * (2 * size.dtype_bytes + 4)

    def block_size(self, max_tokens: int) -> int:
        return max_tokens

    def layout(self, dtype: torch.dtype) -> Layout:
        if dtype == torch.int8:
            known = (*AUTO_BACKENDS, REFERENCE_BACKEND)
            fitting = [name for name in known if capabilities_of(name).int8_kv_dtypes]
            raise ValueError(
                f"--attention grouped reads no int8 KV; choose from {', '.join(fitting)}"
            )
        return PLAIN

    def plan(self, view: KVView) -> None:
        self._new = view.cache.slots(view.row_index, view.query_positions())
        in_place = view.is_full and all(len(view.cache.blocks[row]) == 1 for row in view.rows)
        self._runs = None
        if in_place:
            self._runs = list(_dense_runs(view))
        elif not view.per_head:
            self._runs = [_gathered_run(0, view)]

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView) -> Tensor:
        outputs = [
            _fused(layer, q[r.first : r.last], r, view)
            if q.shape[1] >= FUSED_FROM
            else _attend(layer, q[r.first : r.last], r, view)[0]
            for r in self._write(layer, k, v, view)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def run_with_mass(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView
    ) -> tuple[Tensor, Tensor]:
        """From the weights that attention computes; the fused kernel never has them."""
        check_mass("grouped", q.shape[1], FUSED_FROM)
        outputs, masses = [], []
        for r in self._write(layer, k, v, view):
            out, weights = _attend(layer, q[r.first : r.last], r, view)
            outputs.append(out)
            masses.append(sum_blocks(weights.sum(dim=2), r.positions, view.num_mass_blocks))
        return torch.cat(outputs), torch.cat(masses)

    def _write(self, layer: int, k: Tensor, v: Tensor, view: KVView) -> list[Run]:
        """Append k and v; what the layer then reads."""
        assert self._new is not None, "plan before run"
        view.cache.write(layer, self._new, k, v)
        return [_gathered_run(layer, view)] if self._runs is None else self._runs


def _dense_runs(view: KVView) -> Iterator[Run]:
    """Batch rows whose blocks follow each other in the pool, as stretches read in place."""
    blocks = [view.cache.blocks[row] for row in view.rows]
    first = 0
    for i in range(1, len(blocks) + 1):
        if i == len(blocks) or blocks[i][0] != blocks[i - 1][0] + 1:
            lengths, first_key = view.lengths[first:i], min(view.first_keys[first:i])
            stop = max(lengths) + view.num_new
            positions = torch.arange(first_key, stop, device=view.seq_lens.device)
            positions = positions.expand(i - first, 1, -1)
            unmasked, mask = _mask(view, first, i, positions, min(lengths), max(lengths))
            block, num_keys = blocks[first][0], stop - first_key
            yield Run(first, i, block, first_key, num_keys, positions, None, unmasked, mask)
            first = i


def _gathered_run(layer: int, view: KVView) -> Run:
    """The visible keys of all rows, to be copied together; shorter rows are padded and the padding
    masked."""
    keys = view.key_positions(layer)  # [B, G or 1, N]
    least, most = min(view.num_visible), max(view.num_visible)
    unmasked, mask = _mask(view, 0, len(view.rows), keys, least, most)
    slots = view.cache.slots(view.row_index, keys.clamp(min=0))
    return Run(0, len(view.rows), 0, 0, keys.shape[2], keys, slots, unmasked, mask)


def _mask(
    view: KVView, first: int, last: int, keys: Tensor, least: int, most: int
) -> tuple[int, Tensor | None]:
    """How many leading keys every token sees, and who sees the rest.

    Without a window only the last columns can be hidden from some token: those past the shortest
    row's old tokens, `least` of at most `most`. They are the same in every head, since all heads of
    a row see equally many. With one the first can be too."""
    longest = max(view.lengths[first:last]) + view.num_new
    is_cut = view.window is not None and view.window < longest
    if view.num_new == 1 and least == most and not (is_cut and view.per_head):
        return keys.shape[2], None
    if is_cut:
        return 0, visible_mask(view, keys, first, last)
    return least, visible_mask(view, keys[:, :1, least:], first, last)


def _keys(layer: int, run: Run, view: KVView) -> tuple[Tensor, Tensor]:
    """K and V of one run, [rows, G, num_keys, D] each."""
    cache = view.cache
    if run.slots is not None:
        return cache.read(layer, run.slots)
    place = slice(run.block, run.block + run.last - run.first)
    keys = slice(run.first_key, run.first_key + run.num_keys)
    return cache.k[layer, place, :, keys], cache.v[layer, place, :, keys]


def _attend(layer: int, q: Tensor, run: Run, view: KVView) -> tuple[Tensor, Tensor]:
    """q [rows, T, H, D] -> [rows, T, H, D] over the keys of one run, and the weights, float32
    [rows, G, H/G * T, num_keys]."""
    k, v = _keys(layer, run, view)
    rows, num_new, num_heads, size = q.shape
    groups = k.shape[1]
    packed = (q * size**-0.5).view(rows, num_new, groups, -1, size).permute(0, 2, 3, 1, 4)
    packed = packed.reshape(rows, groups, -1, size)  # [rows, G, H/G * T, D]
    scores = torch.matmul(packed, k.transpose(-1, -2))
    if run.mask is not None:
        tail = scores.view(rows, groups, -1, num_new, run.num_keys)[..., run.num_unmasked :]
        tail.masked_fill_(~run.mask.unsqueeze(2), float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    out = torch.matmul(weights.to(v.dtype), v).view(rows, groups, -1, num_new, size)
    return out.permute(0, 3, 1, 2, 4).reshape(rows, num_new, num_heads, size), weights


def _fused(layer: int, q: Tensor, run: Run, view: KVView) -> Tensor:
    """torch's scaled_dot_product_attention with the mask widened to all keys."""
    k, v = _keys(layer, run, view)
    mask = run.mask
    if mask is not None:
        mask = F.pad(mask, (run.num_unmasked, 0), value=True)
        if mask.shape[1] > 1:
            mask = mask.repeat_interleave(q.shape[2] // k.shape[1], dim=1)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2)
