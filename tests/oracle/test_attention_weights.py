"""Ranges by layer and KV head, and attention weights by block, both against a computation in
float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from attention_cases import (
    BACKENDS,
    DTYPES,
    HEADS,
    KV_DTYPES,
    TOLERANCE,
    Case,
    Exact,
    cases,
    exact_attention,
    fill,
    make_case,
)
from torch import Tensor

from magicdec.attention.grouped import GroupedBackend
from magicdec.attention.native import NativeBackend, has_bfloat16_path
from magicdec.attention.sdpa import SDPABackend
from magicdec.config.capabilities import MOST_WATCHED, list_backends
from magicdec.drafting.policies.full import FullKV
from magicdec.drafting.policies.streaming_llm import StreamingLLM
from magicdec.kv.view import WEIGHTS_BLOCK, make_view

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
            [[[[*r, *[r[-1][1:] * 2] * (most - len(r))] for r in row] for row in layer]
             for layer in heads],
            device=committed.device,
        )  # fmt: skip

    def runs(self, committed: int) -> list[list[int]]:
        chosen = torch.randperm(committed)[: self.num_visible(committed)].sort().values.tolist()
        ranges = [[0, 0]]
        for position in chosen:
            if position != ranges[-1][1]:
                ranges += [[position, position]] * 2
            ranges[-1] = [ranges[-1][0], position + 1]
        return ranges


def exact_heads(case: Case, window: int | None = None) -> list[tuple[int, int, slice, Exact]]:
    """Tuples of a row of the batch, a KV head, its query heads, and what they compute in float64
    over the keys that they see, whose number is checked."""
    view, groups, num_heads = case.view, case.k.shape[2], case.q.shape[2]
    ranges = view.ranges[1] if view.per_head else view.ranges[:, None].expand(-1, groups, -1, -1)
    found, (keys_read, values_read) = [], case.read()
    for i, of_heads in enumerate(ranges.tolist()):
        row, length = view.rows[i], view.lengths[i]
        tail = range(int(view.committed[i]), length + view.num_new)
        for g, own in enumerate(of_heads):
            queries = slice(g * num_heads // groups, (g + 1) * num_heads // groups)
            keys = [s for a, b in own for s in range(a, b)] + [*tail]
            assert window is not None or len(keys) == view.num_visible[i] + view.num_new
            k, v = (x[row, :, g : g + 1] for x in (keys_read, values_read))
            place = keys, length, window, view.num_weight_blocks
            found.append((i, g, queries, exact_attention(case.q[i, :, queries], k, v, *place)))
    return found


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


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_new", "heads"), [(1, 2), (3, 4), (5, 16), (20, 8), (31, 2)])
def test_native_weights_over_splits_and_blocks_of_queries(
    num_new: int, heads: int, dtype: torch.dtype, portable: bool
) -> None:
    """Long rows of different lengths. The keys grow towards the end, so the maximum rises from tile
    to tile."""
    results = []
    for backend in (NativeBackend(portable), SDPABackend(64)):
        torch.manual_seed(0)
        cache, k, v = fill(backend, 2, 64, [1501, 700], dtype, 1540, layers=1, growth=2.0)
        q = torch.randn(2, num_new, heads, 64).to(dtype)
        case = Case(make_view(cache, [1, 0], FullKV(), num_new), q, k, v)
        plain = case.run(backend)
        out, mass = case.run(backend, "run_with_weights")
        assert torch.equal(plain, out)
        results.append(mass)
    assert (results[0] - results[1]).abs().max() < 1e-4 * results[1].max()
    assert results[1].shape == (2, 2, -(-(1501 + num_new) // WEIGHTS_BLOCK))


@pytest.mark.skipif(not has_bfloat16_path(), reason="no AVX512-BF16: the compiler orders the sums")
@pytest.mark.parametrize("heads", [(6, 2, 64), (32, 2, 64)])
def test_native_gives_a_token_the_same_bits_under_ranges_by_head(
    heads: tuple[int, int, int],
) -> None:
    """One token at a time and five at once read the same keys."""
    torch.manual_seed(0)
    backend, rows, committed = NativeBackend(), [2, 0], [66, 35]
    ranges = Scattered(heads[1], 0.5).ranges(torch.tensor(committed))

    class Fixed(Scattered):
        def ranges(self, committed: Tensor) -> Tensor:
            return ranges

    policy = Fixed(heads[1], 0.5)
    case = make_case(backend, heads, policy, 5, rows, torch.bfloat16)
    together = case.run(backend)
    for t in range(5):
        view = make_view(case.view.cache, rows, policy, 1, committed)
        alone = Case(view, case.q[:, t : t + 1], case.k, case.v).run(backend)
        assert torch.equal(alone[:, 0], together[:, t]), t
        case.view.cache.advance(rows, 1)


@pytest.mark.parametrize(
    ("name", "build"), [("grouped", GroupedBackend), ("native", NativeBackend)]
)
def test_weights_of_a_long_chunk_are_refused(name: str, build: type) -> None:
    def run(num_new: int) -> None:
        backend = build()
        case = make_case(backend, (2, 2, 64), FullKV(), num_new, [1], torch.float32)
        case.run(backend, "run_with_weights")

    run(MOST_WATCHED)
    message = f"--attention {name} returns attention weights for at most 31 new tokens"
    with pytest.raises(ValueError, match=message):
        run(MOST_WATCHED + 1)
