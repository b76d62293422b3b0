"""DeviceRows: rows of a cache whose lengths the device alone knows, for work that is recorded once
and replayed without the host (CUDA graphs); and what goes from host to device without waiting.

Owns which of the rows still count. Where a method takes such rows in place of a sequence of
numbers, lengths are tensors [B] in place of lists, and no value is read by the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class DeviceRows:
    """`active` [B] says which rows go on: the others are computed as well, in vain, read nothing of
    their context and keep their length. A row never holds more than `max_tail` unsettled tokens
    before a forward."""

    numbers: tuple[int, ...]
    index: Tensor  # int64 [B], the same
    active: Tensor  # bool [B]
    max_tail: int

    def __len__(self) -> int:
        return len(self.numbers)


Rows = Sequence[int] | DeviceRows
Lengths = Sequence[int] | Tensor
"""Tokens, a number a row: on the host for rows given there, else int64 [B]."""


def upload(values: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor of numbers of the host's. On CUDA by way of pinned memory: a copy from elsewhere
    would wait until the device has done all that was asked of it."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def index_of(rows: Rows, device: torch.device) -> Tensor:
    """The numbers of `rows`, int64 [B]."""
    return rows.index if isinstance(rows, DeviceRows) else upload(list(rows), device)
