"""The native choice of blocks is the choice of torch's operators."""

from __future__ import annotations

import pytest
import torch
from conftest import TINY, pack, tiny_transformer
from hypothesis import given
from hypothesis import strategies as st

from magicdec.attention.native import NativeBackend, has_bfloat16_path
from magicdec.distributed.groups import Group
from magicdec.drafting.block_choice import add_mean_keys, score_blocks, top_blocks
from magicdec.drafting.policies.verified import VerifiedKV
from magicdec.kv.view import WEIGHTS_BLOCK as BLOCK
from magicdec.runner import ModelRunner

DTYPES = [torch.float32, *([torch.bfloat16] if has_bfloat16_path() else [])]


@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=4),
    budget=st.integers(20, 300),
    sinks=st.integers(0, 9),
    window=st.integers(1, 11),
    sliding_window=st.none() | st.integers(30, 400),
)
def test_the_best_blocks(
    lengths: list[int], budget: int, sinks: int, window: int, sliding_window: int | None
) -> None:
    policy = VerifiedKV(sinks, window, budget, sliding_window)
    num_blocks = -(-max(lengths) // BLOCK)
    most = min(num_blocks, max(policy.split(length)[1] for length in lengths))
    kept = torch.rand(2, 6, 3, num_blocks + 3)  # of more rows and blocks than take part
    rows = torch.tensor([5, 0, 3, 2][: len(lengths)])
    scores = kept[:, rows, :, :num_blocks]
    expected = policy.top_blocks(torch.tensor(lengths), scores, most)
    pairs = [(policy.sinks(length), policy.split(length)) for length in lengths]
    split = [[sink[0] for sink, _ in pairs], [sink[1] for sink, _ in pairs]]
    split += [[each[0] for _, each in pairs], [each[1] for _, each in pairs], lengths]
    assert torch.equal(top_blocks(kept, rows, split, most), expected)


@given(complete=st.lists(st.integers(0, 40), min_size=1, max_size=3), rep=st.integers(1, 3))
def test_scores_are_a_softmax_over_complete_blocks(complete: list[int], rep: int) -> None:
    torch.manual_seed(0)
    queries, means = torch.randn(2, 4, 3, rep, 16), torch.randn(2, 4, 3, 50, 16)
    rows = torch.tensor([2, 0, 3][: len(complete)])
    found = score_blocks(queries, means, rows, complete, 45)
    logits = queries[:, rows] @ means[:, rows, :, :45].mT * 16**-0.5
    for b, count in enumerate(complete):
        expected = logits[:, b, ..., :count].double().softmax(dim=-1).sum(dim=2)
        torch.testing.assert_close(found[:, b, :, :count].double(), expected, rtol=1e-5, atol=1e-6)
        assert not found[:, b, :, count:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mean_keys(dtype: torch.dtype) -> None:
    model = pack(tiny_transformer(dtype=dtype))
    runner = ModelRunner(model, NativeBackend(), Group((0,), 0), 3, 300)
    runner.cache.k.normal_()
    for row in (2, 0, 1):
        runner.allocate(row)
    rows, first, last = [1, 2], [3, 0], [17, 9]
    means = torch.zeros(TINY.num_layers, 3, TINY.num_kv_heads, 20, TINY.head_dim)
    add_mean_keys(runner.cache, rows, first, last, means)
    for layer in range(TINY.num_layers):
        keys = runner.cache.first_keys(layer, torch.tensor(rows), 17 * BLOCK).double()
        expected = keys.unflatten(2, (-1, BLOCK)).mean(dim=3)
        for b, (row, begin, end) in enumerate(zip(rows, first, last, strict=True)):
            found = means[layer, row, :, begin:end].double()
            torch.testing.assert_close(found, expected[b, :, begin:end], rtol=1e-5, atol=1e-6)
            assert not means[layer, row, :, :begin].any() and not means[layer, row, :, end:].any()
    assert not means[:, 0].any()
