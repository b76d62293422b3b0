"""Triton kernels over the paged KV cache. They append new tokens, compute attention over a split of
the keys, merge splits, and sum attention weights by block.

Owns the arithmetic on the device. Import it only if Triton is installed. The kernels are compiled
for the GPU, or interpreted if `TRITON_INTERPRET` was set when Triton was first imported.

Names: B rows, T new tokens, H query heads, G KV heads, D head size. Tensors are contiguous unless
strides are given. Pools belong to one layer: [num_blocks, G, block_size, D]. The visible positions
of a row and head are given as ranges [start, stop); key i is the i-th visible position, counted
along these ranges. The last T keys are the new tokens. The queries of a KV head are packed
together, token by token: m = t * H/G + head.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
WEIGHTS_BLOCK = tl.constexpr(16)  # keys whose weights are summed; equals `kv.view.WEIGHTS_BLOCK`


@triton.jit
def _count_keys(ranges, num_ranges):
    """The number of keys in all ranges."""
    total = (tl.load(ranges + 1) - tl.load(ranges)).to(tl.int32)
    for r in range(1, num_ranges):
        total += (tl.load(ranges + 2 * r + 1) - tl.load(ranges + 2 * r)).to(tl.int32)
    return total


@triton.jit
def _find_positions(keys, ranges, num_ranges, IS_FULL: tl.constexpr):
    """The positions, int32 [N], of the visible `keys` [N]; -1 after the last key. `IS_FULL` avoids
    the loop, so that the compiler can start a caller's loads ahead of its arithmetic."""
    if IS_FULL:
        positions = keys
    else:
        positions = keys * 0 - 1
        before = tl.load(ranges).to(tl.int32) * 0
        for r in range(num_ranges):
            start = tl.load(ranges + 2 * r).to(tl.int32)
            size = tl.load(ranges + 2 * r + 1).to(tl.int32) - start
            inside = (keys >= before) & (keys < before + size)
            positions = tl.where(inside, start + keys - before, positions)
            before += size
    return positions


@triton.jit
def _slots(table, positions, valid, head, num_kv_heads, BLOCK_SIZE: tl.constexpr):
    """The slots of tokens in the pools, int64 [N]. `table` is the block table of a row."""
    block = tl.load(table + positions // BLOCK_SIZE, mask=valid, other=0)
    return (block * num_kv_heads + head) * BLOCK_SIZE + positions % BLOCK_SIZE


@triton.jit
def _load_tokens(pool, slots, valid, SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load the keys or values [N, D] at `slots` [N]; 0 where `valid` is false."""
    d = tl.arange(0, BLOCK_D)
    mask = valid[:, None] & (d < SIZE)[None, :]
    return tl.load(pool + slots[:, None] * SIZE + d[None, :], mask=mask, other=0.0)


@triton.jit
def _load_queries(
    q, first, row, head, num_new, q_row, q_token,
    GROUP: tl.constexpr, SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Load the packed queries [M, D] of a KV head, beginning at query `first`; 0 after the last
    query. Also returns their tokens and query heads, [M] each."""
    m, d = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    token, query_head = m // GROUP, head * GROUP + m % GROUP
    address = row * q_row + token[:, None] * q_token + query_head[:, None] * SIZE + d[None, :]
    mask = (token < num_new)[:, None] & (d < SIZE)[None, :]
    return tl.load(q + address, mask=mask, other=0.0), token, query_head


@triton.jit
def _dot(a, b, IN_FLOAT32: tl.constexpr):
    """a @ b, accumulated in float32."""
    if IN_FLOAT32:  # Triton's interpreter multiplies the bits of bfloat16 as integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _is_seen(positions, valid, own_position, WINDOW: tl.constexpr):
    """Causal mask [M, N] of `valid` keys at `positions` [N] for queries at `own_position` [M]."""
    seen = valid[None, :] & (positions[None, :] <= own_position[:, None])
    if WINDOW:
        seen = seen & (positions[None, :] > own_position[:, None] - WINDOW)
    return seen


@triton.jit
def _add_keys(scores, values, most, total, sums, IN_FLOAT32: tl.constexpr):
    """One step of the online softmax: adds `scores` [M, N], in units of log 2, and `values` [N, D]
    to each query's largest score [M], sum of weights [M] and weighted sum of values [M, D]."""
    new_most = tl.maximum(most, tl.max(scores, 1))
    shift = tl.where(new_most == float("-inf"), 0.0, new_most)  # no key so far: all weights are 0
    weights = tl.exp2(scores - shift[:, None])
    rescale = tl.exp2(most - shift)
    total = total * rescale + tl.sum(weights, 1)
    added = _dot(weights.to(values.dtype), values, IN_FLOAT32)
    return new_most, total, sums * rescale[:, None] + added


@triton.jit
def _store_part(
    out, lse, place, is_query, most, total, sums, SIZE: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Store the normalised sums [M, D] and the log-sum-exp [M] at `place` [M]."""
    d = tl.arange(0, BLOCK_D)
    total = tl.where(total == 0.0, 1.0, total)  # no visible key: `sums` is 0 and `most` is -inf
    mask = is_query[:, None] & (d < SIZE)[None, :]
    values = (sums / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + place[:, None] * SIZE + d[None, :], values, mask=mask)
    tl.store(lse + place, (most + tl.log2(total)) / LOG2E, mask=is_query)


@triton.jit
def append(
    k, v, k_pool, v_pool, block_table, rows, seq_lens,
    num_kv_heads, table_width, k_row, k_token, v_row, v_token,
    SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Write k, v [B,T,G,D], whose heads are adjacent, to the pools. Programs: (B, T)."""
    row, token = tl.program_id(0), tl.program_id(1)
    head, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    inside = (head < num_kv_heads)[:, None] & (d < SIZE)[None, :]
    position = tl.load(seq_lens + row) + token
    block = tl.load(block_table + tl.load(rows + row) * table_width + position // BLOCK_SIZE)
    slots = (block * num_kv_heads + head) * BLOCK_SIZE + position % BLOCK_SIZE
    place = slots[:, None] * SIZE + d[None, :]
    source = head[:, None] * SIZE + d[None, :]
    new_k = tl.load(k + row * k_row + token * k_token + source, mask=inside)
    new_v = tl.load(v + row * v_row + token * v_token + source, mask=inside)
    tl.store(k_pool + place, new_k, mask=inside)
    tl.store(v_pool + place, new_v, mask=inside)


@triton.jit
def attend_split(
    q, k_pool, v_pool, block_table, rows, seq_lens, ranges, out, lse,
    scale, num_new, num_heads, table_width, q_row, q_token,
    num_ranges, ranges_row, ranges_head, split_keys,
    IS_FULL: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):  # fmt: skip
    """Attention of one tile of packed queries over one split of `split_keys` keys: out
    [splits,B,T,H,D] and log-sum-exp, float32 [splits,B,T,H]; 0 and -inf if no key is visible.
    `IS_FULL` says that rows see all of their tokens. A query sees its last `WINDOW` positions (0:
    all). `GROUP` is H/G. Programs: (B, G * query tiles, splits)."""
    row, split = tl.program_id(0), tl.program_id(2)
    num_kv_heads = num_heads // GROUP
    head, tile = tl.program_id(1) % num_kv_heads, tl.program_id(1) // num_kv_heads
    queries, token, query_head = _load_queries(
        q, tile * BLOCK_M, row, head, num_new, q_row, q_token, GROUP, SIZE, BLOCK_D, BLOCK_M
    )
    own_position = tl.load(seq_lens + row).to(tl.int32) + token
    own_ranges = ranges + row * ranges_row + head * ranges_head
    table = block_table + tl.load(rows + row) * table_width
    num_keys = _count_keys(own_ranges, num_ranges)
    last_token = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, num_new - 1)
    first_key = split * split_keys
    last_key = tl.minimum(first_key + split_keys, num_keys - (num_new - 1 - last_token))

    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)  # largest score, in units of log 2
    total, sums = tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for first in range(first_key, last_key, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        positions, valid = _find_positions(key, own_ranges, num_ranges, IS_FULL), key < last_key
        slots = _slots(table, positions, valid, head, num_kv_heads, BLOCK_SIZE)
        keys = _load_tokens(k_pool, slots, valid, SIZE, BLOCK_D)
        scores = _dot(queries, tl.trans(keys), IN_FLOAT32) * (scale * LOG2E)
        seen = _is_seen(positions, valid, own_position, WINDOW)
        values = _load_tokens(v_pool, slots, valid, SIZE, BLOCK_D)
        scores = tl.where(seen, scores, float("-inf"))
        most, total, sums = _add_keys(scores, values, most, total, sums, IN_FLOAT32)

    place = ((split * tl.num_programs(0) + row) * num_new + token).to(tl.int64) * num_heads
    place += query_head
    _store_part(out, lse, place, token < num_new, most, total, sums, SIZE, BLOCK_D)


@triton.jit
def merge_splits(
    parts, part_lse, out, lse, num_splits, num_queries,
    SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Merge parts, float32 [splits, queries, D], with weights from their log-sum-exp. Writes out
    [queries, D] and the log-sum-exp over all splits. Programs: (B * T * H queries,)."""
    query = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    is_split, inside = s < num_splits, d < SIZE
    place = s * num_queries + query
    logs = tl.load(part_lse + place, mask=is_split, other=float("-inf"))
    most = tl.max(logs, 0)  # finite: a query sees itself
    weights = tl.exp2((logs - most) * LOG2E)
    total = tl.sum(weights, 0)
    address = parts + place[:, None] * SIZE + d[None, :]
    values = tl.load(address, mask=is_split[:, None] & inside[None, :], other=0.0)
    merged = tl.sum(values * weights[:, None], 0) / total
    tl.store(out + query * SIZE + d, merged.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + query, most + tl.log2(total) / LOG2E)


@triton.jit
def sum_mass(
    q, k_pool, block_table, rows, seq_lens, ranges, lse, mass,
    scale, num_new, num_heads, table_width, q_row, q_token,
    num_ranges, ranges_row, ranges_head, num_blocks,
    WINDOW: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):  # fmt: skip
    """Writes mass, float32 [B, G, num_blocks]: attention weights of WEIGHTS_BLOCK positions, summed
    over the queries of a KV head. `lse`, float32 [B,T,H], is each query's log-sum-exp. One program
    sums a block alone, so additions have a fixed order. Programs: (B, G, BLOCK_N tiles)."""
    row, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_kv_heads = num_heads // GROUP
    positions = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    own_ranges = ranges + row * ranges_row + head * ranges_head
    visible = positions < 0
    for r in range(num_ranges):
        start, stop = tl.load(own_ranges + 2 * r), tl.load(own_ranges + 2 * r + 1)
        visible = visible | ((positions >= start) & (positions < stop))
    table = block_table + tl.load(rows + row) * table_width
    slots = _slots(table, positions, visible, head, num_kv_heads, BLOCK_SIZE)
    keys = _load_tokens(k_pool, slots, visible, SIZE, BLOCK_D)
    any_visible = tl.max(visible.to(tl.int32), 0)
    seq_len = tl.load(seq_lens + row).to(tl.int32)
    sums = tl.full((BLOCK_N,), 0.0, tl.float32)
    for first in range(0, num_new * GROUP * any_visible, BLOCK_M):
        queries, token, query_head = _load_queries(
            q, first, row, head, num_new, q_row, q_token, GROUP, SIZE, BLOCK_D, BLOCK_M
        )
        is_query = token < num_new
        logs = tl.load(lse + (row * num_new + token) * num_heads + query_head, mask=is_query)
        scores = _dot(queries, tl.trans(keys), IN_FLOAT32) * scale
        counts = _is_seen(positions, visible, seq_len + token, WINDOW) & is_query[:, None]
        weights = tl.exp2((tl.where(counts, scores, float("-inf")) - logs[:, None]) * LOG2E)
        sums += tl.sum(tl.where(counts, weights, 0.0), 0)
    by_block = tl.sum(tl.reshape(sums, (BLOCK_N // WEIGHTS_BLOCK, WEIGHTS_BLOCK)), 1)
    block = tile * (BLOCK_N // WEIGHTS_BLOCK) + tl.arange(0, BLOCK_N // WEIGHTS_BLOCK)
    place = (row * num_kv_heads + head) * num_blocks + block
    tl.store(mass + place, by_block, mask=block < num_blocks)
