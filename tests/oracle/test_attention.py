"""Every attention backend against attention in float64, alone and beside other rows."""

from __future__ import annotations

import itertools

import pytest
import torch
from attention_cases import (
    BACKENDS,
    DTYPES,
    HEADS,
    KV_DTYPES,
    LIBRARIES,
    NO_AMX,
    NO_AVX512,
    TOLERANCE,
    Case,
    cases,
    exact_attention,
    fill,
    make_case,
)
from torch import Tensor

from magicdec.attention import native
from magicdec.attention.native import NativeBackend, has_bfloat16_path
from magicdec.config.capabilities import list_backends
from magicdec.drafting.policies.full import FullKV
from magicdec.drafting.policies.policy import KVPolicy
from magicdec.drafting.policies.streaming_llm import StreamingLLM
from magicdec.kv.view import make_view

POLICIES: list[KVPolicy] = [FullKV(), StreamingLLM(4, 11), StreamingLLM(0, 1), StreamingLLM(2, 500)]
WITHOUT_WINDOWS = list_backends(lambda c: not c.keeps_window)
WINDOWED: list[KVPolicy] = [FullKV(), StreamingLLM(4, 11), StreamingLLM(40, 60)]


@pytest.mark.narrow("pairs")
@pytest.mark.parametrize(
    ("name", "heads", "policy", "dtype"), cases(HEADS, POLICIES, KV_DTYPES), ids=str
)
def test_backend_equals_attention_written_out(
    name: str, heads: tuple[int, int, int], policy: KVPolicy, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    for num_new, rows in ((1, [0, 1, 2, 3]), (5, [2, 0, 1]), (3, [1, 3]), (40, [2]), (33, [0, 3])):
        backend = BACKENDS[name]()
        case = make_case(backend, heads, policy, num_new, rows, dtype)
        out, (k, v) = case.run(backend), case.read()
        for i, keys in enumerate(case.view.key_positions()[:, 0].tolist()):
            row, seen = rows[i], [s for s in keys if s >= 0]
            exact = exact_attention(case.q[i], k[row], v[row], seen, case.view.lengths[i])
            assert (out[i].double() - exact.out).abs().max() < TOLERANCE[dtype], (num_new, row)


@pytest.mark.narrow("pairs")
@pytest.mark.parametrize(
    ("name", "policy", "window", "dtype"),
    cases(
        WINDOWED, [1, 5, 36, 100], KV_DTYPES, without=list_backends(lambda c: not c.keeps_window)
    ),
    ids=str,
)
def test_a_token_sees_only_its_window(
    name: str, policy: FullKV | StreamingLLM, window: int, dtype: torch.dtype
) -> None:
    """No key is read that none of the tokens of the forward sees."""
    torch.manual_seed(0)
    lengths, committed = [37, 3, 70, 0, 70], [35, 3, 66, 0, 70]
    batches = ((1, [0, 1, 2, 3]), (1, [2, 4]), (5, [2, 0, 1]), (40, [2]), (33, [4, 0, 3]))
    for num_new, rows in batches:
        backend, sizes = BACKENDS[name](), (dtype, window, lengths, committed)
        case = make_case(backend, (6, 2, 16), policy, num_new, rows, *sizes)
        out, (k, v) = case.run(backend), case.read()
        for i, row in enumerate(rows):
            length, visible = lengths[row], policy.ranges(torch.tensor(committed))[row].tolist()
            keys = {s for first, last in visible for s in range(first, last)}
            keys |= set(range(committed[row], length + num_new))
            keys = {s for s in keys if s > length - window}
            assert case.view.num_visible[i] + num_new == len(keys)
            exact = exact_attention(case.q[i], k[row], v[row], sorted(keys), length, window)
            assert (out[i].double() - exact.out).abs().max() < TOLERANCE[dtype], (num_new, row)


@pytest.mark.parametrize("name", cases())
def test_a_forward_sees_neither_the_future_nor_another_row(name: str) -> None:
    """Changing a later token, or another row, must not change an output by a single bit."""
    torch.manual_seed(0)
    backend = BACKENDS[name]()
    dtype = torch.bfloat16 if isinstance(backend, LIBRARIES) else torch.float32
    case = make_case(backend, (4, 2, 64), FullKV(), 4, [0, 1], dtype, None, [30, 30], [30, 30])
    outputs = []
    for change in (0.0, 3.0):
        case.view.cache.truncate([0, 1], [30, 30])
        case.k[0, 33] += change  # row 0, its last new token
        case.v[0, 33] += change
        outputs.append(case.run(backend).clone())
    assert torch.equal(outputs[0][0, :3], outputs[1][0, :3])
    assert torch.equal(outputs[0][1], outputs[1][1])
    assert not torch.equal(outputs[0][0, 3], outputs[1][0, 3])


def test_the_native_library_leaves_the_processor_state_alone() -> None:
    """When it was linked with -ffast-math, the whole process flushed subnormal numbers to zero,
    which changed later computations."""
    native.kernel(64)
    assert float.fromhex("0x1p-1070") * 0.5 == float.fromhex("0x1p-1071") > 0.0


@pytest.mark.parametrize(
    ("num_new", "dtype", "portable", "flags"),
    [
        # The last: a prefill, whose last queries fill no tile register and no vector.
        *itertools.product([1, 7, 20, 45], DTYPES, [False, True], [()]),
        (45, torch.float32, False, NO_AVX512),
        *((num_new, torch.bfloat16, False, NO_AMX) for num_new in (1, 20, 45)),
    ],
    ids=str,
)
def test_native_splits_long_rows_and_returns_the_log_sum_exp(
    num_new: int,
    dtype: torch.dtype,
    portable: bool,
    flags: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of several splits, and queries of several blocks (20 tokens of 4 heads for each KV
    head)."""
    build = native.kernel
    monkeypatch.setattr(native, "kernel", lambda size: build(size, *flags))
    torch.manual_seed(0)
    backend, length = NativeBackend(portable), 3000
    cache, k, v = fill(backend, 2, 64, [length] * 2, dtype, length + num_new, layers=1)
    view = make_view(cache, range(2), FullKV(), num_new)
    case = Case(view, torch.randn(2, num_new, 8, 64).to(dtype), k, v)
    for out, lse, *qkv in zip(*case.run(backend, "run_with_lse"), case.q, k, v, strict=True):
        exact = exact_attention(*qkv)
        assert (lse.double() - exact.lse).abs().max() < 1e-4
        assert (out.double() - exact.out).abs().max() < TOLERANCE[dtype] / 10


@pytest.mark.skipif(not has_bfloat16_path(), reason="no AVX512-BF16: the compiler orders the sums")
@pytest.mark.parametrize(
    ("flags", "window", "heads", "dtype"),
    [
        # With 32 heads, the queries of five tokens fill several blocks.
        *itertools.product(
            [(), NO_AMX], [None, 62, 66, 700, 1237],
            [(2, 2, 64), (6, 2, 64), (32, 2, 64)], [torch.bfloat16],
        ),
        *itertools.product([()], [None, 66], HEADS, [torch.int8]),
    ],
    ids=str,
)  # fmt: skip
def test_native_gives_a_token_the_same_bits_alone_and_with_others(
    flags: tuple[str, ...], window: int | None, heads: tuple[int, int, int], dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Decoding computes one token at a time, verification five at once."""
    build = native.kernel
    monkeypatch.setattr(native, "kernel", lambda size: build(size, *flags))
    torch.manual_seed(0)
    backend, num_new = NativeBackend(), 5
    num_heads, kv_heads, size = heads
    cache, k, v = fill(backend, kv_heads, size, [1300, 63], dtype, 1400, layers=1)
    q = torch.randn(2, num_new, num_heads, size).bfloat16()

    def attend(rows: list[int], first: int, count: int) -> Tensor:
        view = make_view(cache, rows, FullKV(), count, window=window)
        return Case(view, q[rows, first : first + count], k, v).run(backend)

    together = attend([0, 1], 0, num_new)
    for row in (0, 1):
        for t in range(num_new):
            assert torch.equal(attend([row], t, 1)[0, 0], together[row, t]), (row, t)
            cache.advance([row], 1)
