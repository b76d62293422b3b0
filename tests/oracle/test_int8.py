"""int8 layers compared with float64, whole models compared with the same model with dequantised
weights, and lossless decoding with int8 weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    TINY,
    decode_both,
    make_draft,
    make_requests,
    make_runner,
    pack,
    random_prompts,
    tiny_transformer,
)
from torch import nn

from magicdec.attention.native import NativeBackend, has_bfloat16_path
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import KVSection, ModelSection, ParallelSection, WorkloadSection
from magicdec.console import make_progress
from magicdec.cost_model.roofline import weight_bytes
from magicdec.distributed.groups import Launch
from magicdec.model.checkpoint.quantization import channel_scales, quantize
from magicdec.model.checkpoint.weight_map import untie_head
from magicdec.model.config import ModelConfig
from magicdec.model.linear import packed as packed_linear
from magicdec.model.linear.packed import Int8Linear, Linear, PackedLinear, PartialLinear, library
from magicdec.model.linear.packed import pack as pack_layer
from magicdec.model.transformer import Transformer
from magicdec.run.run import Run
from magicdec.setup.prepare import prepare
from magicdec.setup.session import RankSession

needs_kernel = pytest.mark.skipif(not has_bfloat16_path(), reason="no AVX512-BF16")
F32, BF16 = torch.float32, torch.bfloat16
EVERYTHING = replace(TINY, qkv_bias=True, output_bias=True, mlp_bias=True)
PARALLEL = replace(EVERYTHING, residual="parallel", gated_mlp=False)
CONFIGS = {"plain": TINY, "biases": EVERYTHING, "parallel": PARALLEL}
CONFIGS["tied"] = replace(EVERYTHING, tie_word_embeddings=True)
LENGTHS = [5, 70, 1, 33]


def layer(
    weight: torch.Tensor, bias: torch.Tensor | None = None, partial: bool = False
) -> Int8Linear:
    """A layer with `weight` quantised and `bias` unchanged."""
    kind = PartialLinear if partial else nn.Linear
    like = kind(weight.shape[1], weight.shape[0], bias=bias is not None)
    if bias is not None:
        like.bias = nn.Parameter(bias, requires_grad=False)
    made, scales = Int8Linear(like, adds_bias=not partial), channel_scales(weight)
    made.weight.copy_(quantize(weight, scales.unsqueeze(1)))
    made.scale.copy_(scales)
    return made


def exact(linear: Int8Linear, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    weight = linear.weight.double() * linear.scale.double().unsqueeze(1)
    return F.linear(x.double(), weight, None if bias is None else bias.double())


@pytest.mark.parametrize("shape", [(1, 32), (97, 48), (130, 67), (300, 4096)])
@pytest.mark.parametrize(("dtype", "bound"), [(F32, 2**-18), (BF16, 2**-6), (torch.float64, 1e-12)])
def test_the_plain_layer(
    shape: tuple[int, int], dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_linear, "CONVERTED", 1 << 15)  # several parts
    torch.manual_seed(0)
    weight, bias = torch.randn(shape), torch.randn(shape[0]).to(dtype)
    x = torch.randn(2, 3, shape[1]).to(dtype)
    for b in (None, bias):
        linear = layer(weight, b)
        expected = exact(linear, x, b)
        assert linear(x).dtype == dtype
        assert (linear(x).double() - expected).abs().max() <= expected.abs().max() * bound
    assert torch.equal(layer(weight, bias, partial=True)(x), layer(weight)(x))


@needs_kernel
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 8, 12, 13, 20, 48, 50, 200])
@pytest.mark.parametrize("shape", [(64, 2), (1, 32), (33, 64), (97, 48), (130, 67), (256, 704)])
def test_the_kernel_and_a_row_keeps_its_bits(shape: tuple[int, int], rows: int) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(shape), torch.randn(shape[0]).to(BF16)
    x = torch.randn(rows, shape[1]).to(BF16)
    for b in (None, bias):
        plain = layer(weight, b)
        packed = pack_layer(plain)
        out, expected = packed(x), exact(plain, x, b)
        assert (out.double() - expected).abs().max() <= expected.abs().max() * 2**-7
        assert torch.equal(packed(x[-1:])[0], out[-1])
        assert torch.equal(packed(x[rows // 2 :]), out[rows // 2 :])
    assert torch.equal(pack_layer(layer(weight, bias, partial=True))(x), packed_of(weight)(x))


def packed_of(weight: torch.Tensor) -> Linear:
    return pack_layer(layer(weight))


def every_weight(rows: int = 130) -> Int8Linear:
    """All 255 values, at every position of a block."""
    made = layer(torch.randn(rows, 510))
    values = torch.arange(510).remainder(255) - 127
    made.weight.copy_(torch.stack([values.roll(3 * i) for i in range(rows)]).to(torch.int8))
    return made


@needs_kernel
def test_every_weight_is_widened_exactly() -> None:
    """With one nonzero input the result is the weight itself, which bfloat16 represents exactly."""
    linear = every_weight()
    linear.scale.fill_(1.0)
    out = pack_layer(linear)(torch.eye(510).to(BF16))
    assert torch.equal(out.T.float(), linear.weight.float())


@needs_kernel
def test_without_byte_permutations_the_bits_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs with bfloat16 dot products but no AVX512-VBMI convert with other instructions."""
    x, packed = torch.randn(20, 510).to(BF16), pack_layer(every_weight())
    expected = [packed(x), packed(x[:3])]
    other = library("-mno-avx512vbmi")
    assert other._name != library()._name
    monkeypatch.setattr(packed_linear, "library", lambda: other)
    assert all(torch.equal(packed(x[: len(e)]), e) for e in expected)


@needs_kernel
def test_the_kernel_traces() -> None:
    linear, x = pack_layer(layer(torch.randn(96, 64))), torch.randn(3, 64).to(BF16)
    traced = torch.compile(lambda t: linear(t) * 2, fullgraph=True, backend="eager")
    assert torch.equal(traced(x), linear(x) * 2)


def int8_twins(
    config: ModelConfig, dtype: torch.dtype, seed: int = 0
) -> tuple[Transformer, Transformer]:
    """(int8, the same weights dequantised, in float32)."""
    config = untie_head(config)
    model, twin = Transformer(config), tiny_transformer(config, seed)
    plain = {n: p.to(dtype) for n, p in twin.named_parameters()}
    model.to(dtype).to_int8()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in plain and parameter.dtype == dtype:
                parameter.copy_(plain[name])
        twin.load_state_dict(plain)  # rounded to `dtype`, as in `model`
        source = tiny_transformer(config, seed).state_dict()
        for name, module in model.named_modules():
            if isinstance(module, Int8Linear):
                weight = source[f"{name}.weight"]
                scales = channel_scales(weight)
                module.scale.copy_(scales)
                module.weight.copy_(quantize(weight, scales.unsqueeze(1)))
                twin.get_submodule(name).weight.copy_(module.weight * scales.unsqueeze(1))
    return model.requires_grad_(False).eval(), twin.requires_grad_(False).eval()


def logits(model: Transformer) -> torch.Tensor:
    tokens = torch.tensor(random_prompts([40], model.config.vocab_size))
    runner = make_runner(model, 1, 40)
    runner.cache.allocate(0, 40)
    return runner.forward(tokens, [0]).float()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_logits_are_those_of_the_dequantised_weights(config: ModelConfig) -> None:
    model, twin = int8_twins(config, F32)
    expected = logits(twin)
    assert (logits(model) - expected).abs().max() < 1e-4
    unquantised = logits(tiny_transformer(untie_head(config)))
    assert (unquantised - expected).abs().max() > 1e-3  # quantising did change it
    if has_bfloat16_path():
        narrow, wide = int8_twins(config, BF16)
        pack(narrow)
        assert any(isinstance(m, PackedLinear) and m.scale is not None for m in narrow.modules())
        expected = logits(wide)
        assert (logits(narrow) - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("policy", ["streaming_llm", "snapkv", "verified"])
@pytest.mark.parametrize("config", [TINY, PARALLEL], ids=["plain", "parallel"])
def test_speculation_with_an_int8_target_is_lossless(policy: str, config: ModelConfig) -> None:
    model, _ = int8_twins(config, F32)
    runner = make_runner(model, len(LENGTHS), 70 + 40 + 4, NativeBackend())
    requests = make_requests(random_prompts(LENGTHS, config.vocab_size), 40)
    kv = KVSection(policy, 33, 16, window_size=8)
    baseline, ours, accepted = decode_both(runner, requests, kv, 4)
    assert ours == baseline and any(a < 4 for step in accepted for a in step)


@needs_kernel
@pytest.mark.parametrize("policy", ["streaming_llm", "verified"])
@pytest.mark.parametrize("budget", [33, 5000])
def test_in_bfloat16_too_and_exactly(budget: int, policy: str) -> None:
    """GEMMs with 1 to 20 rows, which covers the kernels for few and for many rows."""
    model, _ = int8_twins(EVERYTHING, BF16)
    pack(model)
    runner = make_runner(model, len(LENGTHS), 70 + 60 + 4, NativeBackend())
    requests = make_requests(random_prompts(LENGTHS, TINY.vocab_size), 60)
    baseline, ours, accepted = decode_both(runner, requests, KVSection(policy, budget, 16), 4)
    assert ours == baseline
    assert all(a == 4 for step in accepted for a in step) == (budget == 5000)


@pytest.mark.parametrize("kv", [KVSection("full"), KVSection("streaming_llm", 40, 4)], ids=str)
@pytest.mark.parametrize("is_int8_target", [False, True])
def test_an_int8_draft(kv: KVSection, is_int8_target: bool) -> None:
    """The draft has the target's weights in int8. Most drafts are accepted, and the output is the
    same."""
    target = tiny_transformer()
    draft, _ = int8_twins(TINY, F32)
    if is_int8_target:
        target, _ = int8_twins(TINY, F32)
    runner = make_runner(target, len(LENGTHS), 70 + 40 + 4)
    requests = make_requests(random_prompts(LENGTHS, TINY.vocab_size), 40)
    drafter = make_draft(draft, kv, len(LENGTHS), 70 + 40 + 4)
    baseline, ours, accepted = decode_both(runner, requests, kv, 4, drafter="model", draft=drafter)
    assert ours == baseline
    flat = [a for step in accepted for a in step]
    if kv.policy == "full":
        assert all(a == 4 for a in flat) if is_int8_target else sum(flat) > 2 * len(flat)


def test_differences_are_settled_by_the_same_weights() -> None:
    """The check in a wider dtype uses wider activations and the same int8 weights."""
    alone = Launch(0, 1, 0, 1)
    config = RunConfig(
        model=ModelSection("demo", "float32", target_dtype="int8"),
        parallel=ParallelSection(device="cpu", threads=1),
        workload=WorkloadSection(batch_size=1, prefix_len=20, gen_len=4, num_batches=1),
    )
    prepared = prepare(config, alone)
    with RankSession(alone, prepared.config.parallel) as session:
        run = Run(prepared, session, make_progress(False))
    wider = run.make_reference().model.state_dict()
    for name, tensor in run.runner.model.state_dict().items():
        kept = name.endswith(".scale") or tensor.dtype == torch.int8
        assert wider[name].dtype == (tensor.dtype if kept else torch.float64)
        assert torch.equal(wider[name].to(tensor.dtype), tensor)
    assert wider["blocks.0.mlp.down.weight"].dtype == torch.int8


@needs_kernel
def test_packed_int8_weights_are_charged_by_the_byte() -> None:
    config = replace(TINY, vocab_size=128, hidden_size=64, num_heads=4, num_kv_heads=4,
        intermediate_size=64)  # fmt: skip
    model, _ = int8_twins(config, BF16)
    plain = weight_bytes(model)
    pack(model)
    assert weight_bytes(model) == plain  # sizes that need no padding
