"""The visible keys of a forward as plain sequences, for kernels that know no more than a length and
the causal order of the last tokens.

Owns the gathering. Keys come in ascending order and the new tokens last, so that "causal, aligned
at the end" is exactly what a view shows. Every row and KV head becomes a sequence of its own,
whether heads see the same or not: S = B * G sequences of one KV head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from magicdec.kv.view import KVView


@dataclass(frozen=True)
class Chosen:
    """What is to be gathered: slots [B, G, N] and how many of them count, int32 [S]."""

    slots: Tensor
    lengths: Tensor


def choose_keys(layer: int, view: KVView) -> Chosen:
    """What a layer reads, padded to the longest row."""
    positions = view.key_positions(layer)  # [B, G or 1, N]
    slots = view.cache.slots(view.row_index, positions.clamp(min=0))
    lengths = (positions >= 0).sum(2, dtype=torch.int32)
    return Chosen(slots, lengths.expand(slots.shape[:2]).reshape(-1))


def gather_keys(layer: int, chosen: Chosen, view: KVView) -> tuple[Tensor, Tensor]:
    """Copies of K and V, [S, N, 1, D] each."""
    k, v = view.cache.read(layer, chosen.slots)
    size = k.shape[3]
    return k.view(-1, k.shape[2], 1, size), v.view(-1, v.shape[2], 1, size)


def split_heads(q: Tensor, num_kv_heads: int) -> Tensor:
    """Queries [B,T,H,D] by sequence: [S, T, H/G, D]."""
    rows, num_new, _, size = q.shape
    by_head = q.reshape(rows, num_new, num_kv_heads, -1, size).transpose(1, 2)
    return by_head.reshape(rows * num_kv_heads, num_new, -1, size)


def join_heads(out: Tensor, rows: int) -> Tensor:
    """The reverse, for outputs: [S, T, H/G, D] to [B,T,H,D]."""
    _, num_new, _, size = out.shape
    by_row = out.reshape(rows, -1, num_new, out.shape[2], size).transpose(1, 2)
    return by_row.reshape(rows, num_new, -1, size)
