"""Sink logits in the softmax of every backend that computes them, against attention in float64."""

from dataclasses import replace

import pytest
import torch
from attention_cases import (
    BACKENDS,
    DTYPES,
    TOLERANCE,
    BackendCase,
    cases,
    device_of,
    exact_attention,
    fill,
    make_case,
)
from conftest import TINY, tiny_transformer
from torch import Tensor

from magicdec.attention.backend import AttentionBackend
from magicdec.attention.native import NativeBackend
from magicdec.config.capabilities import list_backends
from magicdec.distributed.groups import Group
from magicdec.kv.view import Visible, make_view
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.native_steps.executor import Executor
from magicdec.speculation.observation import received_weights
from magicdec.speculation.policies.policy import FullKV
from magicdec.speculation.policies.streaming_llm import StreamingLLM

pytestmark = pytest.mark.two_threads

WITHOUT = list_backends(lambda c: not (c.keeps_sinks and c.returns_weights))
HEADS = [(6, 2, 16), (8, 1, 64)]
POLICIES: list[Visible] = [FullKV(), StreamingLLM(4, 11)]
# Small, large and dominating ones: the last head's keys have hardly any weight.
LOGITS = (-30.0, 0.3, 2.1, 12.0)


def with_sinks(backend: AttentionBackend, num_heads: int, dtype: torch.dtype) -> Tensor:
    """Gives the backend sink logits of two layers, of which the first must not matter. Returns
    those of the other, as they are stored in `dtype`."""
    spread = torch.tensor(LOGITS).repeat(num_heads)[:num_heads]
    sinks = (spread + torch.rand(num_heads)).to(dtype).float().to(device_of(backend))
    backend.sinks = torch.stack([torch.full_like(sinks, 50.0), sinks])
    return sinks


def errors(
    case: BackendCase, sinks: Tensor, out: Tensor, mass: Tensor, window: int | None
) -> list[float]:
    """The largest errors of outputs and of weights, by row."""
    k, v = case.read()
    found = []
    for i, keys in enumerate(case.view.key_positions()[:, 0].tolist()):
        row = case.view.rows[i]
        seen = [s for s in keys if s >= 0]
        length = case.view.lengths[i]
        blocks = case.view.num_weight_blocks
        exact = exact_attention(case.q[i], k[row], v[row], seen, length, window, blocks, sinks)
        weights_error = (mass[i].double() - exact.mass).abs().max() / case.view.num_new
        found += [float((out[i].double() - exact.out).abs().max()), float(weights_error)]
    return found


@pytest.mark.narrow("pairs", "pairs")
@pytest.mark.parametrize(
    ("name", "heads", "policy", "window", "dtype"),
    cases(HEADS, POLICIES, [None, 21], DTYPES, without=WITHOUT),
    ids=str,
)
def test_a_backend_equals_attention_written_out(
    name: str, heads: tuple[int, int, int], policy: Visible, window: int | None, dtype: torch.dtype
) -> None:
    """Decoding, verification, and prefill, in which a sink takes weight from as few as one key."""
    torch.manual_seed(0)
    for num_new, rows in ((1, [0, 1, 2, 3]), (5, [2, 0, 1]), (40, [2]), (33, [0, 3])):
        backend = BACKENDS[name]()
        sinks = with_sinks(backend, heads[0], dtype)
        case = make_case(backend, heads, policy, num_new, rows, dtype, window)
        if num_new > 31:  # nobody watches the weights of so many tokens
            out = case.run(backend)
            mass = torch.zeros(len(rows), heads[1], case.view.num_weight_blocks).to(out.device)
            found = errors(case, sinks, out, mass, window)[::2]
        else:
            out, mass = case.run(backend, "run_with_weights")
            assert torch.equal(out, case.run(backend)), "weights change no bit"
            found = errors(case, sinks, out, mass, window)
        assert max(found) < TOLERANCE[dtype], (num_new, found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_native_gives_a_token_the_same_bits_alone_and_with_others(dtype: torch.dtype) -> None:
    """Also over several pieces of a long row, of whose log-sum-exp the sink is a part once."""
    torch.manual_seed(0)
    backend = NativeBackend()
    cache, k, v = fill(backend, 2, 64, [1300, 63], dtype, 1400)
    sinks = with_sinks(backend, 6, dtype)
    q = torch.randn(2, 5, 6, 64).to(dtype)

    def attend(rows: list[int], first: int, count: int) -> tuple[Tensor, Tensor]:
        view = make_view(cache, rows, FullKV(), count)
        case = BackendCase(view, q[rows, first : first + count], k, v)
        out, lse = case.run(backend, "run_with_lse")
        return out, lse

    out, lse = attend([0, 1], 0, 5)
    for row, length in enumerate((1300, 63)):
        held = slice(length + 5)
        exact = exact_attention(q[row], k[row, held], v[row, held], sinks=sinks)
        assert (out[row].double() - exact.out).abs().max() < TOLERANCE[dtype]
        assert (lse[row].double() - exact.lse).abs().max() < 1e-4
        for t in range(5):
            alone, own = attend([row], t, 1)
            assert torch.equal(alone[0, 0], out[row, t]) and torch.equal(own[0, 0], lse[row, t])
            cache.advance([row], 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_that_keys_receive(dtype: torch.dtype) -> None:
    """SnapKV's scores: from the tiles of the cache, from copied keys, and in float64."""
    torch.manual_seed(0)
    model = tiny_transformer(replace(TINY, num_heads=6, num_kv_heads=2))
    runner = ModelRunner(model.to(dtype), NativeBackend(), Group((0,), 0), 2, 200)
    for row in (1, 0):
        runner.allocate(row)
    runner.cache.k.normal_()
    size = TINY.head_dim
    window = 5
    length = 170
    rows = torch.tensor([1, 0])
    queries = torch.randn(2, window, 6, size).to(dtype)
    sinks = with_sinks(runner.backend, 6, dtype)
    keys = runner.cache.first_keys(1, rows, length)
    native = Executor.received(runner.cache, 1, rows, queries, 0, length, sinks)
    copied = received_weights(runner, queries.float(), keys.float(), sinks)
    for row in (0, 1):
        own = keys[row].transpose(0, 1)
        scores = torch.einsum(
            "thd,shd->hts", queries[row].double(), own.double().repeat_interleave(3, 1)
        )
        scores = scores / size**0.5
        later = torch.ones(window, length, dtype=torch.bool).triu(length - window + 1)
        scores.masked_fill_(later, float("-inf"))
        column = sinks.double()[:, None, None].expand(-1, window, 1)
        weights = torch.cat([scores, column], 2).softmax(2)[..., :length]
        exact = weights.sum(1).unflatten(0, (2, 3)).sum(1)
        assert (native[row].double() - exact).abs().max() < 1e-4
        assert (copied[row].double() - exact).abs().max() < 1e-4
