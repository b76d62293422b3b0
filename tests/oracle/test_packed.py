"""Packed linear layers compared with torch's, alone and in a model. In bfloat16, verification must
compute the same bits as decoding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    TINY,
    decode_both,
    make_requests,
    make_runner,
    pack,
    random_prompts,
    tiny_transformer,
)
from torch import Tensor

from magicdec.attention.native import NativeBackend, has_bfloat16_path
from magicdec.config.sections import KVSection
from magicdec.cost_model.roofline import weight_bytes
from magicdec.model.linear import packed
from magicdec.model.linear.packed import PackedLinear
from magicdec.model.transformer import Transformer

pytestmark = pytest.mark.skipif(not has_bfloat16_path(), reason="no AVX512-BF16")
BF16 = torch.bfloat16
NO_AMX = ("-U__AMX_BF16__",)  # compiled as for a CPU without tile registers
EVERYTHING = replace(TINY, qkv_bias=True, output_bias=True, mlp_bias=True)


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 17, 48, 50, 200])
@pytest.mark.parametrize("shape", [(64, 2), (1, 32), (97, 48), (130, 67), (256, 704)])
@pytest.mark.parametrize("flags", [(), NO_AMX], ids=["any", "dot products"])
def test_packed_equals_torch_and_a_row_keeps_its_bits(
    flags: tuple[str, ...], shape: tuple[int, int], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = packed.library(*flags)
    monkeypatch.setattr(packed, "library", lambda: found)
    torch.manual_seed(0)
    weight, bias = torch.randn(shape).to(BF16), torch.randn(shape[0]).to(BF16)
    x = torch.randn(rows, shape[1]).to(BF16)
    for b in (None, bias):
        linear = PackedLinear(weight, b)
        out = linear(x)
        expected = F.linear(x.double(), weight.double(), None if b is None else b.double())
        assert (out.double() - expected).abs().max() <= expected.abs().max() * 2**-7
        assert torch.equal(linear(x[-1:])[0], out[-1])
    assert torch.equal(PackedLinear(weight, bias, adds_bias=False)(x), PackedLinear(weight)(x))


@pytest.mark.parametrize("flags", [(), NO_AMX], ids=["any", "dot products"])
@pytest.mark.parametrize("shape", [(64, 32), (97, 96), (130, 66), (256, 704)])
def test_a_prefill_equals_torch_too(
    shape: tuple[int, int], flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tile registers, if this CPU has them, and without. The last rows fill no register."""
    found = packed.library(*flags)
    monkeypatch.setattr(packed, "library", lambda: found)
    torch.manual_seed(0)
    weight, bias = torch.randn(shape).to(BF16), torch.randn(shape[0]).to(BF16)
    for rows, tokens in ((1, 32), (3, 43), (2, 80)):
        x = torch.randn(rows, tokens, shape[1]).to(BF16)
        out, expected = (
            PackedLinear(weight, bias)(x),
            F.linear(*map(Tensor.double, (x, weight, bias))),
        )
        assert (out.double() - expected).abs().max() <= expected.abs().max() * 2**-7


def test_packed_refuses_what_it_cannot_hold() -> None:
    with pytest.raises(ValueError, match="--linear packed needs bfloat16 or float32 weights, not"):
        PackedLinear(torch.randn(4, 4).half())


@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_model_is_the_same_model(tied: bool) -> None:
    """It rounds at other points than torch's operators, so both are compared with float32."""
    config = replace(EVERYTHING, tie_word_embeddings=tied)
    tokens = torch.tensor(random_prompts([40], config.vocab_size))
    logits = []
    for prepare in (lambda m: m.float(), lambda m: m, pack):
        runner = make_runner(prepare(tiny_transformer(config, dtype=BF16)), 1, 40)
        runner.cache.allocate(0, 40)
        logits.append(runner.forward(tokens, [0]).float())
    torchs, packeds = ((found - logits[0]).square().mean().sqrt() for found in logits[1:])
    assert packeds < 1.2 * torchs < 0.02 * logits[0].abs().max()


@pytest.mark.narrow("pairs")
@pytest.mark.parametrize("heads", [6, 3, 1])
@pytest.mark.parametrize("policy", ["streaming_llm", "verified"])
@pytest.mark.parametrize("budget", [17, 33, 60, 5000])
def test_speculation_in_bfloat16_emits_the_baseline_tokens(
    budget: int, policy: str, heads: int
) -> None:
    """The tokens are equal, without any tie to settle."""
    config = replace(EVERYTHING, num_kv_heads=heads)
    model = pack(tiny_transformer(config, dtype=BF16))
    lengths = [5, 70, 1, 33]
    runner = make_runner(model, len(lengths), 70 + 60 + 4, NativeBackend())
    requests = make_requests(random_prompts(lengths, config.vocab_size), 60)
    baseline, ours, accepted = decode_both(runner, requests, KVSection(policy, budget, 16), 4)
    assert ours == baseline
    assert all(a == 4 for step in accepted for a in step) == (budget == 5000)


def test_packing_leaves_the_bytes_of_the_weights_as_they_are() -> None:
    """Packing fills up the last block of 64 channels with zeros: they are stored, but not counted
    as weights that a forward must read. A vocabulary of 100 does not fill its last block."""
    model = tiny_transformer(replace(TINY, vocab_size=100), dtype=BF16)
    plain, stored = weight_bytes(model), stored_bytes(model)
    pack(model)
    assert weight_bytes(model) == plain
    assert stored_bytes(model) > stored


def stored_bytes(model: Transformer) -> int:
    return sum(p.nbytes for p in model.parameters())


def test_the_kernels_trace() -> None:
    """Under torch.compile both kernels are called through `torch.library`, with equal results."""
    torch.manual_seed(0)
    linear, x = PackedLinear(torch.randn(96, 64).to(BF16)), torch.randn(3, 64).to(BF16)
    traced = torch.compile(lambda t: linear(t) * 2, fullgraph=True, backend="eager")
    assert torch.equal(traced(x), linear(x) * 2)
    heads, size = (2, 3, 2, 64), 16
    q, k, v = (torch.randn(heads).to(BF16) for _ in range(3))
    k_pool, v_pool = (torch.zeros(2, 2, size, 64, dtype=BF16) for _ in range(2))
    table, rows = torch.tensor([[0], [1]]), torch.tensor([0, 1])
    lengths, ranges = torch.tensor([0, 0]), torch.tensor([[[[0, 3]]], [[[0, 3]]]])
    arguments = (q, k, v, k_pool, v_pool, table, rows, lengths, ranges, 0, False)
    torch.library.opcheck(
        torch.ops.magicdec.native_attention.default,
        arguments,
        test_utils=("test_schema", "test_faketensor"),
    )
