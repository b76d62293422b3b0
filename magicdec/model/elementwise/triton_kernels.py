"""Triton kernels between a layer's GEMMs: norm, rotary embedding, gated activation, linear
attention, in float32, rounded once. Imported only where Triton is installed.

The division of a row depends on the model's sizes alone (norm strides are not specialised), so a
row has the same bits alone and in a batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from magicdec.kernels.triton_kernels import to_bfloat16


@triton.jit
def _stored(values, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """float32 values rounded to `dtype`: to nearest, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        values = to_bfloat16(values)
    return values.to(dtype)


@triton.jit(do_not_specialize=["inner", "x_outer", "x_inner", "y_outer", "y_inner"])
def norm_rows(
    x,
    y,
    weight,
    total,
    out,
    eps,
    inner,
    x_outer,
    x_inner,
    y_outer,
    y_inner,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """out [outer, inner, WIDTH] = RMS norm of x; with ADDS, of the rounded and stored total = x
    + y. out and total are contiguous; strides are in units of UNIT elements. Grid: (outer *
    inner,)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    place = row * WIDTH + i
    from_x = ((row // inner) * x_outer + (row % inner) * x_inner) * UNIT + i
    values = tl.load(x + from_x, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        from_y = ((row // inner) * y_outer + (row % inner) * y_inner) * UNIT + i
        values += tl.load(y + from_y, mask=inside, other=0.0).to(tl.float32)
        stored = _stored(values, total.dtype.element_ty, INTERPRETED)
        tl.store(total + place, stored, mask=inside)
        values = stored.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 0) / WIDTH + eps)
    weights = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    normed = _stored(values * scale * weights, out.dtype.element_ty, INTERPRETED)
    tl.store(out + place, normed, mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def rotate_heads(
    x,
    table,
    num_tokens,
    x_row,
    x_token,
    x_head,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    STEP: tl.constexpr,
    APART: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Rotate the first HEADS heads of x in place by table [rows, num_tokens, 2, PAIRS] (cos,
    sin). Pair i begins at dimension i * STEP, its elements APART apart. A tile has at least as
    many pairs as threads, so that only a pair's writer reads it. Grid: (rows * num_tokens, tiles
    of heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    pair = tl.arange(0, BLOCK_P)
    inside = (head < HEADS)[:, None] & (pair < PAIRS)[None, :]
    angles = table + token * (2 * PAIRS) + pair
    cos = tl.load(angles, mask=pair < PAIRS, other=0.0)[None, :]
    sin = tl.load(angles + PAIRS, mask=pair < PAIRS, other=0.0)[None, :]
    start = x + (token // num_tokens) * x_row + (token % num_tokens) * x_token
    first = start + head[:, None] * x_head + (pair * STEP)[None, :]
    a = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(first + APART, mask=inside, other=0.0).to(tl.float32)
    new_a = _stored(a * cos - b * sin, x.dtype.element_ty, INTERPRETED)
    new_b = _stored(b * cos + a * sin, x.dtype.element_ty, INTERPRETED)
    tl.store(first, new_a, mask=inside)
    tl.store(first + APART, new_b, mask=inside)


@triton.jit
def gate_rows(x, out, x_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr):
    """out [rows, WIDTH] = silu(first WIDTH elements of a row of x) * (next WIDTH). Grid: (rows,
    tiles)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    gate = tl.load(x + row * x_row + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + WIDTH + i, mask=inside, other=0.0).to(tl.float32)
    e = tl.exp(-tl.abs(gate))  # the argument is never positive, so exp cannot overflow
    gated = gate * (tl.where(gate < 0, e, 1.0) / (1.0 + e)) * up
    place = out + row * WIDTH + i
    tl.store(place, _stored(gated, out.dtype.element_ty, INTERPRETED), mask=inside)


@triton.jit(do_not_specialize=["num_new"])
def delta_rows(
    states,
    keys,
    corrections,
    decays,
    rows,
    base,
    first,
    moved,
    q,
    k,
    v,
    decay,
    rate,
    out,
    num_new,
    SLOTS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Steps of linear attention (`delta.delta_steps`) of one head and BLOCK_V columns of its state:
    the state [KEY_SIZE, SIZE] after `base` tokens of a row of `states` becomes that before `first`,
    by what earlier tokens wrote to slots, and is stored as it is at `moved`; then each new token
    writes its correction to its slot, and reads its output. Slots of keys and decays, which heads
    share, are only read. All tensors are contiguous. Grid: (B * HEADS, tiles of columns)."""
    batch = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    key_head = head // (HEADS // KEY_HEADS)
    row = tl.load(rows + batch)
    start = tl.load(base + batch)
    end = tl.load(first + batch)
    kept = tl.load(moved + batch)
    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_key = i < KEY_SIZE
    in_value = j < SIZE
    place = states + (row * HEADS + head) * KEY_SIZE * SIZE + i[:, None] * SIZE + j[None, :]
    inside = in_key[:, None] & in_value[None, :]
    state = tl.load(place, mask=inside, other=0.0)
    for number in range(0, (end - start).to(tl.int32)):
        slot = row * SLOTS + (start + number) % SLOTS
        key = tl.load(keys + (slot * KEY_HEADS + key_head) * KEY_SIZE + i, mask=in_key, other=0.0)
        at = corrections + (slot * HEADS + head) * SIZE + j
        correction = tl.load(at, mask=in_value, other=0.0)
        state *= tl.exp(tl.load(decays + slot * HEADS + head))
        state += key[:, None] * correction[None, :]
        if start + number + 1 == kept:
            tl.store(place, state, mask=inside)
    for number in range(0, num_new):
        token = batch * num_new + number
        from_key = (token * KEY_HEADS + key_head) * KEY_SIZE + i
        from_value = (token * HEADS + head) * SIZE + j
        key = tl.load(k + from_key, mask=in_key, other=0.0)
        query = tl.load(q + from_key, mask=in_key, other=0.0)
        value = tl.load(v + from_value, mask=in_value, other=0.0)
        state *= tl.exp(tl.load(decay + token * HEADS + head))
        read = tl.sum(state * key[:, None], 0)
        correction = tl.load(rate + token * HEADS + head) * (value - read)
        state += key[:, None] * correction[None, :]
        slot = row * SLOTS + (end + number) % SLOTS
        tl.store(corrections + (slot * HEADS + head) * SIZE + j, correction, mask=in_value)
        tl.store(out + from_value, tl.sum(state * query[:, None], 0), mask=in_value)


@triton.jit(do_not_specialize=["num_new"])
def convolve_rows(
    channels,
    before,
    weight,
    q,
    k,
    v,
    num_new,
    LENGTH: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
):
    """The convolution before linear attention (`delta.convolve`) of one head and TOKENS tokens of a
    row, one after the other: a token has the same bits in each call. All tensors are contiguous.
    Grid: (B * blocks of tokens, 2 KEY_HEADS + HEADS)."""
    num_blocks = tl.cdiv(num_new, TOKENS)
    batch = (tl.program_id(0) // num_blocks).to(tl.int64)
    begin = tl.program_id(0) % num_blocks * TOKENS
    head = tl.program_id(1)
    width = tl.where(head < 2 * KEY_HEADS, KEY_SIZE, SIZE)
    value = head - 2 * KEY_HEADS
    first = tl.where(value < 0, head * KEY_SIZE, 2 * KEY_HEADS * KEY_SIZE + value * SIZE)
    i = tl.arange(0, BLOCK)
    inside = i < width
    num_channels: tl.constexpr = 2 * KEY_HEADS * KEY_SIZE + HEADS * SIZE
    for t in range(begin, min(begin + TOKENS, num_new)):
        mixed = tl.zeros([BLOCK], tl.float32)
        for place in tl.static_range(LENGTH):
            at = t - (LENGTH - 1) + place
            new = channels + (batch * num_new + at) * num_channels + first + i
            old = before + (batch * (LENGTH - 1) + LENGTH - 1 + at) * num_channels + first + i
            x = tl.load(new, mask=inside & (at >= 0), other=0.0)
            x += tl.load(old, mask=inside & (at < 0), other=0.0)
            factor = tl.load(weight + (first + i) * LENGTH + place, mask=inside, other=0.0)
            mixed += x * factor.to(tl.float32)
        e = tl.exp(-tl.abs(mixed))  # the argument is never positive, so exp cannot overflow
        mixed *= tl.where(mixed < 0, e, 1.0) / (1.0 + e)
        token = batch * num_new + t
        if value < 0:
            mixed *= tl.rsqrt(tl.sum(mixed * mixed, 0) + EPS)
            if head < KEY_HEADS:
                place_q = q + (token * KEY_HEADS + head) * KEY_SIZE + i
                tl.store(place_q, mixed * SCALE, mask=inside)
            else:
                place_k = k + (token * KEY_HEADS + head - KEY_HEADS) * KEY_SIZE + i
                tl.store(place_k, mixed, mask=inside)
        else:
            tl.store(v + (token * HEADS + value) * SIZE + i, mixed, mask=inside)


@triton.jit(do_not_specialize=["num_new"])
def chunk_products(
    q,
    k,
    decay,
    rate,
    mixings,
    scores,
    num_new,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What the tokens of a chunk have of each other in linear attention (`delta.recur_in_chunks`):
    `mixings`, rate_i r_ij (k_i . k_j) of earlier tokens j, and `scores`, r_ij (q_i . k_j) of these
    and of itself; both [B * HEADS, chunks, CHUNK, CHUNK]. Grid: (B * HEADS, chunks)."""
    batch = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    key_head = head // (HEADS // KEY_HEADS)
    i = tl.arange(0, CHUNK)
    at = tl.program_id(1) * CHUNK + i
    is_token = at < num_new
    token = batch * num_new + at
    from_key = (token[:, None] * KEY_HEADS + key_head) * KEY_SIZE
    mixing = tl.zeros([CHUNK, CHUNK], tl.float32)
    seen = tl.zeros([CHUNK, CHUNK], tl.float32)
    for begin in range(0, KEY_SIZE, DEPTH):
        d = begin + tl.arange(0, DEPTH)
        inside = is_token[:, None] & (d < KEY_SIZE)[None, :]
        keys = tl.load(k + from_key + d[None, :], mask=inside, other=0.0)
        mixing = tl.dot(keys, tl.trans(keys), mixing, input_precision=PRECISION)
        queries = tl.load(q + from_key + d[None, :], mask=inside, other=0.0)
        seen = tl.dot(queries, tl.trans(keys), seen, input_precision=PRECISION)
    rates = tl.load(rate + token * HEADS + head, mask=is_token, other=0.0)
    decays = tl.cumsum(tl.load(decay + token * HEADS + head, mask=is_token, other=0.0), 0)
    is_earlier = i[:, None] > i[None, :]
    is_itself = i[:, None] == i[None, :]
    ratio = tl.exp(tl.where(is_earlier, decays[:, None] - decays[None, :], 0.0))
    number = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    place = number * CHUNK * CHUNK + i[:, None] * CHUNK + i[None, :]
    tl.store(mixings + place, tl.where(is_earlier, mixing * ratio * rates[:, None], 0.0))
    tl.store(scores + place, tl.where(is_earlier | is_itself, seen * ratio, 0.0))


@triton.jit(do_not_specialize=["num_new"])
def chunk_solutions(mixings, rate, num_new, HEADS: tl.constexpr, CHUNK: tl.constexpr):
    """In place of `mixings` M [B * HEADS, chunks, CHUNK, CHUNK], the inverses of I + M with columns
    times their tokens' rates, row by row: a power of M may be huge. Grid: (B * HEADS, chunks)."""
    batch = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    i = tl.arange(0, CHUNK)
    number = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    begin = mixings + number * CHUNK * CHUNK
    solution = tl.zeros([CHUNK, CHUNK], tl.float32)
    for row in range(0, CHUNK):
        factors = tl.load(begin + row * CHUNK + i)
        solved = tl.where(i == row, 1.0, 0.0) - tl.sum(factors[:, None] * solution, 0)
        solution = tl.where(i[:, None] == row, solved[None, :], solution)
    at = tl.program_id(1) * CHUNK + i
    rates = tl.load(rate + (batch * num_new + at) * HEADS + head, mask=at < num_new, other=0.0)
    tl.debug_barrier()  # all rows are read
    tl.store(begin + i[:, None] * CHUNK + i[None, :], solution * rates[None, :])


@triton.jit(do_not_specialize=["num_new"])
def chunk_rows(
    states,
    q,
    k,
    v,
    decay,
    solutions,
    scores,
    out,
    num_new,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The chunks of a prompt in linear attention (`delta.recur_in_chunks`), one after the other, of
    one head and BLOCK_V columns of its state [KEY_SIZE, SIZE], which is changed in place, with what
    `chunk_products` and `chunk_solutions` have made. Grid: (B * HEADS, tiles of columns)."""
    batch = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    key_head = head // (HEADS // KEY_HEADS)
    i = tl.arange(0, CHUNK)
    depth = tl.arange(0, DEPTH)
    j = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_value = j < SIZE
    held = states + tl.program_id(0).to(tl.int64) * KEY_SIZE * SIZE + j[None, :]
    num_chunks = tl.cdiv(num_new, CHUNK)
    for chunk in range(0, num_chunks):
        at = chunk * CHUNK + i
        is_token = at < num_new
        token = batch * num_new + at
        from_key = (token[:, None] * KEY_HEADS + key_head) * KEY_SIZE
        from_value = (token[:, None] * HEADS + head) * SIZE + j[None, :]
        in_values = is_token[:, None] & in_value[None, :]
        number = tl.program_id(0).to(tl.int64) * num_chunks + chunk
        square = number * CHUNK * CHUNK + i[:, None] * CHUNK + i[None, :]
        steps = tl.load(decay + token * HEADS + head, mask=is_token, other=0.0)
        decays = tl.cumsum(steps, 0)
        total = tl.sum(steps, 0)
        read = tl.zeros([CHUNK, BLOCK_V], tl.float32)
        outputs = tl.zeros([CHUNK, BLOCK_V], tl.float32)
        for begin in range(0, KEY_SIZE, DEPTH):
            d = begin + depth
            inside = is_token[:, None] & (d < KEY_SIZE)[None, :]
            in_state = (d < KEY_SIZE)[:, None] & in_value[None, :]
            state = tl.load(held + d[:, None] * SIZE, mask=in_state, other=0.0)
            keys = tl.load(k + from_key + d[None, :], mask=inside, other=0.0)
            read = tl.dot(keys, state, read, input_precision=PRECISION)
            queries = tl.load(q + from_key + d[None, :], mask=inside, other=0.0)
            outputs = tl.dot(queries, state, outputs, input_precision=PRECISION)
        since = tl.exp(decays)[:, None]
        values = tl.load(v + from_value, mask=in_values, other=0.0) - since * read
        solution = tl.load(solutions + square)
        corrections = tl.dot(solution, values, input_precision=PRECISION)
        seen = tl.load(scores + square)
        outputs = tl.dot(seen, corrections, since * outputs, input_precision=PRECISION)
        tl.store(out + from_value, outputs, mask=in_values)
        left = tl.exp(total - decays)[:, None]
        tl.debug_barrier()  # all threads have read the state
        for begin in range(0, KEY_SIZE, DEPTH):
            d = begin + depth
            inside = is_token[:, None] & (d < KEY_SIZE)[None, :]
            in_state = (d < KEY_SIZE)[:, None] & in_value[None, :]
            place = held + d[:, None] * SIZE
            state = tl.load(place, mask=in_state, other=0.0) * tl.exp(total)
            keys = tl.load(k + from_key + d[None, :], mask=inside, other=0.0) * left
            state = tl.dot(tl.trans(keys), corrections, state, input_precision=PRECISION)
            tl.store(place, state, mask=in_state)
        tl.debug_barrier()  # the state is written
