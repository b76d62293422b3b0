"""The base class of backends that call an attention library for GPUs. A view is read in place, or
its keys are copied.

Copies are sequences for kernels with a length and a causal mask aligned at the end: keys ascend by
position, new tokens last. Each pair of a row and a KV head is one: S = B * G.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from magicdec.attention.backend import AttentionBackend, CallSize
from magicdec.config.capabilities import Capabilities, HeadSizes
from magicdec.kv.view import KVView


@dataclass(frozen=True)
class Chosen:
    """The keys to copy: slots [B, G, N], and numbers of valid ones, int32 [S]."""

    slots: Tensor
    lengths: Tensor


def choose_keys(layer: int, view: KVView) -> Chosen:
    """The keys that a layer reads, padded to the longest row."""
    positions = view.key_positions(layer)  # [B, G or 1, N]
    slots = view.cache.slots(view.row_index, positions.clamp(min=0))
    lengths = (positions >= 0).sum(2, dtype=torch.int32)
    return Chosen(slots, lengths.expand(slots.shape[:2]).reshape(-1))


def gather_keys(layer: int, choice: Chosen, view: KVView) -> tuple[Tensor, Tensor]:
    """Copies of K and V: [S, N, 1, D]."""
    k, v = view.cache.read(layer, choice.slots)
    size = k.shape[3]
    return k.view(-1, k.shape[2], 1, size), v.view(-1, v.shape[2], 1, size)


def split_heads(q: Tensor, num_kv_heads: int) -> Tensor:
    """Queries [B,T,H,D] by sequence: [S, T, H/G, D]."""
    rows, num_new, _, size = q.shape
    by_head = q.reshape(rows, num_new, num_kv_heads, -1, size).transpose(1, 2)
    return by_head.reshape(rows * num_kv_heads, num_new, -1, size)


def join_heads(out: Tensor, rows: int) -> Tensor:
    _, num_new, _, size = out.shape
    by_row = out.reshape(rows, -1, num_new, out.shape[2], size).transpose(1, 2)
    return by_row.reshape(rows, num_new, -1, size)


def library_capabilities(
    name: str, head_sizes: HeadSizes, missing_parts: Callable[[], str | None]
) -> Capabilities:
    return Capabilities(
        name,
        devices=("cuda",),
        dtypes=("bfloat16",),
        missing_parts=missing_parts,
        head_sizes=head_sizes,
        keeps_window=False,
        keeps_sinks=False,
        returns_weights=False,
    )


class LibraryBackend(AttentionBackend, ABC):
    """A backend whose sequences are rows where a full view is read in place, else pairs of a row
    and a KV head."""

    def __init__(self) -> None:
        """Raises ValueError if the library is not installed."""
        missing = self.capabilities.missing_parts()
        if missing:
            raise ValueError(f"--attention {self.capabilities.name}: {missing}")
        self._new: Tensor | None = None
        self._in_place = False
        self._chosen: Chosen | None = None  # the keys to read, if they are the same in all layers

    @staticmethod
    def working_bytes(size: CallSize) -> int:
        return size.kv_bytes

    @abstractmethod
    def block_size(self, max_tokens: int) -> int: ...

    @abstractmethod
    def can_read_in_place(self, view: KVView) -> bool:
        """Whether the library reads this full view from the cache's blocks."""

    @abstractmethod
    def attend_in_place(self, layer: int, q: Tensor, view: KVView) -> Tensor:
        """Attention of q [B,T,H,D] over all tokens of the rows: [B,T,H,D]."""

    @abstractmethod
    def attend_chosen(self, layer: int, q: Tensor, choice: Chosen, view: KVView) -> Tensor:
        """Attention of q [S,T,H/G,D] over the chosen keys: [S,T,H/G,D]."""

    def plan(self, view: KVView) -> None:
        assert view.window is None, "a sliding window is refused before the run"
        self._new = view.cache.slots(view.row_index, view.query_positions())
        self._in_place = view.is_full and self.can_read_in_place(view)
        chooses_alike = not self._in_place and not view.per_head
        self._chosen = choose_keys(0, view) if chooses_alike else None

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView) -> Tensor:
        assert self._new is not None, "plan before run"
        view.cache.write(layer, self._new, k, v)
        if self._in_place:
            return self.attend_in_place(layer, q, view)
        choice = self._chosen or choose_keys(layer, view)
        out = self.attend_chosen(layer, split_heads(q, k.shape[2]), choice, view)
        return join_heads(out, q.shape[0])


def real_lengths(view: KVView) -> Tensor:
    """Tokens in each row of a full view, new ones included: int32 [B]."""
    return (view.seq_lens + view.num_new).to(torch.int32)
