"""Every attention backend against attention in float64. A new backend is one row in BACKENDS.

Triton's kernels run on a GPU if there is one; otherwise they are interpreted. That is slow, so only
every seventh case runs, and one case of each test in `make test`. The GPU libraries need a GPU;
`test_cuda_libraries.py` tests what can be tested of them without one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from magicdec.attention import native
from magicdec.attention.backend import AttentionBackend
from magicdec.attention.flash_attn import FlashAttnBackend
from magicdec.attention.flashinfer import FlashInferBackend
from magicdec.attention.grouped import GroupedBackend
from magicdec.attention.native import NativeBackend, has_bfloat16_path
from magicdec.attention.sdpa import SDPABackend
from magicdec.attention.triton import TritonBackend
from magicdec.attention.varlen import VarlenBackend
from magicdec.config.capabilities import capabilities_of, list_backends
from magicdec.config.machine import Machine
from magicdec.drafting.policies.full import FullKV
from magicdec.drafting.policies.policy import KVPolicy
from magicdec.drafting.policies.streaming_llm import StreamingLLM
from magicdec.kv.cache import KVCache
from magicdec.kv.pool import CacheShape
from magicdec.kv.view import make_view

BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "sdpa, blocks of 4": lambda: SDPABackend(4),
    "sdpa, blocks of 64": SDPABackend,
    "grouped": GroupedBackend,
    "native": NativeBackend,
    "native, portable": lambda: NativeBackend(portable=True),
    "triton": TritonBackend,
    "varlen": VarlenBackend,
    "flash_attn": FlashAttnBackend,
    "flashinfer": FlashInferBackend,
}
LIBRARIES = (VarlenBackend, FlashAttnBackend, FlashInferBackend)  # bfloat16, on a GPU
HEADS = [(4, 4, 64), (6, 2, 16), (5, 1, 80), (7, 7, 32), (4, 2, 96), (8, 1, 128), (2, 2, 256)]
POLICIES: list[KVPolicy] = [FullKV(), StreamingLLM(4, 11), StreamingLLM(0, 1), StreamingLLM(2, 500)]
WINDOWED: list[KVPolicy] = [FullKV(), StreamingLLM(4, 11), StreamingLLM(40, 60)]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
MAX_TOKENS = 120
DTYPES = [torch.float32, torch.bfloat16]
HAS_CUDA = torch.cuda.is_available()
NO_AMX = ("-U__AMX_BF16__",)  # compiled as for a CPU without tile registers
NO_AVX512 = ("-mno-avx512f",)  # compiled as for a CPU whose vectors have 8 numbers


def cases(
    *axes: Sequence[object], without: Sequence[str] = (), interpreted: int = 1
) -> list[object]:
    """Tuples of a backend's name and one value of each axis: all combinations that the backend
    supports. Of an interpreted backend, every seventh, of which `make test` runs the first
    `interpreted`. The backends `without` are left out. Axes may hold heads and dtypes, or anything
    that every backend supports."""
    found: list[object] = []
    for name in BACKENDS:
        kind, _, _ = name.partition(",")
        if kind in without:
            continue
        kept = [chosen for chosen in itertools.product(*axes) if is_served(kind, chosen)]
        if kind == "triton" and not HAS_CUDA:
            # Few KV heads first, which are few programs. Both dtypes occur, since 7 is odd.
            kept = sorted(kept, key=kv_heads)[::7]
        marks = [] if "cpu" in capabilities_of(kind).devices else [pytest.mark.cuda]
        if kind == "triton" and find_spec("triton") is None:
            marks = [pytest.mark.skip(reason="triton is not installed")]
        is_slow = kind == "triton" and not HAS_CUDA
        for index, chosen in enumerate(kept):
            wide = [pytest.mark.wide] if is_slow and index >= interpreted else []
            found.append(pytest.param(name, *chosen, marks=[*marks, *wide]))
    return found


def kv_heads(chosen: Sequence[object]) -> int:
    return next((c[1] for c in chosen if isinstance(c, tuple)), 0)


def is_served(kind: str, chosen: Sequence[object]) -> bool:
    """Whether the backend supports the heads and the dtype among `chosen`."""
    size = next((c[2] for c in chosen if isinstance(c, tuple)), 64)
    dtype = next((c for c in chosen if isinstance(c, torch.dtype)), torch.bfloat16)
    capabilities, machine = capabilities_of(kind), Machine(1, has_compiler=True)
    device = "cpu" if "cpu" in capabilities.devices else "cuda"
    return capabilities.obstacle(machine, device, size, str(dtype)[6:]) is None


def device_of(backend: AttentionBackend) -> torch.device:
    """The device on which a backend is tested."""
    for_gpus = isinstance(backend, (TritonBackend, *LIBRARIES))
    return torch.device("cuda" if HAS_CUDA and for_gpus else "cpu")


def written_out(
    q: Tensor, k: Tensor, v: Tensor, keys: list[int], first: int, window: int = MAX_TOKENS
) -> Tensor:
    """Causal attention of one row in float64: q [T, H, D] at positions `first` and after, over the
    tokens `keys` of k, v [S, G, D]."""
    positions, seen = first + torch.arange(len(q)).unsqueeze(1), torch.tensor(keys)
    is_seen = (seen <= positions) & (seen > positions - window)  # [T, keys]
    group = q.shape[1] // k.shape[1]
    k, v = (x[seen].double().repeat_interleave(group, 1) for x in (k, v))  # [keys, H, D]
    scores = torch.einsum("thd,shd->hts", q.double(), k) / q.shape[2] ** 0.5
    scores.masked_fill_(~is_seen.to(q.device), float("-inf"))
    return torch.einsum("hts,shd->thd", scores.softmax(2), v)


def fill(
    backend: AttentionBackend, kv_heads: int, size: int, lengths: list[int], dtype: torch.dtype
) -> tuple[KVCache, Tensor, Tensor]:
    """A cache whose rows hold random tokens, and the same tokens as plain tensors [B, S, G, D]."""
    block = backend.block_size(MAX_TOKENS)
    per_row = -(-MAX_TOKENS // block)
    shape = CacheShape(2, kv_heads, size, block, len(lengths) * per_row, backend.layout(dtype))
    device = device_of(backend)
    cache = KVCache(shape, len(lengths), per_row, dtype, device)
    for tokens in (MAX_TOKENS // 2, MAX_TOKENS):  # in two turns: blocks interleave
        for row in range(len(lengths)):
            cache.allocate(row, tokens)
    k, v = (torch.randn(len(lengths), MAX_TOKENS, kv_heads, size).to(device, dtype) for _ in "kv")
    rows = torch.arange(len(lengths), device=device)
    slots = cache.slots(rows, torch.arange(MAX_TOKENS, device=device).expand(len(lengths), -1))
    cache.write(
        1, slots, k * float("inf"), v * 1e4
    )  # tokens after the length of a row must not matter
    for row, length in enumerate(lengths):
        cache.write(
            1,
            slots[row : row + 1, :, :length],
            k[row : row + 1, :length],
            v[row : row + 1, :length],
        )
        cache.advance([row], length)
    return cache, k, v


@pytest.mark.narrow("pairs")
@pytest.mark.parametrize(
    ("name", "heads", "policy", "dtype"), cases(HEADS, POLICIES, DTYPES), ids=str
)
def test_backend_equals_attention_written_out(
    name: str, heads: tuple[int, int, int], policy: KVPolicy, dtype: torch.dtype
) -> None:
    num_heads, kv_heads, size = heads
    torch.manual_seed(0)
    lengths, committed = [37, 3, 70, 0], [35, 3, 66, 0]
    for num_new, rows in ((1, [0, 1, 2, 3]), (5, [2, 0, 1]), (3, [1, 3]), (40, [2]), (33, [0, 3])):
        backend = BACKENDS[name]()
        cache, k, v = fill(backend, kv_heads, size, lengths, dtype)
        view = make_view(cache, rows, policy, num_new, [committed[r] for r in rows])
        q = torch.randn(len(rows), num_new, num_heads, size).to(k)
        new = [slice(lengths[r], lengths[r] + num_new) for r in rows]
        new_k = torch.stack([k[r, s] for r, s in zip(rows, new, strict=True)])
        new_v = torch.stack([v[r, s] for r, s in zip(rows, new, strict=True)])
        backend.plan(view)
        out = backend.run(1, q, new_k, new_v, view)
        for i, (r, keys) in enumerate(zip(rows, view.key_positions()[:, 0].tolist(), strict=True)):
            seen = [s for s in keys if s >= 0]
            expected = written_out(q[i], k[r], v[r], seen, lengths[r])
            assert (out[i].double() - expected).abs().max() < TOLERANCE[dtype], (num_new, r)


@pytest.mark.narrow("pairs")
@pytest.mark.parametrize(
    ("name", "policy", "window", "dtype"),
    cases(WINDOWED, [1, 5, 36, 100], DTYPES, without=list_backends(lambda c: not c.keeps_window)),
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
        backend = BACKENDS[name]()
        cache, k, v = fill(backend, 2, 16, lengths, dtype)
        view = make_view(cache, rows, policy, num_new, [committed[r] for r in rows], window)
        q = torch.randn(len(rows), num_new, 6, 16).to(k)
        new_k, new_v = (
            torch.stack([t[r, lengths[r] : lengths[r] + num_new] for r in rows]) for t in (k, v)
        )
        backend.plan(view)
        out = backend.run(1, q, new_k, new_v, view)
        for i, r in enumerate(rows):
            shown = policy.ranges(torch.tensor(committed))[r].tolist()
            keys = {s for first, last in shown for s in range(first, last)}
            keys |= set(range(committed[r], lengths[r] + num_new))
            keys = {s for s in keys if s > lengths[r] - window}
            assert view.num_visible[i] + num_new == len(keys)
            expected = written_out(q[i], k[r], v[r], sorted(keys), lengths[r], window)
            assert (out[i].double() - expected).abs().max() < TOLERANCE[dtype], (num_new, r)


@pytest.mark.parametrize("name", cases())
def test_a_forward_sees_neither_the_future_nor_another_row(name: str) -> None:
    """Changing a later token, or another row, must not change an output by a single bit."""
    torch.manual_seed(0)
    backend = BACKENDS[name]()
    dtype = torch.bfloat16 if isinstance(backend, LIBRARIES) else torch.float32
    cache, k, v = fill(backend, 2, 64, [30, 30], dtype)
    q, new = torch.randn(2, 4, 4, 64).to(k), slice(30, 34)
    outputs = []
    for change in (0.0, 3.0):
        cache.truncate([0, 1], [30, 30])
        k[0, 33], v[0, 33] = k[0, 33] + change, v[0, 33] + change  # row 0, its last new token
        view = make_view(cache, [0, 1], FullKV(), 4)
        backend.plan(view)
        outputs.append(backend.run(1, q, k[:, new], v[:, new], view).clone())
    assert torch.equal(outputs[0][0, :3], outputs[1][0, :3])
    assert torch.equal(outputs[0][1], outputs[1][1])
    assert not torch.equal(outputs[0][0, 3], outputs[1][0, 3])


def test_the_native_library_leaves_the_processor_state_alone() -> None:
    """When it was linked with -ffast-math, the whole process flushed subnormal numbers to zero,
    which changed later computations."""
    from magicdec.attention.native import kernel

    kernel(64)
    assert float.fromhex("0x1p-1070") * 0.5 == float.fromhex("0x1p-1071") > 0.0


@pytest.mark.parametrize(
    ("num_new", "dtype", "portable", "flags"),
    [
        *itertools.product([1, 7, 20], [torch.float32, torch.bfloat16], [False, True], [()]),
        # A prefill, whose last queries fill no tile register and no vector.
        *itertools.product([45], [torch.float32, torch.bfloat16], [False, True], [()]),
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
    rows, heads, kv_heads, size = 2, 8, 2, 64
    shape = CacheShape(
        1, kv_heads, size, backend.block_size(length + num_new), rows, backend.layout(dtype)
    )
    cache = KVCache(shape, rows, 1, dtype, torch.device("cpu"))
    for row in range(rows):
        cache.allocate(row, length + num_new)
    k, v = (torch.randn(rows, length + num_new, kv_heads, size).to(dtype) for _ in range(2))
    slots = cache.slots(torch.arange(rows), torch.arange(length).expand(rows, -1))
    cache.write(0, slots, k[:, :length], v[:, :length])
    cache.advance(range(rows), length)
    view = make_view(cache, range(rows), FullKV(), num_new)
    q = torch.randn(rows, num_new, heads, size).to(dtype)
    backend.plan(view)
    out, lse = backend.run_with_lse(0, q, k[:, length:], v[:, length:], view)
    scores = torch.einsum(
        "bthd,bshd->bths", q.double(), k.double().repeat_interleave(heads // kv_heads, 2)
    )
    scores = scores / size**0.5
    hidden = torch.ones(num_new, length + num_new, dtype=torch.bool).triu(length + 1)
    scores.masked_fill_(hidden[:, None], float("-inf"))
    values = v.double().repeat_interleave(heads // kv_heads, 2)
    expected = torch.einsum("bths,bshd->bthd", scores.softmax(-1), values)
    assert (lse.double() - scores.logsumexp(-1)).abs().max() < 1e-4
    assert (out.double() - expected).abs().max() < TOLERANCE[dtype] / 10


@pytest.mark.skipif(not has_bfloat16_path(), reason="no AVX512-BF16: the compiler orders the sums")
@pytest.mark.parametrize("heads", [2, 6, 32])  # 32: the queries of five tokens fill several blocks
@pytest.mark.parametrize("window", [None, 62, 66, 700, 1237])
@pytest.mark.parametrize("flags", [(), NO_AMX], ids=["any", "dot products"])
def test_native_gives_a_token_the_same_bits_alone_and_with_others(
    flags: tuple[str, ...], window: int | None, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding computes one token at a time, verification five at once."""
    build = native.kernel
    monkeypatch.setattr(native, "kernel", lambda size: build(size, *flags))
    torch.manual_seed(0)
    lengths, kv_heads, size, num_new = [1300, 63], 2, 64, 5
    backend, dtype = NativeBackend(), torch.bfloat16
    shape = CacheShape(1, kv_heads, size, backend.block_size(1400), 2, backend.layout(dtype))
    cache = KVCache(shape, 2, 1, dtype, torch.device("cpu"))
    k, v = (torch.randn(2, 1400, kv_heads, size).to(dtype) for _ in range(2))
    q = torch.randn(2, num_new, heads, size).to(dtype)
    slots = cache.slots(torch.arange(2), torch.arange(1400).expand(2, -1))
    for row, length in enumerate(lengths):
        cache.allocate(row, 1400)
        cache.write(
            0,
            slots[row : row + 1, :, :length],
            k[row : row + 1, :length],
            v[row : row + 1, :length],
        )
        cache.advance([row], length)

    def attend(rows: list[int], first: int, count: int) -> Tensor:
        view = make_view(cache, rows, FullKV(), count, window=window)
        new = [slice(lengths[r] + first, lengths[r] + first + count) for r in rows]
        new_k, new_v = (
            torch.stack([t[r, s] for r, s in zip(rows, new, strict=True)]) for t in (k, v)
        )
        backend.plan(view)
        return backend.run(0, q[rows, first : first + count], new_k, new_v, view)

    together = attend([0, 1], 0, num_new)
    for row in (0, 1):
        for t in range(num_new):
            assert torch.equal(attend([row], t, 1)[0, 0], together[row, t]), (row, t)
            cache.advance([row], 1)
