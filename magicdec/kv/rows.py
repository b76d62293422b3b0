"""BatchRows and Lengths: which rows of the KV cache a forward appends to, and how long they are, on
the device and as far as the host knows it.

Owns this pair of types and the way in which the host's numbers reach the device. Must not know how
the cache stores anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def upload(values: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor of the host's numbers. On CUDA the copy goes through pinned memory: a copy from
    pageable memory would wait until the device has finished all earlier work."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


@dataclass(frozen=True)
class BatchRows:
    """The rows of the cache that a forward appends to, as the device knows them.

    `max_tail` is None for a forward that the host starts: the host then knows every length before
    each forward. Rows of a step that is captured and replayed (CUDA graphs) have a `max_tail`: the
    host knows no length while it captures, only that a row never holds more than `max_tail`
    uncommitted tokens before a forward. Such a batch keeps its rows when some have ended: these are
    computed too, but read nothing of their context and keep their length (`active` 0).
    """

    numbers: tuple[int, ...]
    index: Tensor  # int64 [B], the same numbers
    active: Tensor  # int64 [B]: 1, or 0 for rows that have ended
    max_tail: int | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def is_captured(self) -> bool:
        return self.max_tail is not None

    @classmethod
    def of(cls, rows: Rows, device: torch.device, max_tail: int | None = None) -> BatchRows:
        """From row numbers; rows that are already on the device are returned as they are."""
        if isinstance(rows, BatchRows):
            return rows
        index = upload(list(rows), device)
        return cls(tuple(rows), index, torch.ones_like(index), max_tail)


Rows = BatchRows | Sequence[int]


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens, one a row: on the device, and for the host `bounds` that no row exceeds.
    The bounds are exact wherever the host starts the work itself (see `BatchRows`), except between
    a verification and the moment when its result is read."""

    tensor: Tensor  # int64 [B]
    bounds: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Lengths | Sequence[int], device: torch.device) -> Lengths:
        if isinstance(lengths, Lengths):
            return lengths
        bounds = tuple(int(length) for length in lengths)
        return cls(upload(bounds, device), bounds)

    def plus(self, count: int) -> Lengths:
        return Lengths(self.tensor + count, tuple(bound + count for bound in self.bounds))
