"""ALiBi in extra dimensions of q and k: its slopes, its scores, and its error in bfloat16.
`test_families.py` tests the logits of every backend."""

from __future__ import annotations

import pytest
import torch
from conftest import make_runner

from magicdec.attention.backend import AttentionBackend
from magicdec.attention.grouped import GroupedBackend
from magicdec.attention.native import NativeBackend
from magicdec.attention.sdpa import SDPABackend
from magicdec.drafting.policies.full import FullKV
from magicdec.kv.view import make_view
from magicdec.model.config import ModelConfig
from magicdec.model.positions import alibi, alibi_slopes
from magicdec.model.transformer import Transformer

ALIBI = ModelConfig("alibi", 64, 1, 256, 64, 4, 4, 64, 4096, positions="alibi")


def bfloat16_error(backend: AttentionBackend) -> float:
    """The error of attention with ALiBi at the end of a long text, relative to float64 on equal
    inputs."""
    torch.manual_seed(0)
    length, heads, size = 3000, ALIBI.num_heads, ALIBI.head_dim
    drawn = torch.randn(1, length + 1, 3 * heads, size).bfloat16()
    slopes = alibi_slopes(ALIBI)
    place = alibi(torch.arange(length + 1)[None], slopes, ALIBI.cached_head_dim)
    q, k, v = place(drawn, heads, heads)
    model = Transformer(ALIBI).bfloat16()
    runner = make_runner(model, 1, length + 1, backend)
    runner.allocate(0)
    slots = runner.cache.slots(torch.tensor([0]), torch.arange(length)[None])
    runner.cache.write(0, slots, k[:, :length], v[:, :length])
    runner.cache.advance([0], length)
    view = make_view(runner.cache, [0], FullKV(), 1)
    backend.plan(view)
    out = backend.run(0, q[:, length:], k[:, length:], v[:, length:], view)[0, 0, :, :size]
    queries, keys, values = (t.double() for t in drawn[0].split(heads, dim=1))
    scores = torch.einsum("hd,shd->hs", queries[-1], keys) / size**0.5
    scores = scores + slopes.double()[:, None] * torch.arange(length + 1)
    expected = torch.einsum("hs,shd->hd", scores.softmax(-1), values)
    return float((out.double() - expected).abs().max())


def test_the_error_of_alibi_in_bfloat16() -> None:
    """Positions are exact, and slopes, powers of two here, nearly exact. The grouped backend rounds
    the scores, so that neighbouring keys get equal scores; such a run is refused."""
    assert bfloat16_error(NativeBackend()) < 0.05
    assert bfloat16_error(NativeBackend(portable=True)) < 0.05
    assert bfloat16_error(SDPABackend()) < 0.05
    assert bfloat16_error(GroupedBackend()) > 0.3


def test_scores_fall_with_the_distance_at_multiples_of_256() -> None:
    """With q and k zero, a score is the slope times the key's position, on both sides of every
    multiple of 256."""
    slopes = alibi_slopes(ALIBI)
    heads, length = ALIBI.num_heads, 2000
    place = alibi(torch.arange(length)[None], slopes, ALIBI.cached_head_dim)
    q, k, _ = place(torch.zeros(1, length, 3 * heads, ALIBI.head_dim), heads, heads)
    scores = torch.einsum("hd,shd->hs", q[0, -1], k[0]) / ALIBI.cached_head_dim**0.5
    expected = slopes[:, None] * torch.arange(length)
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-6)


@pytest.mark.parametrize("num_heads", [1, 2, 6, 8, 12, 32, 40, 112])
def test_alibi_slopes_equal_those_of_bloom(num_heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)[:, 0, 1]
    config = ModelConfig("b", 9, 1, num_heads * 8, 9, num_heads, num_heads, 8, 9, positions="alibi")
    torch.testing.assert_close(alibi_slopes(config), theirs, atol=1e-6, rtol=1e-5)
