"""Draft trees: the logits of each node are those of its path as a chain, by `transformers` and by
our own forwards, with the same bits in native attention; and what is kept of an accepted path."""

import random
from collections.abc import Iterable

import pytest
import torch
from attention_cases import NO_AMX, ON_CPUS, fill
from conftest import TINY, make_runner, random_prompts, tiny_transformer
from tiny_families import VOCAB, stored
from torch import Tensor

from magicdec.attention import native
from magicdec.attention.flash_attn import FlashAttnBackend
from magicdec.attention.grouped import GroupedBackend
from magicdec.attention.native import NativeBackend
from magicdec.attention.sdpa import SDPABackend
from magicdec.config.capabilities import capabilities_of
from magicdec.kv.cache import KVCache
from magicdec.kv.tree import DraftTree
from magicdec.kv.view import FULL, KVView, SinksAndWindow, Visible, make_view
from magicdec.runner.model_runner import ModelRunner

FAMILIES = ["llama-3.1", "mistral", "bloom", "gpt2"]  # RoPE, a window, ALiBi, learned positions
LENGTHS, NODES = [150, 7, 62], 9


def drawn_parents(num_rows: int, num_nodes: int, seed: int) -> list[list[int]]:
    """Trees of different shapes: the first is a chain, the second has only roots."""
    draw = random.Random(seed)
    others = [[draw.randrange(-1, u) for u in range(num_nodes)] for _ in range(num_rows)]
    return [list(range(-1, num_nodes - 1)), [-1] * num_nodes, *others][:num_rows]


def path_of(parents: list[int], node: int) -> list[int]:
    """The nodes from the root to `node`."""
    return [] if node < 0 else [*path_of(parents, parents[node]), node]


def prefilled(runner: ModelRunner, prompts: list[tuple[int, ...]]) -> ModelRunner:
    for row, prompt in enumerate(prompts):
        runner.allocate(row)
        runner.forward(torch.tensor([prompt]), [row])
    return runner


def levels(
    runner: ModelRunner, base: Tensor, parents: Tensor, ids: Tensor, cuts: list[int]
) -> Tensor:
    """The logits of all nodes [B, U, V], with one forward for each level. A level ends at each of
    `cuts`."""
    rows, found, first = list(range(len(base))), [], 0
    for last in cuts:
        tree = DraftTree(base, parents[:, :last])
        found.append(runner.forward(ids[:, first:last], rows, tree=tree))
        first = last
    return torch.cat(found, 1)


@pytest.mark.parametrize("cuts", [[NODES], [1, 4, 7, NODES]], ids=["at once", "by levels"])
@pytest.mark.parametrize("name", ON_CPUS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_node_has_the_logits_of_its_path(family: str, name: str, cuts: list[int]) -> None:
    """Then the longest path of each row is kept, and a chain of tokens after it."""
    model, reference = stored(family).load(), stored(family).reference
    if "native" in name and model.config.cached_head_dim % 16:
        pytest.skip("the native kernels serve other head sizes")
    prompts = random_prompts(LENGTHS, VOCAB)
    runner = prefilled(make_runner(model, 3, 192, ON_CPUS[name]()), prompts)
    parents, ids = drawn_parents(3, NODES, 1), torch.randint(VOCAB, (3, NODES))
    base = runner.cache.seq_lens.clone()
    logits = levels(runner, base, torch.tensor(parents), ids, cuts)
    assert runner.cache.lengths == [length + NODES for length in LENGTHS]
    texts = []
    for row, prompt in enumerate(prompts):
        paths = [path_of(parents[row], node) for node in range(NODES)]
        for node, path in enumerate(paths):
            text = [*prompt, *ids[row, path].tolist()]
            expected = reference.logits(torch.tensor([text]))[0, -1]
            torch.testing.assert_close(logits[row, node], expected, atol=1e-4, rtol=0)
        texts.append(max(paths, key=len))
    assert sorted({len(path) for path in texts}) != [NODES], "paths of different lengths"
    kept = torch.full((3, NODES), -1)
    for row, path in enumerate(texts):
        kept[row, : len(path)] = base[row] + torch.tensor(path)
    runner.cache.keep_path([0, 1, 2], base.tolist(), kept)
    lengths = [n + len(path) for n, path in zip(LENGTHS, texts, strict=True)]
    assert runner.cache.seq_lens.tolist() == lengths
    runner.cache.set_host_lengths([0, 1, 2], lengths)
    following = torch.randint(VOCAB, (3, 2))
    logits = runner.forward(following, [0, 1, 2])
    for row, (prompt, path) in enumerate(zip(prompts, texts, strict=True)):
        text = [*prompt, *ids[row, path].tolist(), *following[row].tolist()]
        expected = reference.logits(torch.tensor([text]))[0, -2:]
        torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=0)


def tiny_tree(name: str, count: int, seed: int) -> tuple[ModelRunner, list[list[int]], Tensor]:
    """A runner that has taken prompts, and the parents and ids of as many nodes after them."""
    prompts = random_prompts(LENGTHS, TINY.vocab_size)
    runner = prefilled(make_runner(tiny_transformer(), 3, 192, ON_CPUS[name]()), prompts)
    return runner, drawn_parents(3, count, seed), torch.randint(TINY.vocab_size, (3, count))


@pytest.mark.parametrize("name", ON_CPUS)
def test_a_draft_tree_reads_what_its_policy_shows(name: str) -> None:
    """Sinks, a window before the committed length, and a tail of a chain before the tree: the same
    logits as of chains under the policy."""
    policy, committed = SinksAndWindow(4, 30), [n - 3 for n in LENGTHS]
    runner, parents, ids = tiny_tree(name, NODES, 2)
    tree = DraftTree(runner.cache.seq_lens.clone(), torch.tensor(parents))
    before = runner.counts.copy()
    logits = runner.forward(ids, [0, 1, 2], policy, committed, tree=tree)
    read = runner.counts.minus(before).kv_tokens_read
    assert read == sum(min(n, 30) + 3 + NODES for n in committed)
    runner.truncate([0, 1, 2], LENGTHS)
    for row in range(3):
        for node in range(NODES):
            path = path_of(parents[row], node)
            chain = runner.forward(
                ids[row : row + 1, path], [row], policy, committed[row : row + 1]
            )
            torch.testing.assert_close(logits[row, node], chain[0, -1], atol=1e-4, rtol=0)
            runner.truncate([row], [LENGTHS[row]])


@pytest.mark.parametrize("name", ON_CPUS)
def test_a_tree_may_have_as_many_nodes_as_a_chunk_of_a_prompt(name: str) -> None:
    """A chain of so many tokens would be computed as in prefill."""
    runner, parents, ids = tiny_tree(name, 40, 4)
    tree = DraftTree(runner.cache.seq_lens.clone(), torch.tensor(parents))
    logits = runner.forward(ids, [0, 1, 2], tree=tree)
    runner.truncate([0, 1, 2], LENGTHS)
    for row, node in ((0, 39), (1, 39), (2, 38), (2, 39)):
        chain = runner.forward(ids[row : row + 1, path_of(parents[row], node)], [row])
        torch.testing.assert_close(logits[row, node], chain[0, -1], atol=1e-4, rtol=0)
        runner.truncate([row], [LENGTHS[row]])


def test_other_backends_refuse_a_tree_by_name() -> None:
    runner = make_runner(tiny_transformer(), 1, 64)
    runner.allocate(0)
    runner.backend = FlashAttnBackend.__new__(FlashAttnBackend)
    assert not capabilities_of("flash_attn").supports_trees
    tree = DraftTree(torch.zeros(1, dtype=torch.int64), torch.tensor([[-1]]))
    with pytest.raises(ValueError, match=r"--attention flash_attn .* choose from .*sdpa"):
        runner.forward(torch.tensor([[3]]), [0], tree=tree)


# (query heads, KV heads, head size); with three heads a KV head and more, in tile registers.
HEADS = [(4, 4, 64), (8, 2, 128), (34, 2, 32), (3, 1, 80)]
BASES = [0, 63, 509, 126, 1024, 700]  # ends of tiles, stretches and pieces are among the nodes
TREE_NODES, MAX_TOKENS = 19, 1088
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
    shape = len(BASES), TREE_NODES, num_heads + 2 * kv_heads, size
    q, k, v = torch.randn(shape).to(dtype).split([num_heads, kv_heads, kv_heads], 2)
    return q.contiguous(), k.contiguous(), v.contiguous()


def bits(backend: NativeBackend, qkv: Iterable[Tensor], view: KVView) -> Tensor:
    """The output [B, T, ...] and the log-sum-exp, which shows differences of float32 that the
    rounding of the output nearly always hides."""
    backend.plan(view)
    out, lse = backend.run_with_lse(0, *qkv, view)
    return torch.cat([out.float().flatten(2), lse], 2)


def run_tree(
    backend: NativeBackend, cache: KVCache, qkv: tuple[Tensor, Tensor, Tensor],
    parents: Tensor, view_of: tuple[Visible, int | None], cuts: list[int],
) -> Tensor:  # fmt: skip
    """The bits of all nodes, level by level. The rows have their bases again afterwards."""
    rows, base, found = list(range(len(BASES))), torch.tensor(BASES), []
    for first, last in zip([0, *cuts], cuts, strict=False):
        tree = DraftTree(base, parents[:, :last])
        policy, window = view_of
        view = make_view(cache, rows, policy, last - first, BASES, window, tree)
        found.append(bits(backend, (x[:, first:last] for x in qkv), view))
        cache.advance(rows, last - first)
    cache.truncate(rows, BASES)
    return torch.cat(found, 1)


def run_path(
    backend: NativeBackend, cache: KVCache, qkv: tuple[Tensor, Tensor, Tensor], row: int,
    path: list[int], view_of: tuple[Visible, int | None],
) -> Tensor:  # fmt: skip
    policy, window = view_of
    view = make_view(cache, [row], policy, len(path), [BASES[row]], window)
    return bits(backend, (x[row : row + 1, path] for x in qkv), view)[0]


@pytest.mark.narrow("values", "pairs")
@pytest.mark.parametrize("cuts", [[TREE_NODES], [3, 11, TREE_NODES]], ids=["at once", "by levels"])
@pytest.mark.parametrize("view_of", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("flags", [(), NO_AMX], ids=["as this CPU", "no AMX"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_node_has_the_bits_of_its_path(
    heads: tuple[int, int, int], flags: tuple[str, ...],
    view_of: tuple[Visible, int | None], cuts: list[int], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    kernel = native.kernel
    monkeypatch.setattr(native, "kernel", lambda size: kernel(size, *flags))
    backend = NativeBackend()
    cache, qkv = filled(heads, torch.bfloat16, backend), drawn(heads, torch.bfloat16)
    parents = drawn_parents(len(BASES), TREE_NODES, seed=5)
    ours = run_tree(backend, cache, qkv, torch.tensor(parents), view_of, cuts)
    for row in range(len(BASES)):
        for node in range(TREE_NODES):
            path = path_of(parents[row], node)
            chain = run_path(backend, cache, qkv, row, path, view_of)
            assert torch.equal(ours[row, node], chain[-1]), (row, node, path)


@pytest.mark.parametrize("view_of", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("heads", [(8, 2, 128), (3, 1, 80)], ids=str)
def test_widened_kernels_and_grouped_compute_what_sdpa_does(
    heads: tuple[int, int, int], view_of: tuple[Visible, int | None]
) -> None:
    """With the attention weights of each block, which are those of its positions."""
    backend, qkv = NativeBackend(is_widened=True), drawn(heads, torch.float32)
    parents = torch.tensor(drawn_parents(len(BASES), TREE_NODES, seed=6))
    tree, rows, found = DraftTree(torch.tensor(BASES), parents), list(range(len(BASES))), []
    for each in (backend, SDPABackend(), GroupedBackend()):
        cache = filled(heads, torch.float32, backend)
        view = make_view(cache, rows, view_of[0], TREE_NODES, BASES, view_of[1], tree)
        each.plan(view)
        found.append(each.run_with_weights(0, *qkv, view))
    for ours, theirs, others in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(others, theirs, atol=2e-5, rtol=1e-4)
