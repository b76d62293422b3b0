"""Draft trees in the native kernels: a node has the bits that it has in a chain of its ancestors,
wherever tiles, stretches of tiles and pieces of a row end."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from attention_cases import NO_AMX, fill
from test_draft_trees import drawn_parents, path_of
from torch import Tensor

from magicdec.attention import native
from magicdec.attention.grouped import GroupedBackend
from magicdec.attention.native import NativeBackend
from magicdec.attention.sdpa import SDPABackend
from magicdec.kv.cache import KVCache
from magicdec.kv.tree import DraftTree
from magicdec.kv.view import FULL, SinksAndWindow, Visible, make_view

# (query heads, KV heads, head size); with three heads a KV head and more, in tile registers.
HEADS = [(4, 4, 64), (8, 2, 128), (34, 2, 32), (3, 1, 80)]
BASES = [0, 63, 509, 126, 1024, 700]  # ends of tiles, stretches and pieces are among the nodes
NODES, MAX_TOKENS = 19, 1088
VIEWS: dict[str, tuple[Visible, int | None]] = {
    "full": (FULL, None),
    "sinks": (SinksAndWindow(5, 90), None),
    "window": (FULL, 100),
}


def filled(heads: tuple[int, int, int], dtype: torch.dtype, backend: NativeBackend) -> KVCache:
    """Rows of BASES random tokens; after them, numbers that must not matter."""
    torch.manual_seed(0)
    cache, _, _ = fill(backend, heads[1], heads[2], BASES, dtype, MAX_TOKENS, layers=1)
    return cache


def drawn(heads: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of the nodes."""
    num_heads, kv_heads, size = heads
    shape = len(BASES), NODES, num_heads + 2 * kv_heads, size
    q, k, v = torch.randn(shape).to(dtype).split([num_heads, kv_heads, kv_heads], 2)
    return q.contiguous(), k.contiguous(), v.contiguous()


def run_tree(
    backend: NativeBackend | SDPABackend, cache: KVCache, qkv: tuple[Tensor, Tensor, Tensor],
    parents: Tensor, cells: Tensor | None, view_of: tuple[Visible, int | None], cuts: list[int],
) -> Tensor:  # fmt: skip
    """The output of all nodes, level by level. The rows have their bases again afterwards."""
    rows, base, found = list(range(len(BASES))), torch.tensor(BASES), []
    for first, last in zip([0, *cuts], cuts, strict=False):
        tree = DraftTree(base, parents[:, :last], None if cells is None else cells[:, :last])
        policy, window = view_of
        view = make_view(cache, rows, policy, last - first, BASES, window, tree)
        backend.plan(view)
        found.append(backend.run(0, *(x[:, first:last] for x in qkv), view))
        if cells is None:
            cache.advance(rows, last - first)
    cache.truncate(rows, BASES)
    return torch.cat(found, 1)


def run_path(
    backend: NativeBackend, cache: KVCache, qkv: tuple[Tensor, Tensor, Tensor], row: int,
    path: list[int], view_of: tuple[Visible, int | None],
) -> Tensor:  # fmt: skip
    policy, window = view_of
    view = make_view(cache, [row], policy, len(path), [BASES[row]], window)
    backend.plan(view)
    return backend.run(0, *(x[row : row + 1, path] for x in qkv), view)[0]


@pytest.mark.narrow("values", "pairs")
@pytest.mark.parametrize("is_scattered", [False, True], ids=["adjacent", "cells"])
@pytest.mark.parametrize("cuts", [[NODES], [3, 11, NODES]], ids=["at once", "by levels"])
@pytest.mark.parametrize("view_of", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("flags", [(), NO_AMX], ids=["as this CPU", "no AMX"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_node_has_the_bits_of_its_path(
    heads: tuple[int, int, int], dtype: torch.dtype, flags: tuple[str, ...],
    view_of: tuple[Visible, int | None], cuts: list[int], is_scattered: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    kernel = native.kernel
    monkeypatch.setattr(native, "kernel", lambda size: kernel(size, *flags))
    backend = NativeBackend()
    cache, qkv = filled(heads, dtype, backend), drawn(heads, torch.bfloat16)
    parents = drawn_parents(len(BASES), NODES, seed=5)
    cells = None
    if is_scattered:
        cells = torch.stack([torch.randperm(40)[:NODES] + 1045 for _ in BASES])
    ours = run_tree(backend, cache, qkv, torch.tensor(parents), cells, view_of, cuts)
    for row in range(len(BASES)):
        for node in range(NODES):
            path = path_of(parents[row], node)
            chain = run_path(backend, cache, qkv, row, path, view_of)
            assert torch.equal(ours[row, node], chain[-1]), (row, node, path)


@dataclass(frozen=True)
class Elsewhere:
    """A context of 110 tokens in cells of which some have greater numbers than the context has
    tokens."""

    def ranges(self, committed: Tensor) -> Tensor:
        return torch.tensor([[[20, 90], [300, 340]]]).expand(len(committed), -1, -1)

    def num_visible(self, committed: int) -> int:
        return 110

    most_visible = num_visible


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(4, 4, 64), (8, 2, 128)], ids=str)
def test_context_and_nodes_may_lie_in_any_cells(
    heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Two forwards of one tree, against the reference backend."""
    rows, parents, qkv = (
        [2, 4, 5],
        torch.tensor(drawn_parents(5, NODES, 7)[2:]),
        drawn(heads, dtype),
    )
    cells = torch.stack([torch.randperm(150)[:NODES] + 350 for _ in rows])
    found = []
    for backend in (NativeBackend(), SDPABackend(), GroupedBackend()):
        cache = filled(heads, dtype, NativeBackend())
        cache.truncate(rows, [110] * 3)
        for first, last in ((0, 6), (6, NODES)):
            tree = DraftTree(torch.tensor([110] * 3), parents[:, :last], cells[:, :last])
            view = make_view(cache, rows, Elsewhere(), last - first, tree=tree)
            backend.plan(view)
            found.append(backend.run(0, *(x[:3, first:last] for x in qkv), view).float())
    tolerance = 2e-5 if dtype == torch.float32 else 3e-2
    for ours, theirs, others in zip(found[:2], found[2:4], found[4:], strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(others, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("view_of", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("heads", [(8, 2, 128), (3, 1, 80)], ids=str)
def test_widened_kernels_and_grouped_compute_what_sdpa_does(
    heads: tuple[int, int, int], view_of: tuple[Visible, int | None]
) -> None:
    """With the attention weights of each block, which are those of its positions."""
    backend, qkv = NativeBackend(is_widened=True), drawn(heads, torch.float32)
    parents = torch.tensor(drawn_parents(len(BASES), NODES, seed=6))
    tree, rows, found = DraftTree(torch.tensor(BASES), parents), list(range(len(BASES))), []
    for each in (backend, SDPABackend(), GroupedBackend()):
        cache = filled(heads, torch.float32, backend)
        view = make_view(cache, rows, view_of[0], NODES, BASES, view_of[1], tree)
        each.plan(view)
        found.append(each.run_with_weights(0, *qkv, view))
    for ours, theirs, others in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(others, theirs, atol=2e-5, rtol=1e-4)
