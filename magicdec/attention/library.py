"""What the backends over libraries for GPUs share: the steps of the contract around one call of the
library.

Owns when new keys are written, which views are read where they lie and which keys of the others are
given. Must not know any library: its backend says how it is found, its block size, what it reads in
place and how it is called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from magicdec.attention.backend import AttentionBackend, CallSize
from magicdec.attention.sequences import Chosen, choose_keys, join_heads, split_heads
from magicdec.config.capabilities import Capabilities, HeadSizes, list_backends
from magicdec.kv.layout import PLAIN, Layout
from magicdec.kv.view import KVView


def library_capabilities(
    name: str,
    head_sizes: HeadSizes,
    missing_parts: Callable[[], str | None],
    can_be_recorded: bool = True,
) -> Capabilities:
    """What the libraries have in common: CUDA and bfloat16 alone, no window, no weights."""
    return Capabilities(
        name,
        devices=("cuda",),
        dtypes=("bfloat16",),
        missing_parts=missing_parts,
        head_sizes=head_sizes,
        keeps_window=False,
        returns_weights=False,
        can_be_recorded=can_be_recorded,
    )


class LibraryBackend(AttentionBackend, ABC):
    """A full view is read in place where the library can, one sequence for each row. Of any other
    view every row and KV head is a sequence of its own."""

    def __init__(self) -> None:
        """Raises ValueError for what is not installed."""
        missing = self.capabilities.missing_parts()
        if missing:
            raise ValueError(f"--attention {self.capabilities.name}: {missing}")
        self._new: Tensor | None = None
        self._in_place = False
        self._chosen: Chosen | None = None  # what all layers read, where it is the same

    @staticmethod
    def working_bytes(size: CallSize) -> int:
        """What a view that is not full gathers."""
        return size.kv_bytes

    @abstractmethod
    def block_size(self, max_tokens: int) -> int: ...

    @abstractmethod
    def can_read_in_place(self, view: KVView) -> bool:
        """Of a full view: whether the library takes the blocks as they lie."""

    @abstractmethod
    def attend_in_place(self, layer: int, q: Tensor, view: KVView) -> Tensor:
        """q [B,T,H,D] over all that the rows hold, new tokens included: [B,T,H,D]."""

    @abstractmethod
    def attend_chosen(self, layer: int, q: Tensor, chosen: Chosen, view: KVView) -> Tensor:
        """q [S,T,H/G,D], each sequence over its own chosen keys: [S,T,H/G,D]."""

    def layout(self, dtype: torch.dtype) -> Layout:
        return PLAIN

    def plan(self, view: KVView) -> None:
        assert view.window is None, "refused before the run"
        self._new = view.cache.slots(view.row_index, view.query_positions())
        self._in_place = view.is_full and self.can_read_in_place(view)
        chooses_alike = not self._in_place and not view.per_head
        self._chosen = choose_keys(0, view) if chooses_alike else None

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView) -> Tensor:
        assert self._new is not None, "plan before run"
        view.cache.write(layer, self._new, k, v)
        if self._in_place:
            return self.attend_in_place(layer, q, view)
        chosen = self._chosen or choose_keys(layer, view)
        out = self.attend_chosen(layer, split_heads(q, k.shape[2]), chosen, view)
        return join_heads(out, q.shape[0])

    def run_with_mass(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView
    ) -> tuple[Tensor, Tensor]:
        """The libraries keep their weights to themselves."""
        fitting = ", ".join(list_backends(lambda c: c.returns_weights))
        raise ValueError(
            f"--attention {self.capabilities.name} does not tell where the attention goes; "
            f"choose from {fitting}"
        )


def real_lengths(view: KVView) -> Tensor:
    """Tokens that each row of a full view holds with the new ones: int32 [B]."""
    return (view.seq_lens + view.num_new).to(torch.int32)
