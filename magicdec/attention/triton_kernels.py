"""Triton kernels over the paged KV cache: append tokens, list visible keys, attend to splits of
keys and merge them, sum weights by block. Import only where Triton is installed. They are
interpreted if `TRITON_INTERPRET` was set before the first import of Triton.

Names: B rows, T new tokens, H query heads, G KV heads, D head size. Tensors are contiguous unless
strides are given. A layer's pool is [num_blocks, G, block_size, D]; a slot is a token and head in
it. Key i is the i-th visible position along a row's ranges [start, stop); the last T keys are new.
Queries of a KV head are packed: m = t * H/G + head. A tile is BLOCK_N keys, adjacent in one block
or listed with slots.
"""

from __future__ import annotations

import triton
import triton.language as tl

from magicdec.kernels.triton_kernels import to_bfloat16

LOG2E = tl.constexpr(1.4426950408889634)
WEIGHTS_BLOCK = tl.constexpr(16)  # keys whose weights are summed; equals `kv.view.WEIGHTS_BLOCK`
# Of codes, as in `kv.layout`: tokens of a tile, dimensions of a scale, and of a transform.
TILE = tl.constexpr(64)
GROUP_4 = tl.constexpr(32)
MIXED = tl.constexpr(16)


@triton.jit
def _count_keys(ranges, num_ranges, BLOCK_R: tl.constexpr):
    r = tl.arange(0, BLOCK_R)
    start = tl.load(ranges + 2 * r, mask=r < num_ranges, other=0)
    stop = tl.load(ranges + 2 * r + 1, mask=r < num_ranges, other=0)
    return tl.sum((stop - start).to(tl.int32), 0)


@triton.jit
def _load_tokens(
    pool,
    slots,
    valid,
    DTYPE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BITS: tl.constexpr,
):
    """Keys or values [N, D] at `slots` [N]; 0 unless `valid`. Codes of `BITS` bits (0: none) are
    widened to `DTYPE`; those of 8 bits are FP8 in a pool of uint8."""
    if BITS == 8 and pool.dtype.element_ty == tl.uint8:
        tokens = _load_fp8(pool, slots, valid, SIZE, BLOCK_D).to(DTYPE)
    elif BITS == 8:
        tokens = _load_int8(pool, slots, valid, SIZE, BLOCK_D).to(DTYPE)
    elif BITS == 4:
        tokens = _load_int4(pool, slots, valid, SIZE, BLOCK_D).to(DTYPE)
    else:
        d = tl.arange(0, BLOCK_D)
        mask = valid[:, None] & (d < SIZE)[None, :]
        tokens = tl.load(pool + slots[:, None] * SIZE + d[None, :], mask=mask, other=0.0)
    return tokens


@triton.jit
def _load_fp8(pool, slots, valid, SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    """As float32. The bits of e4m3 are the first ones of a float32 that is smaller by 2^120, a half
    of whose exponent is missing: GPUs before capability 8.9, and the interpreter, know no FP8."""
    d = tl.arange(0, BLOCK_D)
    mask = valid[:, None] & (d < SIZE)[None, :]
    codes = tl.load(pool + slots[:, None] * SIZE + d[None, :], mask=mask, other=0).to(tl.uint32)
    smaller = ((codes & 0x80) << 24) | ((codes & 0x7F) << 20)
    numbers = smaller.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), numbers)


@triton.jit
def _store_fp8(pool, slots, numbers, valid, SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes numbers float32 [N, D], to nearest, halves to even; larger ones than 448 become that,
    and NaN stays."""
    d = tl.arange(0, BLOCK_D)
    bits = numbers.to(tl.int32, bitcast=True)
    least = _round(tl.minimum(tl.abs(numbers), 0.015625) * 512.0).to(tl.int32)
    rest = bits & 0x7FFFFFFF
    normal = tl.minimum(((rest + 0x7FFFF + ((rest >> 20) & 1)) >> 20) - (120 << 3), 0x7E)
    codes = tl.where(rest < (121 << 23), least, normal)  # of 2^-6
    codes = tl.where(rest > 0x7F800000, 0x7F, codes) | ((bits >> 24) & 0x80)
    mask = valid[:, None] & (d < SIZE)[None, :]
    tl.store(pool + slots[:, None] * SIZE + d[None, :], codes.to(tl.uint8), mask=mask)


@triton.jit
def _int8_places(slots, SIZE: tl.constexpr):
    """The first code [N] and the scale [N] of tokens: addresses in a pool, in bytes."""
    tile = slots // TILE * (TILE * (SIZE + 4))
    token = slots % TILE
    return tile + token * SIZE, tile + TILE * SIZE + token * 4


@triton.jit
def _load_int8(pool, slots, valid, SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    """As float32."""
    d = tl.arange(0, BLOCK_D)
    first, scale = _int8_places(slots, SIZE)
    mask = valid[:, None] & (d < SIZE)[None, :]
    codes = tl.load(pool + first[:, None] + d[None, :], mask=mask, other=0)
    scales = tl.load((pool + scale).to(tl.pointer_type(tl.float32)), mask=valid, other=0.0)
    return codes.to(tl.float32) * scales[:, None]


@triton.jit
def _store_int8(pool, slots, numbers, valid, SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes numbers float32 [N, D]. Where a GPU fuses the product with the sum that rounds it,
    halves of a scale may fall the other way."""
    d = tl.arange(0, BLOCK_D)
    first, scale = _int8_places(slots, SIZE)
    most = tl.max(tl.abs(numbers), 1)
    inverse = tl.where(most > 0.0, tl.div_rn(127.0, tl.where(most > 0.0, most, 1.0)), 0.0)
    codes = _round(numbers * inverse[:, None]).to(tl.int8)
    mask = valid[:, None] & (d < SIZE)[None, :]
    tl.store(pool + first[:, None] + d[None, :], codes, mask=mask)
    scales = tl.div_rn(most, tl.full(most.shape, 127.0, tl.float32))
    tl.store((pool + scale).to(tl.pointer_type(tl.float32)), scales, mask=valid)


@triton.jit
def _int4_places(slots, SIZE: tl.constexpr):
    """The first byte of codes [N] and the first scale [N] of tokens: addresses in a pool, in bytes.
    Scales of the next group are 2 TILE bytes further."""
    code_bytes: tl.constexpr = tl.cdiv(SIZE, GROUP_4) * (GROUP_4 // 2)
    tile_bytes: tl.constexpr = TILE * (code_bytes + tl.cdiv(SIZE, GROUP_4) * 2)
    tile = slots // TILE * tile_bytes
    token = slots % TILE
    return tile + token * code_bytes, tile + TILE * code_bytes + token * 2


@triton.jit
def _load_int4(pool, slots, valid, SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    """As float32; of keys, their transforms."""
    num_tokens: tl.constexpr = slots.shape[0]
    num_groups: tl.constexpr = BLOCK_D // GROUP_4
    used_groups: tl.constexpr = tl.cdiv(SIZE, GROUP_4)
    half: tl.constexpr = GROUP_4 // 2
    first, scale = _int4_places(slots, SIZE)
    byte = tl.arange(0, BLOCK_D // 2)
    mask = valid[:, None] & (byte < used_groups * half)[None, :]
    pairs = tl.load(pool + first[:, None] + byte[None, :], mask=mask, other=0).to(tl.int32)
    low = ((pairs & 15) ^ 8) - 8  # of 4 bits with a sign
    high = ((pairs >> 4) ^ 8) - 8
    joined = tl.join(low.to(tl.int8), high.to(tl.int8))
    both = tl.reshape(joined, (num_tokens, num_groups, half, 2))
    codes = tl.reshape(tl.permute(both, (0, 1, 3, 2)), (num_tokens, num_groups, GROUP_4))
    group = tl.arange(0, num_groups)
    address = pool + scale[:, None] + group[None, :] * (2 * TILE)
    is_used = valid[:, None] & (group < used_groups)[None, :]
    scales = tl.load(address.to(tl.pointer_type(tl.bfloat16)), mask=is_used, other=0.0)
    numbers = codes.to(tl.float32) * scales.to(tl.float32)[:, :, None]
    return tl.reshape(numbers, (num_tokens, BLOCK_D))


@triton.jit
def _store_int4(pool, slots, numbers, valid, SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes numbers float32 [N, D], which are 0 from SIZE on."""
    num_tokens: tl.constexpr = slots.shape[0]
    num_groups: tl.constexpr = BLOCK_D // GROUP_4
    used_groups: tl.constexpr = tl.cdiv(SIZE, GROUP_4)
    half: tl.constexpr = GROUP_4 // 2
    first, scale = _int4_places(slots, SIZE)
    groups = tl.reshape(numbers, (num_tokens, num_groups, GROUP_4))
    dimension = tl.arange(0, GROUP_4)[None, None, :]
    chosen = tl.argmax(tl.abs(groups), 2)[:, :, None]
    largest = tl.sum(tl.where(dimension == chosen, groups, 0.0), 2)
    scales = to_bfloat16(largest / -8.0)
    divisor = tl.where(scales == 0.0, 1.0, scales)
    divided = tl.div_rn(groups, tl.broadcast_to(divisor[:, :, None], groups.shape))
    codes = tl.minimum(tl.maximum(_round(divided), -8.0), 7.0).to(tl.int32) & 15
    halves = tl.permute(tl.reshape(codes, (num_tokens, num_groups, 2, half)), (0, 1, 3, 2))
    low, high = tl.split(halves)
    pairs = tl.reshape(low | (high << 4), (num_tokens, BLOCK_D // 2)).to(tl.uint8)
    byte = tl.arange(0, BLOCK_D // 2)
    mask = valid[:, None] & (byte < used_groups * half)[None, :]
    tl.store(pool + first[:, None] + byte[None, :], pairs, mask=mask)
    group = tl.arange(0, num_groups)
    address = pool + scale[:, None] + group[None, :] * (2 * TILE)
    is_used = valid[:, None] & (group < used_groups)[None, :]
    tl.store(address.to(tl.pointer_type(tl.bfloat16)), scales.to(tl.bfloat16), mask=is_used)


@triton.jit
def _round(x):
    """Numbers of less than 2^22 to the nearest integer, halves to even."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _mixed(x, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """The Walsh-Hadamard transform of each MIXED of the dimensions of float32 [N, D], by sums in
    the order of `kv.layout`. Each step takes the lowest bit of a dimension's number, and makes it
    the highest."""
    num_parts: tl.constexpr = BLOCK_N * BLOCK_D // MIXED
    x = tl.reshape(x, (num_parts, MIXED // 2, 2))
    for _ in tl.static_range(4):
        a, b = tl.split(x)
        turned = tl.permute(tl.join(a + b, a - b), (0, 2, 1))
        x = tl.reshape(turned, (num_parts, MIXED // 2, 2))
    return tl.reshape(x, (BLOCK_N, BLOCK_D))


@triton.jit
def _dot(a, b, IN_FLOAT32: tl.constexpr):
    if IN_FLOAT32:  # Triton's interpreter multiplies the bits of bfloat16 as integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _hadamard(DTYPE: tl.constexpr):
    """The matrix of the transform [MIXED, MIXED], in any order of sums: 1, or -1 where both numbers
    have an odd number of ones in the same places."""
    i = tl.arange(0, MIXED)
    both = i[:, None] & i[None, :]
    both = both ^ (both >> 2)
    both = both ^ (both >> 1)
    return (1.0 - 2.0 * (both & 1)).to(DTYPE)


@triton.jit
def _load_queries(
    q,
    first,
    row,
    head,
    num_new,
    q_row,
    q_token,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BITS: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    """Packed queries [M, D] of a KV head from `first` on, 0 after the last, with their tokens
    and query heads [M]. Keys of 4 bits are transformed, and so are their queries."""
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = m // GROUP
    query_head = head * GROUP + m % GROUP
    address = row * q_row + token[:, None] * q_token + query_head[:, None] * SIZE + d[None, :]
    mask = (token < num_new)[:, None] & (d < SIZE)[None, :]
    queries = tl.load(q + address, mask=mask, other=0.0)
    if BITS == 4:
        parts = tl.reshape(queries, (BLOCK_M * BLOCK_D // MIXED, MIXED))
        mixed = _dot(parts, _hadamard(queries.dtype), IN_FLOAT32) / MIXED
        queries = tl.reshape(mixed.to(queries.dtype), (BLOCK_M, BLOCK_D))
    return queries, token, query_head


@triton.jit
def _is_seen(positions, valid, own_position, WINDOW: tl.constexpr):
    """Causal mask [M, N] of `valid` keys at `positions` [N] for queries at `own_position` [M]."""
    seen = valid[None, :] & (positions[None, :] <= own_position[:, None])
    if WINDOW:
        seen = seen & (positions[None, :] > own_position[:, None] - WINDOW)
    return seen


@triton.jit
def _add_keys(scores, values, most, total, sums, IN_FLOAT32: tl.constexpr):
    """A step of the online softmax: adds `scores` [M, N], in units of log 2, and `values` [N, D]
    to largest scores [M], sums of weights [M] and weighted sums [M, D]."""
    new_most = tl.maximum(most, tl.max(scores, 1))
    shift = tl.where(new_most == float("-inf"), 0.0, new_most)  # no key so far: all weights are 0
    weights = tl.exp2(scores - shift[:, None])
    rescale = tl.exp2(most - shift)
    total = total * rescale + tl.sum(weights, 1)
    added = _dot(weights.to(values.dtype), values, IN_FLOAT32)
    return new_most, total, sums * rescale[:, None] + added


@triton.jit
def _add_sink(most, total, sink):
    """The largest score, in units of log 2, and the sum of weights with a logit that has no value,
    and the factor of weighted sums."""
    score = sink * LOG2E
    new_most = tl.maximum(most, score)
    rescale = tl.exp2(most - new_most)
    return new_most, total * rescale + tl.exp2(score - new_most), rescale


@triton.jit
def _store_part(
    out, lse, place, is_query, most, total, sums, SIZE: tl.constexpr, BLOCK_D: tl.constexpr
):
    d = tl.arange(0, BLOCK_D)
    total = tl.where(total == 0.0, 1.0, total)  # no visible key: `sums` is 0 and `most` is -inf
    mask = is_query[:, None] & (d < SIZE)[None, :]
    values = (sums / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + place[:, None] * SIZE + d[None, :], values, mask=mask)
    tl.store(lse + place, (most + tl.log2(total)) / LOG2E, mask=is_query)


@triton.jit
def _append(
    k,
    v,
    k_pool,
    v_pool,
    table,
    token,
    is_new,
    seq_len,
    row,
    head,
    num_kv_heads,
    k_row,
    k_token,
    v_row,
    v_token,
    SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BITS: tl.constexpr,
):
    """Write new tokens `token` [N] of a row and head to the pools where `is_new`."""
    d = tl.arange(0, BLOCK_D)
    mask = is_new[:, None] & (d < SIZE)[None, :]
    position = seq_len + token
    block = tl.load(table + position // BLOCK_SIZE, mask=is_new, other=0)
    slots = (block * num_kv_heads + head) * BLOCK_SIZE + position % BLOCK_SIZE
    source = head * SIZE + d[None, :]
    new_k = tl.load(k + row * k_row + token[:, None] * k_token + source, mask=mask, other=0.0)
    new_v = tl.load(v + row * v_row + token[:, None] * v_token + source, mask=mask, other=0.0)
    if BITS == 8 and k_pool.dtype.element_ty == tl.uint8:
        _store_fp8(k_pool, slots, new_k.to(tl.float32), is_new, SIZE, BLOCK_D)
        _store_fp8(v_pool, slots, new_v.to(tl.float32), is_new, SIZE, BLOCK_D)
    elif BITS == 8:
        _store_int8(k_pool, slots, new_k.to(tl.float32), is_new, SIZE, BLOCK_D)
        _store_int8(v_pool, slots, new_v.to(tl.float32), is_new, SIZE, BLOCK_D)
    elif BITS == 4:
        keys = _mixed(new_k.to(tl.float32), token.shape[0], BLOCK_D)
        _store_int4(k_pool, slots, keys, is_new, SIZE, BLOCK_D)
        _store_int4(v_pool, slots, new_v.to(tl.float32), is_new, SIZE, BLOCK_D)
    else:
        place = slots[:, None] * SIZE + d[None, :]
        tl.store(k_pool + place, new_k, mask=mask)
        tl.store(v_pool + place, new_v, mask=mask)


@triton.jit
def append(
    k,
    v,
    k_pool,
    v_pool,
    block_table,
    rows,
    seq_lens,
    num_new,
    num_kv_heads,
    table_width,
    k_row,
    k_token,
    v_row,
    v_token,
    SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BITS: tl.constexpr,
):
    """Write k, v [B,T,G,D], heads adjacent, to the pools. Programs: (B, G, BLOCK_T tiles)."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    _append(
        k,
        v,
        k_pool,
        v_pool,
        block_table + tl.load(rows + row) * table_width,
        token,
        token < num_new,
        tl.load(seq_lens + row).to(tl.int32),
        row,
        head,
        num_kv_heads,
        k_row,
        k_token,
        v_row,
        v_token,
        SIZE,
        BLOCK_D,
        BLOCK_SIZE,
        BITS,
    )


@triton.jit
def list_keys(
    ranges,
    block_table,
    rows,
    slots,
    positions,
    num_rows,
    num_heads,
    num_ranges,
    most_keys,
    num_kv_heads,
    table_width,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Write each key's slot in the first KV head, and its position, int32 [L,B,G,most_keys], for
    `ranges` [L,B,G,R,2]. Programs: (L * B * G, BLOCK_N tiles)."""
    which = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, BLOCK_R)
    key = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    own = ranges + which * num_ranges * 2
    start = tl.load(own + 2 * r, mask=r < num_ranges, other=0).to(tl.int32)
    stop = tl.load(own + 2 * r + 1, mask=r < num_ranges, other=0).to(tl.int32)
    next_start = tl.load(own + 2 * r + 2, mask=r < num_ranges - 1, other=0).to(tl.int32)
    # A key lies after the ranges that end at or before it, and after the gaps behind them.
    is_after = key[:, None] >= tl.cumsum(stop - start, 0)[None, :]
    gaps = tl.where(is_after & (r < num_ranges - 1)[None, :], (next_start - stop)[None, :], 0)
    position = key + tl.load(own).to(tl.int32) + tl.sum(gaps, 1)
    is_key = key < tl.minimum(tl.sum(stop - start, 0), most_keys)
    table = block_table + tl.load(rows + which // num_heads % num_rows) * table_width
    block = tl.load(table + position // BLOCK_SIZE, mask=is_key, other=0)
    slot = block * num_kv_heads * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(slots + which * most_keys + key, slot.to(tl.int32), mask=is_key)
    tl.store(positions + which * most_keys + key, position, mask=is_key)


@triton.jit
def split_tiles(split, num_splits, num_tiles):
    """The first tile of a split and the one after its last; splits are equal up to one tile."""
    return split * num_tiles // num_splits, (split + 1) * num_tiles // num_splits


@triton.jit
def _find_slots(
    places,
    first,
    last_key,
    is_tile,
    num_kv_heads,
    head,
    IS_LISTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """The tile of keys from `first` on; 0 unless `is_tile`. With listed `places` (slots in the
    first KV head): slots of `head`, int64 [N]; with a block table: the first key's slot."""
    if IS_LISTED:
        key = first + tl.arange(0, BLOCK_N)
        mask = (key < last_key) & is_tile
        slots = tl.load(places + key, mask=mask, other=0).to(tl.int64) + head * BLOCK_SIZE
    else:
        block = tl.load(places + first // BLOCK_SIZE, mask=is_tile, other=0)
        slots = (block * num_kv_heads + head) * BLOCK_SIZE + first % BLOCK_SIZE
    return slots


@triton.jit
def _attend_tiles(
    queries,
    own_position,
    k_pool,
    v_pool,
    places,
    positions,
    origin,
    first_key,
    last_key,
    first_tile,
    last_tile,
    scale,
    num_kv_heads,
    head,
    IS_LISTED: tl.constexpr,
    WINDOW: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    """Attention over tiles, tile 0 from key `origin`, of keys from `first_key` to `last_key`, as
    in `_add_keys`. `places`: see `_find_slots`; `positions`: those of listed keys."""
    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)  # largest score, in units of log 2
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    n = tl.arange(0, BLOCK_N)
    next_slots = _find_slots(
        places,
        origin + first_tile * BLOCK_N,
        last_key,
        first_tile < last_tile,
        num_kv_heads,
        head,
        IS_LISTED,
        BLOCK_N,
        BLOCK_SIZE,
    )
    for t in range(first_tile, last_tile):
        key = origin + t * BLOCK_N + n
        valid = (key >= first_key) & (key < last_key)
        own_slots = next_slots if IS_LISTED else next_slots + n
        # One tile ahead, so that no load of keys waits for its address.
        next_slots = _find_slots(
            places,
            origin + (t + 1) * BLOCK_N,
            last_key,
            t + 1 < last_tile,
            num_kv_heads,
            head,
            IS_LISTED,
            BLOCK_N,
            BLOCK_SIZE,
        )
        keys = _load_tokens(k_pool, own_slots, valid, queries.dtype, SIZE, BLOCK_D, BITS)
        scores = _dot(queries, tl.trans(keys), IN_FLOAT32) * (scale * LOG2E)
        position = key  # its number does as well, unless there is a window
        if IS_LISTED and WINDOW:
            position = tl.load(positions + key, mask=valid, other=0)
        seen = _is_seen(position, valid, own_position, WINDOW)
        values = _load_tokens(v_pool, own_slots, valid, queries.dtype, SIZE, BLOCK_D, BITS)
        scores = tl.where(seen, scores, float("-inf"))
        most, total, sums = _add_keys(scores, values, most, total, sums, IN_FLOAT32)
    return most, total, sums


@triton.jit
def _is_last(counter, num_programs):
    """Whether all other programs of a counter have been here. The last resets it."""
    tl.debug_barrier()  # every thread has stored
    is_last = tl.atomic_add(counter, 1) == num_programs - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit
def _merge_splits(
    parts,
    part_lse,
    out,
    lse,
    query,
    num_splits,
    num_queries,
    sink,
    HAS_SINKS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Merge a query's parts, float32 [splits, queries, D], stored by other programs, so past the
    caches. `sink`: its head's sink logit."""
    d = tl.arange(0, BLOCK_D)
    total = 0.0
    most = float("-inf")
    inside = d < SIZE
    merged = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(0, num_splits, BLOCK_S):
        s = first + tl.arange(0, BLOCK_S)
        is_split = s < num_splits
        place = s * num_queries + query
        logs = tl.load(part_lse + place, mask=is_split, other=float("-inf"), cache_modifier=".cg")
        address = parts + place[:, None] * SIZE + d[None, :]
        mask = is_split[:, None] & inside[None, :]
        values = tl.load(address, mask=mask, other=0.0, cache_modifier=".cg")
        new_most = tl.maximum(most, tl.max(logs, 0))
        shift = tl.where(new_most == float("-inf"), 0.0, new_most)
        weights = tl.exp2((logs - shift) * LOG2E)
        rescale = tl.exp2((most - shift) * LOG2E)
        total = total * rescale + tl.sum(weights, 0)
        merged = merged * rescale + tl.sum(values * weights[:, None], 0)
        most = new_most
    if HAS_SINKS:
        most, total, rescale = _add_sink(most * LOG2E, total, sink)
        most = most / LOG2E
        merged = merged * rescale
    tl.store(out + query * SIZE + d, (merged / total).to(out.dtype.element_ty), mask=inside)
    tl.store(lse + query, most + tl.log2(total) / LOG2E)


@triton.jit(do_not_specialize=["num_ranges", "ranges_row", "ranges_head", "list_row", "list_head"])
def attend(
    q,
    k,
    v,
    k_pool,
    v_pool,
    block_table,
    rows,
    seq_lens,
    ranges,
    slots,
    positions,
    parts,
    part_lse,
    out,
    lse,
    counters,
    sinks,
    scale,
    num_new,
    num_heads,
    table_width,
    q_row,
    q_token,
    num_ranges,
    ranges_row,
    ranges_head,
    list_row,
    list_head,
    k_row,
    k_token,
    v_row,
    v_token,
    IS_LISTED: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    APPENDS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    """Attention of a tile of packed queries over a split of keys: out [B,T,H,D] and log-sum-exp,
    float32 [B,T,H]. The last program of a row, head and tile merges.

    `IS_LISTED`: keys are found by `slots`, and `positions` under a window; else they are a row's
    last tokens. `APPENDS`: queries are one tile, and programs first write new tokens that they
    see. `HAS_SINKS`: a query head has a logit in `sinks`, float32 [H], that takes weight and has no
    value. `WINDOW`: positions that a query sees (0: all). `GROUP`: H/G. Programs: (B, G * query
    tiles, splits)."""
    row = tl.program_id(0)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    num_kv_heads = num_heads // GROUP
    head = tl.program_id(1) % num_kv_heads
    tile = tl.program_id(1) // num_kv_heads
    table = block_table + tl.load(rows + row) * table_width
    seq_len = tl.load(seq_lens + row).to(tl.int32)
    num_keys = _count_keys(ranges + row * ranges_row + head * ranges_head, num_ranges, BLOCK_R)
    last_token = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, num_new - 1)
    # Keys are numbered so that new tokens have their positions and the others come before them.
    first_key = seq_len + num_new - num_keys
    last_key = seq_len + last_token + 1
    origin = first_key if IS_LISTED else first_key // BLOCK_N * BLOCK_N
    first_tile, last_tile = split_tiles(split, num_splits, tl.cdiv(last_key - origin, BLOCK_N))
    if APPENDS:
        new = tl.arange(0, BLOCK_T)
        is_new = (new < num_new) & (origin + last_tile * BLOCK_N > seq_len)
        _append(
            k,
            v,
            k_pool,
            v_pool,
            table,
            new,
            is_new,
            seq_len,
            row,
            head,
            num_kv_heads,
            k_row,
            k_token,
            v_row,
            v_token,
            SIZE,
            BLOCK_D,
            BLOCK_SIZE,
            BITS,
        )
        tl.debug_barrier()  # every thread has stored
    queries, token, query_head = _load_queries(
        q,
        tile * BLOCK_M,
        row,
        head,
        num_new,
        q_row,
        q_token,
        GROUP,
        SIZE,
        BLOCK_D,
        BLOCK_M,
        BITS,
        IN_FLOAT32,
    )
    own_list = row.to(tl.int64) * list_row + head * list_head - first_key
    table = slots + own_list if IS_LISTED else table
    most, total, sums = _attend_tiles(
        queries,
        seq_len + token,
        k_pool,
        v_pool,
        table,
        positions + own_list if IS_LISTED else 0,
        origin,
        first_key,
        last_key,
        first_tile,
        last_tile,
        scale,
        num_kv_heads,
        head,
        IS_LISTED,
        WINDOW,
        SIZE,
        BLOCK_D,
        BLOCK_M,
        BLOCK_N,
        BLOCK_SIZE,
        BITS,
        IN_FLOAT32,
    )
    place = (row * num_new + token).to(tl.int64) * num_heads + query_head
    is_query = token < num_new
    if IS_SPLIT:
        num_queries = tl.num_programs(0) * num_new * num_heads
        own_part = place + split.to(tl.int64) * num_queries
        _store_part(parts, part_lse, own_part, is_query, most, total, sums, SIZE, BLOCK_D)
        if _is_last(counters + row * tl.num_programs(1) + tl.program_id(1), num_splits):
            last = tl.minimum(tile * BLOCK_M + BLOCK_M, num_new * GROUP)
            for m in range(tile * BLOCK_M, last):
                query = (row * num_new + m // GROUP).to(tl.int64) * num_heads
                own_head = head * GROUP + m % GROUP
                _merge_splits(
                    parts,
                    part_lse,
                    out,
                    lse,
                    query + own_head,
                    num_splits,
                    num_queries,
                    tl.load(sinks + own_head) if HAS_SINKS else 0.0,
                    HAS_SINKS,
                    SIZE,
                    BLOCK_D,
                    BLOCK_S,
                )
    else:
        if HAS_SINKS:
            sink = tl.load(sinks + query_head, mask=is_query, other=0.0)
            most, total, rescale = _add_sink(most, total, sink)
            sums = sums * rescale[:, None]
        _store_part(out, lse, place, is_query, most, total, sums, SIZE, BLOCK_D)


@triton.jit
def sum_mass(
    q,
    k_pool,
    block_table,
    rows,
    seq_lens,
    ranges,
    lse,
    mass,
    scale,
    num_new,
    num_heads,
    table_width,
    q_row,
    q_token,
    num_ranges,
    ranges_row,
    ranges_head,
    num_blocks,
    BLOCK_R: tl.constexpr,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    """Writes mass, float32 [B, G, num_blocks]: weights of WEIGHTS_BLOCK positions, summed over a
    KV head's queries, from `lse`, float32 [B,T,H]. One program a block fixes the order of
    additions. Programs: (B, G, BLOCK_N tiles)."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    tile = tl.program_id(2)
    num_kv_heads = num_heads // GROUP
    positions = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    own_ranges = ranges + row * ranges_row + head * ranges_head
    r = tl.arange(0, BLOCK_R)
    start = tl.load(own_ranges + 2 * r, mask=r < num_ranges, other=0)
    stop = tl.load(own_ranges + 2 * r + 1, mask=r < num_ranges, other=0)
    is_in = (positions[:, None] >= start[None, :]) & (positions[:, None] < stop[None, :])
    visible = tl.max(is_in.to(tl.int32), 1) > 0
    table = block_table + tl.load(rows + row) * table_width
    first = tile * BLOCK_N
    most = table_width * BLOCK_SIZE
    slot = _find_slots(
        table, first, most, first < most, num_kv_heads, head, False, BLOCK_N, BLOCK_SIZE
    )
    slots = slot + tl.arange(0, BLOCK_N)
    keys = _load_tokens(k_pool, slots, visible, q.dtype.element_ty, SIZE, BLOCK_D, BITS)
    any_visible = tl.max(visible.to(tl.int32), 0)
    seq_len = tl.load(seq_lens + row).to(tl.int32)
    sums = tl.full((BLOCK_N,), 0.0, tl.float32)
    for first in range(0, num_new * GROUP * any_visible, BLOCK_M):
        queries, token, query_head = _load_queries(
            q,
            first,
            row,
            head,
            num_new,
            q_row,
            q_token,
            GROUP,
            SIZE,
            BLOCK_D,
            BLOCK_M,
            BITS,
            IN_FLOAT32,
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
