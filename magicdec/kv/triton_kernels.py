"""The Triton kernel of `kv.kernel_view`: row lengths and visible ranges of a forward. Import it
only if Triton is installed.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_new", "num_ranges", "num_sinks", "budget", "window"])
def describe_rows(
    all_lengths,
    rows,
    active,
    committed,
    offsets,
    chosen,
    lengths,
    ranges,
    positions,
    reads,
    num_new,
    num_ranges,
    num_sinks,
    budget,
    window,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Writes int64 `lengths` [B], `ranges` [L,B,G,R+1,2], `positions` [B,T] and `reads` [B,2] of
    `KVView`, from lengths and `offsets` (or 0) of all cache rows. `committed` [B] is None for
    all tokens. Ranges are `chosen` [L,B,G,R,2], or sinks and a window of `budget` tokens
    together, or a window (L = G = 1), then the tail. `window` is the model's. Programs: (B, L,
    G)."""
    b = tl.program_id(0)
    layer = tl.program_id(1)
    head = tl.program_id(2)
    row = tl.load(rows + b)
    is_active = tl.load(active + b)
    length = tl.load(all_lengths + row)
    num_committed = length
    if committed is not None:
        num_committed = tl.where(is_active > 0, tl.load(committed + b), length)
    first = tl.maximum(length + 1 - window, 0)
    r = tl.arange(0, BLOCK_R)
    place = ((layer * tl.num_programs(0) + b) * tl.num_programs(2) + head).to(tl.int64)
    if chosen is not None:
        given = chosen + place * num_ranges * 2 + 2 * r
        start = tl.load(given, mask=r < num_ranges, other=0)
        stop = tl.load(given + 1, mask=r < num_ranges, other=0)
    else:
        sinks = tl.minimum(num_committed, num_sinks)
        begin = tl.maximum(sinks, num_committed - (budget - num_sinks))
        is_window = r == num_ranges - 1
        start = tl.maximum(tl.where(is_window, begin, 0), first)
        stop = tl.maximum(tl.where(is_window, num_committed, sinks), first)
    is_tail = r == num_ranges
    start = tl.where(is_tail, tl.maximum(num_committed, first), start * is_active)
    stop = tl.where(is_tail, length + num_new, stop * is_active)
    own = ranges + place * (num_ranges + 1) * 2 + 2 * r
    tl.store(own, start, mask=r <= num_ranges)
    tl.store(own + 1, stop, mask=r <= num_ranges)
    if (layer == 0) & (head == 0):
        tl.store(lengths + b, length)
        tl.store(reads + 2 * b, tl.sum(tl.where(r <= num_ranges, stop - start, 0), 0) * is_active)
        tl.store(reads + 2 * b + 1, is_active)
        shift = length if offsets is None else length + tl.load(offsets + row)
        for t in range(0, num_new, BLOCK_T):
            token = t + tl.arange(0, BLOCK_T)
            tl.store(positions + b * num_new + token, shift + token, mask=token < num_new)
