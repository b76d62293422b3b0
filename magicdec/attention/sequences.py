"""Turns the visible keys of a forward into plain sequences, for kernels that take only a length and
a causal mask for the last tokens.

Owns the copying. Keys are in ascending order of position and the new tokens come last, so a causal
mask that is aligned at the end hides exactly what the view hides. Every pair of a row and a KV head
becomes a sequence of its own, even if all heads see the same keys: there are S = B * G sequences of
one KV head each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from magicdec.kv.view import KVView


@dataclass(frozen=True)
class Chosen:
    """The keys to copy: their slots [B, G, N], and how many of them are valid, int32 [S]."""

    slots: Tensor
    lengths: Tensor


def choose_keys(layer: int, view: KVView) -> Chosen:
    """The keys that a layer reads, padded to the longest row."""
    cells = view.key_cells(layer)  # [B, G or 1, N]
    slots = view.cache.slots(view.row_index, cells.clamp(min=0))
    lengths = (cells >= 0).sum(2, dtype=torch.int32)
    return Chosen(slots, lengths.expand(slots.shape[:2]).reshape(-1))


def gather_keys(layer: int, chosen: Chosen, view: KVView) -> tuple[Tensor, Tensor]:
    """Copies of K and V: [S, N, 1, D] each."""
    k, v = view.cache.read(layer, chosen.slots)
    size = k.shape[3]
    return k.view(-1, k.shape[2], 1, size), v.view(-1, v.shape[2], 1, size)


def split_heads(q: Tensor, num_kv_heads: int) -> Tensor:
    """Arrange queries [B,T,H,D] by sequence: [S, T, H/G, D]."""
    rows, num_new, _, size = q.shape
    by_head = q.reshape(rows, num_new, num_kv_heads, -1, size).transpose(1, 2)
    return by_head.reshape(rows * num_kv_heads, num_new, -1, size)


def join_heads(out: Tensor, rows: int) -> Tensor:
    """Undo `split_heads` for the outputs: [S, T, H/G, D] to [B,T,H,D]."""
    _, num_new, _, size = out.shape
    by_row = out.reshape(rows, -1, num_new, out.shape[2], size).transpose(1, 2)
    return by_row.reshape(rows, num_new, -1, size)
