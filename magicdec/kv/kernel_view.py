"""KernelView: a view computed by one Triton kernel in place of up to 17 launches of torch operators
(`kv.view`). Grid and allocations follow from shapes, so that a CUDA graph can hold it. Interpreted
on a CPU, for tests.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

from magicdec.kernels.build import load_kernels, next_power
from magicdec.kv.cache import BatchRows, KVCache, Lengths, Rows
from magicdec.kv.view import (
    ChosenRanges,
    FullView,
    KVView,
    SinksAndWindow,
    Visible,
    host_numbers,
    make_view,
)

NO_LIMIT = 2**31 - 1  # tokens
MOST_AT_ONCE = 256  # positions that a program writes at once


@functools.cache
def kernels(device: str) -> ModuleType:
    return load_kernels("magicdec.kv.triton_kernels", "--elementwise triton", device)


@dataclass(frozen=True)
class ViewTensors:
    """The int64 outputs of the kernel, named as members of `KVView`."""

    seq_lens: Tensor  # [B]
    all_ranges: Tensor  # [L or 1, B, G or 1, R+1, 2]
    positions: Tensor  # [B, T]
    reads: Tensor  # [B, 2]


@dataclass(frozen=True)
class KernelView(KVView):
    tensors: ViewTensors = field(kw_only=True)

    @property
    def all_ranges(self) -> Tensor:
        return self.tensors.all_ranges

    def positions(self) -> Tensor:
        return self.tensors.positions

    def reads(self, rows: BatchRows) -> Tensor:
        return self.tensors.reads


def make_kernel_view(
    cache: KVCache,
    rows: Rows,
    visible: Visible,
    num_new: int,
    committed: Lengths | Sequence[int] | None = None,
    window: int | None = None,
    offsets: Tensor | None = None,
) -> KVView:
    """`make_view` by the kernel, except for rules that it does not know."""
    if not isinstance(visible, FullView | SinksAndWindow | ChosenRanges):
        return make_view(cache, rows, visible, num_new, committed, window, offsets)
    device = cache.seq_lens.device
    rows = BatchRows.of(rows, device)
    settled = None if committed is None else Lengths.of(committed, device)
    tensors = compute(cache, rows, visible, num_new, settled, window, offsets)
    before = Lengths(tensors.seq_lens, cache.bounds_of(rows))
    per_head = isinstance(visible, ChosenRanges)
    ranges = tensors.all_ranges[..., :-1, :]
    lengths, num_visible, is_full = host_numbers(
        cache, rows, visible, num_new, before, settled, window, per_head
    )
    return KernelView(
        cache,
        rows.numbers,
        rows.index,
        before.tensor,
        (settled or before).tensor,
        ranges if per_head else ranges[0, :, 0],
        lengths,
        num_visible,
        num_new,
        is_full,
        window,
        offsets=offsets,
        tensors=tensors,
    )


def compute(
    cache: KVCache,
    rows: BatchRows,
    visible: FullView | SinksAndWindow | ChosenRanges,
    num_new: int,
    committed: Lengths | None,
    window: int | None,
    offsets: Tensor | None,
) -> ViewTensors:
    num_rows = len(rows)
    device = cache.seq_lens.device
    chosen = None
    num_lists = 1
    num_heads = 1
    num_ranges = 1
    num_sinks = 0
    budget = NO_LIMIT
    if isinstance(visible, SinksAndWindow):
        num_ranges = 2
        num_sinks = visible.num_sink_tokens
        budget = visible.budget
    elif isinstance(visible, ChosenRanges):
        chosen = visible.key_ranges.contiguous()
        num_lists, _, num_heads, num_ranges, _ = chosen.shape
    shapes = (
        (num_rows,),
        (num_lists, num_rows, num_heads, num_ranges + 1, 2),
        (num_rows, num_new),
        (num_rows, 2),
    )
    made = [torch.empty(shape, dtype=torch.int64, device=device) for shape in shapes]
    kernels(device.type).describe_rows[(num_rows, num_lists, num_heads)](
        cache.seq_lens,
        rows.index,
        rows.active,
        committed and committed.tensor,
        offsets,
        chosen,
        *made,
        num_new,
        num_ranges,
        num_sinks,
        budget,
        window or NO_LIMIT,
        BLOCK_R=next_power(num_ranges + 1),
        BLOCK_T=min(MOST_AT_ONCE, next_power(num_new)),
    )
    return ViewTensors(*made)
