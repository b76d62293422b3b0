"""ALiBi in extra dimensions of q and k: its error in bfloat16, at the end of a long text.
`test_families.py` tests the logits of every backend."""

from __future__ import annotations

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
    assert bfloat16_error(NativeBackend(is_widened=True)) < 0.05
    assert bfloat16_error(SDPABackend()) < 0.05
    assert bfloat16_error(GroupedBackend()) > 0.3
