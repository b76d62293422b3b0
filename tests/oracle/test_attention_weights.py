"""Ranges by layer and KV head, and attention weights by block, both against a computation in
float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from test_attention import BACKENDS, DTYPES, HEADS, TOLERANCE, cases, fill, written_out
from torch import Tensor

from magicdec.attention.backend import AttentionBackend
from magicdec.attention.grouped import GroupedBackend
from magicdec.attention.native import NativeBackend, has_bfloat16_path
from magicdec.attention.sdpa import SDPABackend
from magicdec.config.capabilities import MOST_WATCHED, list_backends
from magicdec.drafting.policies.full import FullKV
from magicdec.drafting.policies.streaming_llm import StreamingLLM
from magicdec.kv.cache import KVCache
from magicdec.kv.pool import CacheShape
from magicdec.kv.view import WEIGHTS_BLOCK, KVView, Visible, make_view

WITHOUT_WEIGHTS = list_backends(lambda c: not c.returns_weights)
LENGTHS, COMMITTED = [37, 3, 70, 0], [35, 3, 66, 0]
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


@dataclass
class Case:
    """One forward of `num_new` tokens over `rows` of a filled cache."""

    view: KVView
    q: Tensor
    k: Tensor  # all tokens of all rows, [B, S, G, D]
    v: Tensor

    def run(self, backend: AttentionBackend, with_mass: bool) -> tuple[Tensor, Tensor]:
        view = self.view
        spans = [(r, n, n + view.num_new) for r, n in zip(view.rows, view.lengths, strict=True)]
        k, v = (
            torch.stack([t[r, first:last] for r, first, last in spans]) for t in (self.k, self.v)
        )
        backend.plan(view)
        if with_mass:
            return backend.run_with_weights(1, self.q, k, v, view)
        return backend.run(1, self.q, k, v, view), torch.empty(0)

    def heads(self) -> list[tuple[int, int, slice, list[int]]]:
        """Tuples of a row of the batch, a KV head, its query heads, and the keys that they see."""
        view, groups, num_heads = self.view, self.k.shape[2], self.q.shape[2]
        ranges = (
            view.ranges[1] if view.per_head else view.ranges[:, None].expand(-1, groups, -1, -1)
        )
        chosen = []
        for i, heads in enumerate(ranges.tolist()):
            tail = range(int(view.committed[i]), view.lengths[i] + view.num_new)
            for g, own in enumerate(heads):
                queries = slice(g * num_heads // groups, (g + 1) * num_heads // groups)
                chosen.append((i, g, queries, [s for a, b in own for s in range(a, b)] + [*tail]))
        return chosen


def make_case(
    backend: AttentionBackend, heads: tuple[int, int, int], policy: Visible, num_new: int,
    rows: list[int], dtype: torch.dtype, window: int | None = None,
) -> Case:  # fmt: skip
    cache, k, v = fill(backend, heads[1], heads[2], LENGTHS, dtype)
    view = make_view(cache, rows, policy, num_new, [COMMITTED[r] for r in rows], window)
    return Case(view, torch.randn(len(rows), num_new, heads[0], heads[2]).to(k), k, v)


def written_mass(
    q: Tensor, k: Tensor, keys: list[int], first: int, num_blocks: int, window: int = 1000
) -> Tensor:
    """The attention weights of each block in float64, [num_blocks], for q [T, heads, D] at
    positions `first` and after, over k [S, D] at `keys`."""
    mass = torch.zeros(num_blocks, dtype=torch.float64)
    for t in range(q.shape[0]):
        seen = torch.tensor([s for s in keys if first + t - window < s <= first + t])
        scores = q[t].double() @ k[seen].double().T / q.shape[2] ** 0.5
        mass.index_add_(0, seen // WEIGHTS_BLOCK, torch.softmax(scores, 1).sum(0))
    return mass


@pytest.mark.parametrize(("name", "heads", "dtype"), cases(HEADS, DTYPES, interpreted=0), ids=str)
def test_every_head_reads_its_own_ranges(
    name: str, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    for num_new, rows in [*FORWARDS, (40, [2, 1])]:
        backend = BACKENDS[name]()
        case = make_case(backend, heads, Scattered(heads[1], 0.4), num_new, rows, dtype)
        out, _ = case.run(backend, with_mass=False)
        for i, g, own, keys in case.heads():
            row, first = rows[i], LENGTHS[rows[i]]
            assert len(keys) == case.view.num_visible[i] + num_new
            args = case.k[row, :, g : g + 1], case.v[row, :, g : g + 1], keys, first
            expected = written_out(case.q[i, :, own], *args)
            assert (out[i, :, own].double() - expected).abs().max() < TOLERANCE[dtype], (i, g)


@pytest.mark.parametrize(
    ("name", "heads", "dtype"),
    cases(HEADS, DTYPES, without=WITHOUT_WEIGHTS, interpreted=0),
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
            plain, _ = case.run(backend, with_mass=False)
            out, mass = case.run(backend, with_mass=True)
            assert torch.equal(out, plain)
            assert mass.dtype == torch.float32 and mass.shape[2] == case.view.num_weight_blocks
            total = num_new * heads[0] / heads[1]
            assert (mass.sum(2) - total).abs().max() < 2e-2 * total
            for i, g, own, keys in case.heads():
                k, first = case.k[rows[i], :, g], LENGTHS[rows[i]]
                expected = written_mass(case.q[i, :, own], k, keys, first, mass.shape[2])
                # `grouped` scales the queries in the dtype of the cache.
                error = (mass[i, g].double() - expected).abs().max() / total
                assert error < (1e-5 if dtype == torch.float32 else 1e-2), (policy, i, g)


@pytest.mark.parametrize(
    ("name", "window", "dtype"),
    cases([2, 21], DTYPES, without=WITHOUT_WEIGHTS, interpreted=0),
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
            out, mass = case.run(backend, with_mass=True)
            for i, g, own, keys in case.heads():
                k, v, first = case.k[rows[i]], case.v[rows[i], :, g : g + 1], LENGTHS[rows[i]]
                q = case.q[i, :, own]
                expected = written_out(q, k[:, g : g + 1], v, keys, first, window)
                assert (out[i, :, own].double() - expected).abs().max() < TOLERANCE[dtype]
                weights = written_mass(q, k[:, g], keys, first, mass.shape[2], window)
                error = (mass[i, g].double() - weights).abs().max() / (num_new * 3)
                assert error < (1e-5 if dtype == torch.float32 else 1e-2), (policy, i, g)


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_new", "heads"), [(1, 2), (3, 4), (5, 16), (20, 8), (31, 2)])
def test_native_weights_over_splits_and_blocks_of_queries(
    num_new: int, heads: int, dtype: torch.dtype, portable: bool
) -> None:
    """Long rows of different lengths. The keys grow towards the end, so the maximum rises from tile
    to tile."""
    torch.manual_seed(0)
    lengths, kv_heads, size, total = [1501, 700], 2, 64, 1540
    grows = torch.linspace(0.1, 2, total).view(1, total, 1, 1)
    keys = (torch.randn(2, total, kv_heads, size) * grows).to(dtype)
    values = torch.randn(2, total, kv_heads, size).to(dtype)
    q = torch.randn(2, num_new, heads, size).to(dtype)
    k, v = (torch.randn(2, num_new, kv_heads, size).to(dtype) for _ in range(2))
    results = []
    for backend in (NativeBackend(portable), SDPABackend(64)):
        block = backend.block_size(total)
        per_row = -(-total // block)
        shape = CacheShape(1, kv_heads, size, block, 2 * per_row, backend.layout(dtype))
        cache = KVCache(shape, 2, per_row, dtype, torch.device("cpu"))
        for row, length in enumerate(lengths):
            cache.allocate(row, total)
            slots = cache.slots(torch.tensor([row]), torch.arange(length).view(1, -1))
            cache.write(0, slots, keys[row : row + 1, :length], values[row : row + 1, :length])
            cache.advance([row], length)
        view = make_view(cache, [1, 0], FullKV(), num_new)
        backend.plan(view)
        plain = backend.run(0, q, k, v, view)
        out, mass = backend.run_with_weights(0, q, k, v, view)
        assert torch.equal(plain, out)
        results.append(mass)
    assert (results[0] - results[1]).abs().max() < 1e-4 * results[1].max()
    assert results[1].shape == (2, kv_heads, -(-(1501 + num_new) // WEIGHTS_BLOCK))


@pytest.mark.skipif(not has_bfloat16_path(), reason="no AVX512-BF16: the compiler orders the sums")
@pytest.mark.parametrize("heads", [(6, 2, 64), (32, 2, 64)])
def test_native_gives_a_token_the_same_bits_under_ranges_by_head(
    heads: tuple[int, int, int],
) -> None:
    """One token at a time and five at once read the same keys."""
    torch.manual_seed(0)
    backend = NativeBackend()
    chosen = Scattered(heads[1], 0.5).ranges(torch.tensor([COMMITTED[2], COMMITTED[0]]))

    class Kept(Scattered):
        def ranges(self, committed: Tensor) -> Tensor:
            return chosen

    policy = Kept(heads[1], 0.5)
    case = make_case(backend, heads, policy, 5, [2, 0], torch.bfloat16)
    together, _ = case.run(backend, with_mass=False)
    for t in range(5):
        view = make_view(case.view.cache, [2, 0], policy, 1, [COMMITTED[2], COMMITTED[0]])
        alone = Case(view, case.q[:, t : t + 1], case.k, case.v).run(backend, with_mass=False)[0]
        assert torch.equal(alone[:, 0], together[:, t]), t
        case.view.cache.advance([2, 0], 1)


@pytest.mark.parametrize(
    ("name", "build"), [("grouped", GroupedBackend), ("native", NativeBackend)]
)
def test_weights_of_a_long_chunk_are_refused(name: str, build: type) -> None:
    for num_new in (MOST_WATCHED, MOST_WATCHED + 1):
        backend = build()
        case = make_case(backend, (2, 2, 64), FullKV(), num_new, [1], torch.float32)
        if num_new == MOST_WATCHED:
            case.run(backend, with_mass=True)
            continue
        with pytest.raises(
            ValueError,
            match=f"--attention {name} returns attention weights for at most 31 new tokens",
        ):
            case.run(backend, with_mass=True)
