"""Every attention backend against attention in float64, alone and beside other rows; also ranges by
layer and KV head, and attention weights by block."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from attention_cases import (
    AVX2,
    AVX512,
    BACKENDS,
    DTYPES,
    HEADS,
    KV_DTYPES,
    LENGTHS,
    LIBRARIES,
    OTHER_TILES,
    TOLERANCE,
    BackendCase,
    Exact,
    cases,
    exact_attention,
    fill,
    make_case,
)
from rounded import CODES, FP8, as_stored
from torch import Tensor

from magicdec.attention import native
from magicdec.attention.grouped import GroupedBackend
from magicdec.attention.native import NativeBackend
from magicdec.attention.sdpa import SDPABackend
from magicdec.config.capabilities import MOST_WATCHED, list_backends
from magicdec.kv.view import WEIGHTS_BLOCK, make_view
from magicdec.speculation.policies.policy import FullKV, KVPolicy
from magicdec.speculation.policies.streaming_llm import StreamingLLM

pytestmark = pytest.mark.two_threads

POLICIES: list[KVPolicy] = [FullKV(), StreamingLLM(4, 11), StreamingLLM(0, 1), StreamingLLM(2, 500)]
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
        out = case.run(backend)
        k, v = case.read()
        for i, keys in enumerate(case.view.key_positions()[:, 0].tolist()):
            row = rows[i]
            seen = [s for s in keys if s >= 0]
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
    lengths = [37, 3, 70, 0, 70]
    committed = [35, 3, 66, 0, 70]
    batches = ((1, [0, 1, 2, 3]), (1, [2, 4]), (5, [2, 0, 1]), (40, [2]), (33, [4, 0, 3]))
    for num_new, rows in batches:
        backend = BACKENDS[name]()
        sizes = (dtype, window, lengths, committed)
        case = make_case(backend, (6, 2, 16), policy, num_new, rows, *sizes)
        out = case.run(backend)
        k, v = case.read()
        for i, row in enumerate(rows):
            length = lengths[row]
            visible = policy.ranges(torch.tensor(committed))[row].tolist()
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


@pytest.mark.narrow("pairs")
@pytest.mark.parametrize(
    ("num_new", "dtype", "flags"),
    [
        # The last: a prefill, whose last queries fill no tile register and no vector.
        *itertools.product([1, 7, 20, 45], DTYPES, [(), AVX2, AVX512]),
        *itertools.product([1, 7, 20, 45], [torch.bfloat16, *CODES], OTHER_TILES),
        *itertools.product([1, 7, 20, 45], CODES, [(), AVX2, AVX512]),
    ],
    ids=str,
)
def test_native_splits_long_rows_and_returns_the_log_sum_exp(
    num_new: int,
    dtype: torch.dtype,
    flags: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of several splits, and queries of several blocks (20 tokens of 4 heads for each KV
    head)."""
    build = native.kernel
    monkeypatch.setattr(native, "kernel", lambda size, *more: build(size, *more, *flags))
    torch.manual_seed(0)
    backend = NativeBackend()
    length = 3000
    cache, k, v = fill(backend, 2, 64, [length] * 2, dtype, length + num_new, layers=1)
    view = make_view(cache, range(2), FullKV(), num_new)
    case = BackendCase(view, torch.randn(2, num_new, 8, 64).to(k.dtype), k, v)
    read = as_stored(k, dtype, are_keys=True), as_stored(v, dtype)
    for out, lse, *qkv in zip(*case.run(backend, "run_with_lse"), case.q, *read, strict=True):
        exact = exact_attention(*qkv)
        # Halves of a scale may be rounded either way.
        bound = 1e-3 if dtype in CODES else 1e-4
        assert (lse.double() - exact.lse).abs().max() < bound
        assert (out.double() - exact.out).abs().max() < TOLERANCE[dtype] / 10


@pytest.mark.narrow("pairs")
@pytest.mark.parametrize(
    ("flags", "window", "heads", "dtype"),
    [
        # With 32 heads, the queries of five tokens fill several blocks.
        *itertools.product(
            [(), *OTHER_TILES, AVX2, AVX512],
            [None, 62, 66, 700, 1237],
            [(2, 2, 64), (6, 2, 64), (32, 2, 64)],
            [torch.bfloat16],
        ),
        *itertools.product(
            [(), AVX2, AVX512],
            [None, 66, 700],
            [(2, 2, 64), (6, 2, 64), (32, 2, 64)],
            [torch.float32],
        ),
        *itertools.product(
            [(), *OTHER_TILES, AVX2, AVX512],
            [None, 66, 700],
            [(2, 2, 64), (6, 2, 64), (32, 2, 64)],
            CODES,
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_new", [5, 40])
def test_native_gives_a_token_the_same_bits_alone_and_with_others(
    flags: tuple[str, ...],
    window: int | None,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    num_new: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decoding computes one token at a time, verification five at once, or 40. The log-sum-exp is
    compared too: it shows differences of float32 that the rounding of the output nearly always
    hides."""
    build = native.kernel
    monkeypatch.setattr(native, "kernel", lambda size, *more: build(size, *more, *flags))
    torch.manual_seed(0)
    backend = NativeBackend()
    lengths = [1300, 63]
    num_heads, kv_heads, size = heads
    cache, k, v = fill(backend, kv_heads, size, lengths, dtype, 1400, layers=1)
    q = torch.randn(2, num_new, num_heads, size).to(k.dtype)

    def attend(rows: list[int], first: int, count: int) -> Tensor:
        view = make_view(cache, rows, FullKV(), count, window=window)
        queries = q[rows, first : first + count]
        out, lse = BackendCase(view, queries, k, v, is_of_prompt=False).run(backend, "run_with_lse")
        return torch.cat([out.float().flatten(2), lse], 2)

    alone = {}  # first, so that later tokens are not in the cache yet
    for row in (0, 1):
        for t in range(num_new):
            alone[row, t] = attend([row], t, 1)[0, 0]
            cache.advance([row], 1)
    cache.truncate([0, 1], lengths)
    together = attend([0, 1], 0, num_new)
    for (row, t), found in alone.items():
        assert torch.equal(found, together[row, t]), (row, t)


@pytest.mark.parametrize("flags", OTHER_TILES, ids=str)
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("size", [64, 128])
def test_codes_have_the_same_bits_in_tile_registers(
    flags: tuple[str, ...], dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that few queries may be multiplied without them: over ranges that begin and end within a
    tile, and with weights by block."""
    build = native.kernel
    backend = NativeBackend()
    lengths = [37, 130, 700]
    for num_new, heads in [(1, 4), (1, 8), (5, 8), (9, 12), (16, 16), (70, 6)]:
        for policy, window in [(FullKV(), None), (FullKV(), 90), (StreamingLLM(4, 35), None)]:
            results = []
            for added in ((), flags):
                monkeypatch.setattr(
                    native, "kernel", lambda size, *more, added=added: build(size, *more, *added)
                )
                torch.manual_seed(num_new)
                cache, k, v = fill(backend, 2, size, lengths, dtype, 800, layers=1)
                view = make_view(cache, range(3), policy, num_new, lengths, window)
                q = torch.randn(3, num_new, heads, size).to(k.dtype)
                case = BackendCase(view, q, k, v)
                results.append([*case.run(backend, "run_with_lse")])
                if num_new <= MOST_WATCHED:
                    results[-1] += case.run(backend, "run_with_weights")
            for one, other in zip(*results, strict=True):
                assert torch.equal(one, other), (num_new, heads, policy, window)


@pytest.mark.narrow("pairs")
@pytest.mark.parametrize(
    ("flags", "window", "dtype"),
    [
        *itertools.product([(), AVX2, AVX512], [None, 20, 190], DTYPES),
        *itertools.product(OTHER_TILES, [None, 20, 190], [torch.bfloat16]),
        *itertools.product([(), *OTHER_TILES, AVX2, AVX512], [None, 20], CODES),
    ],
    ids=str,
)
def test_native_prefills_a_chunk_of_several_tasks(
    flags: tuple[str, ...],
    window: int | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tiles that some queries of a task do not see any more, or not yet; and the same bits for the
    last third alone, which are other tasks."""
    build = native.kernel
    monkeypatch.setattr(native, "kernel", lambda size, *more: build(size, *more, *flags))
    torch.manual_seed(0)
    backend = NativeBackend()
    num_new = 150
    length = 200
    cache, k, v = fill(backend, 2, 64, [length], dtype, length + num_new, layers=1)
    q = torch.randn(1, num_new, 8, 64).to(k.dtype)
    outputs = []
    for first in (0, 100):
        cache.truncate([0], [length])
        cache.advance([0], first)
        view = make_view(cache, [0], FullKV(), num_new - first, window=window)
        outputs.append(BackendCase(view, q[:, first:], k, v).run(backend, "run_with_lse"))
    read = as_stored(k, dtype, are_keys=True), as_stored(v, dtype)
    exact = exact_attention(q[0], read[0][0], read[1][0], None, length, window)
    (out, lse), (last_out, last_lse) = outputs
    # Halves of a scale may be rounded either way, of 20 keys.
    assert (lse[0].double() - exact.lse).abs().max() < (1e-2 if dtype in CODES else 1e-4)
    assert (out[0].double() - exact.out).abs().max() < TOLERANCE[dtype]
    assert torch.equal(out[0, 100:], last_out[0])
    assert torch.equal(lse[0, 100:], last_lse[0])


@pytest.mark.narrow("pairs")
@pytest.mark.parametrize("name", ["sdpa, blocks of 64", "native", "native of AVX2"])
@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("num_new", [1, 7, 45])
@pytest.mark.parametrize("size", [64, 80])
def test_float32_queries_read_codes(
    name: str, codes: torch.dtype, num_new: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float64 over the numbers of the definition, as closely as over float32."""
    build = native.kernel
    if name == "native of AVX2":
        name = "native"
        monkeypatch.setattr(native, "kernel", lambda size, *more: build(size, *more, *AVX2))
    torch.manual_seed(0)
    backend = BACKENDS[name]()
    cache, k, v = fill(backend, 2, size, LENGTHS, codes, computed=torch.float32)
    view = make_view(cache, range(4), FullKV(), num_new, window=50)
    case = BackendCase(view, torch.randn(4, num_new, 6, size), k, v)
    out = case.run(backend)
    assert out.dtype == torch.float32
    for row, q, keys, values in zip(range(4), case.q, *case.read(), strict=True):
        end = LENGTHS[row] + num_new
        exact = exact_attention(q, keys[:end], values[:end], window=50)
        assert (out[row].double() - exact.out).abs().max() < TOLERANCE[torch.float32]


@pytest.mark.narrow("pairs")
@pytest.mark.parametrize("flags", [(), *OTHER_TILES, AVX2, AVX512], ids=str)
@pytest.mark.parametrize("dtype", [*DTYPES, *CODES], ids=str)
@pytest.mark.parametrize("num_new", [1, 5, 45])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_output_of_a_query_that_is_not_finite_is_not_either(
    flags: tuple[str, ...],
    dtype: torch.dtype,
    num_new: int,
    value: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One number of one head is enough, also where queries are rounded to integers; the outputs of
    others stay as they are. The query's own tile of keys has a part that it does not see, or
    none."""
    build = native.kernel
    monkeypatch.setattr(native, "kernel", lambda size, *more: build(size, *more, *flags))
    torch.manual_seed(0)
    backend = NativeBackend()
    for committed in (70, 128 - num_new):
        cache, k, v = fill(backend, 2, 64, [committed], dtype, committed + num_new, layers=1)
        view = make_view(cache, [0], FullKV(), num_new)
        q = torch.randn(1, num_new, 8, 64).to(k.dtype)
        plain = BackendCase(view, q, k, v).run(backend)
        broken = q.clone()
        broken[0, -1, 3, 40] = value
        out = BackendCase(view, broken, k, v).run(backend)
        assert not out[0, -1, 3].isfinite().any()
        out[0, -1, 3] = plain[0, -1, 3]
        assert torch.equal(out, plain)


WITHOUT_WEIGHTS = list_backends(lambda c: not c.returns_weights)
FORWARDS = [(1, [0, 1, 2, 3]), (5, [2, 0, 1]), (3, [1, 3]), (17, [3, 2])]


@dataclass(frozen=True)
class Scattered:
    """A random choice of a share of the committed tokens, different for every layer and head."""

    kv_heads: int
    share: float

    def num_visible(self, committed: int) -> int:
        return int(committed * self.share)

    def ranges(self, committed: Tensor) -> Tensor:
        heads = [
            [[self.runs(c) for _ in range(self.kv_heads)] for c in committed.tolist()] for _ in "01"
        ]
        most = max(len(r) for layer in heads for row in layer for r in row) + 1
        # There are empty ranges before, after and between the others.
        return torch.tensor(
            [
                [[[*r, *[r[-1][1:] * 2] * (most - len(r))] for r in row] for row in layer]
                for layer in heads
            ],
            device=committed.device,
        )

    def runs(self, committed: int) -> list[list[int]]:
        chosen = torch.randperm(committed)[: self.num_visible(committed)].sort().values.tolist()
        ranges = [[0, 0]]
        for position in chosen:
            if position != ranges[-1][1]:
                ranges += [[position, position]] * 2
            ranges[-1] = [ranges[-1][0], position + 1]
        return ranges


def exact_heads(
    case: BackendCase, window: int | None = None
) -> list[tuple[int, int, slice, Exact]]:
    """Tuples of a row of the batch, a KV head, its query heads, and what they compute in float64
    over the keys that they see, whose number is checked."""
    view = case.view
    groups = case.k.shape[2]
    num_heads = case.q.shape[2]
    ranges = view.ranges[1] if view.per_head else view.ranges[:, None].expand(-1, groups, -1, -1)
    found = []
    keys_read, values_read = case.read()
    for i, head_ranges in enumerate(ranges.tolist()):
        row = view.rows[i]
        length = view.lengths[i]
        tail = range(int(view.committed[i]), length + view.num_new)
        for g, own in enumerate(head_ranges):
            queries = slice(g * num_heads // groups, (g + 1) * num_heads // groups)
            keys = [s for a, b in own for s in range(a, b)] + [*tail]
            assert window is not None or len(keys) == view.num_visible[i] + view.num_new
            k, v = (x[row, :, g : g + 1] for x in (keys_read, values_read))
            place = keys, length, window, view.num_weight_blocks
            found.append((i, g, queries, exact_attention(case.q[i, :, queries], k, v, *place)))
    return found


@pytest.mark.narrow("pairs")
@pytest.mark.parametrize(
    ("name", "heads", "dtype"), cases(HEADS, KV_DTYPES, interpreted=0), ids=str
)
def test_every_head_reads_its_own_ranges(
    name: str, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    for num_new, rows in [*FORWARDS, (40, [2, 1])]:
        backend = BACKENDS[name]()
        case = make_case(backend, heads, Scattered(heads[1], 0.4), num_new, rows, dtype)
        out = case.run(backend)
        for i, g, own, exact in exact_heads(case):
            assert (out[i, :, own].double() - exact.out).abs().max() < TOLERANCE[dtype], (i, g)


@pytest.mark.narrow("values")
@pytest.mark.parametrize(
    ("name", "heads", "dtype"),
    cases(HEADS, KV_DTYPES, without=WITHOUT_WEIGHTS, interpreted=0),
    ids=str,
)
def test_weights_are_the_softmax_summed_by_block(
    name: str, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """This holds for every choice of visible tokens. Returning the weights changes no bit of the
    output."""
    torch.manual_seed(0)
    for policy in (FullKV(), StreamingLLM(4, 11), Scattered(heads[1], 0.4)):
        for num_new, rows in FORWARDS:
            backend = BACKENDS[name]()
            case = make_case(backend, heads, policy, num_new, rows, dtype)
            plain = case.run(backend)
            out, mass = case.run(backend, "run_with_weights")
            assert torch.equal(out, plain)
            assert mass.dtype == torch.float32 and mass.shape[2] == case.view.num_weight_blocks
            total = num_new * heads[0] / heads[1]
            assert (mass.sum(2) - total).abs().max() < 2e-2 * total
            for i, g, _, exact in exact_heads(case):
                check_mass(mass[i, g], exact, total, dtype)


def check_mass(mass: Tensor, exact: Exact, total: float, dtype: torch.dtype) -> None:
    """`grouped` scales the queries in the dtype of the cache."""
    error = (mass.double() - exact.mass[0]).abs().max() / total
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.narrow("values")
@pytest.mark.parametrize(
    ("name", "window", "dtype"),
    cases([2, 21], KV_DTYPES, without=WITHOUT_WEIGHTS, interpreted=0),
    ids=str,
)
def test_weights_and_ranges_by_head_under_a_window(
    name: str, window: int, dtype: torch.dtype
) -> None:
    """This holds whatever a policy shows of the tokens before the window."""
    torch.manual_seed(0)
    for policy in (FullKV(), Scattered(2, 0.4)):
        for num_new, rows in FORWARDS:
            backend = BACKENDS[name]()
            case = make_case(backend, (6, 2, 16), policy, num_new, rows, dtype, window)
            out, mass = case.run(backend, "run_with_weights")
            for i, g, own, exact in exact_heads(case, window):
                assert (out[i, :, own].double() - exact.out).abs().max() < TOLERANCE[dtype]
                check_mass(mass[i, g], exact, num_new * 3, dtype)


@pytest.mark.parametrize("is_widened", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_new", "heads"), [(1, 2), (3, 4), (5, 16), (20, 8), (31, 2)])
def test_native_weights_over_splits_and_blocks_of_queries(
    num_new: int, heads: int, dtype: torch.dtype, is_widened: bool
) -> None:
    """Long rows of different lengths. The keys grow towards the end, so the maximum rises from tile
    to tile."""
    results = []
    for backend in (NativeBackend(is_widened), SDPABackend(64)):
        torch.manual_seed(0)
        cache, k, v = fill(backend, 2, 64, [1501, 700], dtype, 1540, layers=1, growth=2.0)
        q = torch.randn(2, num_new, heads, 64).to(dtype)
        case = BackendCase(make_view(cache, [1, 0], FullKV(), num_new), q, k, v)
        plain = case.run(backend)
        out, mass = case.run(backend, "run_with_weights")
        assert torch.equal(plain, out)
        results.append(mass)
    assert (results[0] - results[1]).abs().max() < 1e-4 * results[1].max()
    assert results[1].shape == (2, 2, -(-(1501 + num_new) // WEIGHTS_BLOCK))


@pytest.mark.parametrize(
    ("is_widened", "dtype"),
    [
        (True, torch.bfloat16),
        *((False, dtype) for dtype in KV_DTYPES),
    ],
    ids=str,
)
@pytest.mark.parametrize("heads", [(6, 2, 64), (32, 2, 64)])
def test_native_gives_a_token_the_same_bits_under_ranges_by_head(
    heads: tuple[int, int, int], is_widened: bool, dtype: torch.dtype
) -> None:
    """One token at a time and five at once read the same keys."""
    torch.manual_seed(0)
    backend = NativeBackend(is_widened)
    rows = [2, 0]
    committed = [66, 35]
    ranges = Scattered(heads[1], 0.5).ranges(torch.tensor(committed))

    class Fixed(Scattered):
        def ranges(self, committed: Tensor) -> Tensor:
            return ranges

    policy = Fixed(heads[1], 0.5)
    case = make_case(backend, heads, policy, 5, rows, dtype)
    together = case.run(backend)
    for t in range(5):
        view = make_view(case.view.cache, rows, policy, 1, committed)
        alone = BackendCase(view, case.q[:, t : t + 1], case.k, case.v).run(backend)
        assert torch.equal(alone[:, 0], together[:, t]), t
        case.view.cache.advance(rows, 1)


@pytest.mark.parametrize(("name", "stored"), cases([FP8]), ids=str)
def test_numbers_of_fp8(name: str, stored: torch.dtype) -> None:
    """A token that sees itself alone reads its own value, rounded: every number of FP8, those
    between two of them, beside them, and larger ones."""
    backend = BACKENDS[name]()
    every = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    between = (every[1:] + every[:-1]) / 2
    large = torch.tensor([456.0, 464.0, 472.0, 1e4, 1e38])
    ends = torch.cat([every, between, between * (1 - 2**-7), between * (1 + 2**-7), large])
    numbers = torch.cat([ends, -ends])
    values = torch.nn.functional.pad(numbers, (0, -len(numbers) % 64)).view(-1, 1, 64)
    cache, k, _ = fill(backend, 1, 64, [0] * len(values), stored, total=4)
    view = make_view(cache, range(len(values)), FullKV(), 1)
    v = values.to(k.device, k.dtype).unsqueeze(1).expand(-1, 4, -1, -1)
    out = BackendCase(view, k[:, :1], k, v).run(backend)
    assert torch.equal(out[:, 0].cpu().float(), as_stored(v[:, 0].cpu(), stored))


@pytest.mark.parametrize(("name", "stored"), cases([FP8]), ids=str)
def test_no_number_of_fp8_stays_none(name: str, stored: torch.dtype) -> None:
    """A cache that another program wrote, or a model that overflows: no finite output hides it."""
    backend = BACKENDS[name]()
    case = make_case(backend, (2, 1, 64), FullKV(), 1, [0, 1], stored)
    case.view.cache.v.view(torch.uint8).fill_(0x7F)
    assert case.run(backend).isnan().all()


@pytest.mark.parametrize("build", [GroupedBackend, NativeBackend])
def test_weights_are_of_as_many_new_tokens_as_every_backend_can_sum(build: type) -> None:
    for num_new in (MOST_WATCHED, MOST_WATCHED + 1):
        case = make_case(build(), (2, 2, 64), FullKV(), num_new, [1], torch.float32)
        if num_new == MOST_WATCHED:
            case.run(build(), "run_with_weights")
            continue
        with pytest.raises(AssertionError, match="refused before the run"):
            case.run(build(), "run_with_weights")
