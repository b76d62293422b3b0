"""Packed linear layers in bfloat16, float32 and int8, and plain ones in int8: compared with float64
alone and in a model, and lossless decoding with them. In bfloat16, verification must compute the
same bits as decoding."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, make_runner, pack, random_prompts, tiny_transformer
from lossless import speculate
from torch import Tensor, nn

from magicdec.attention.native import NativeBackend
from magicdec.bench.run.roofline import weight_bytes
from magicdec.bench.run.run import Run
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import KVSection, ModelSection, ParallelSection, WorkloadSection
from magicdec.distributed.groups import Launch
from magicdec.model.checkpoint.quantization import channel_scales, quantize, quantize_groups
from magicdec.model.checkpoint.weight_map import untie_head
from magicdec.model.config import ModelConfig
from magicdec.model.linear import packed
from magicdec.model.linear.grouped import GroupedNumbers
from magicdec.model.linear.packed import (
    INT4_FORMAT,
    Int8Linear,
    PackedLinear,
    PartialLinear,
    library,
)
from magicdec.model.linear.packed import pack as pack_layer
from magicdec.model.transformer import Transformer
from magicdec.output.console import make_progress
from magicdec.setup.prepare import prepare
from magicdec.setup.session import RankSession

pytestmark = pytest.mark.two_threads

F32, BF16 = torch.float32, torch.bfloat16
NO_AMX = ("-U__AMX_BF16__",)  # compiled as for a CPU without tile registers
NO_VNNI = ("-mno-avx512vnni",)
AVX2, AVX512 = ("-march=x86-64-v3",), ("-march=x86-64-v4",)  # without dot products for bfloat16
EVERYTHING = replace(TINY, qkv_bias=True, output_bias=True, mlp_bias=True)
PARALLEL = replace(EVERYTHING, residual="parallel", gated_mlp=False)
CONFIGS = {"plain": TINY, "biases": EVERYTHING, "parallel": PARALLEL}
CONFIGS["tied"] = replace(EVERYTHING, tie_word_embeddings=True)


def layer(weight: Tensor, bias: Tensor | None = None, partial: bool = False) -> Int8Linear:
    """A layer with `weight` quantised and `bias` unchanged."""
    kind = PartialLinear if partial else nn.Linear
    like = kind(weight.shape[1], weight.shape[0], bias=bias is not None)
    if bias is not None:
        like.bias = nn.Parameter(bias, requires_grad=False)
    scales = channel_scales(weight)
    return Int8Linear(quantize(weight, scales.unsqueeze(1)), scales, like.bias, not partial)


def exact(linear: Int8Linear, x: Tensor, bias: Tensor | None = None) -> Tensor:
    weight = linear.weight.double() * linear.scale.double().unsqueeze(1)
    return F.linear(x.double(), weight, None if bias is None else bias.double())


@pytest.mark.parametrize("shape", [(1, 32), (97, 48), (130, 67), (300, 4096)])
@pytest.mark.parametrize(("dtype", "bound"), [(F32, 2**-18), (BF16, 2**-6), (torch.float64, 1e-12)])
def test_the_plain_layer(
    shape: tuple[int, int], dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "CONVERTED", 1 << 15)  # several parts
    torch.manual_seed(0)
    weight, bias = torch.randn(shape), torch.randn(shape[0]).to(dtype)
    x = torch.randn(2, 3, shape[1]).to(dtype)
    for b in (None, bias):
        linear = layer(weight, b)
        expected = exact(linear, x, b)
        assert linear(x).dtype == dtype
        assert (linear(x).double() - expected).abs().max() <= expected.abs().max() * bound
    assert torch.equal(layer(weight, bias, partial=True)(x), layer(weight)(x))


KINDS = [
    pytest.param(BF16, (), id="bfloat16"),
    pytest.param(BF16, NO_AMX, id="bfloat16, dot products"),
    pytest.param(BF16, AVX2, id="bfloat16, AVX2"),
    pytest.param(BF16, AVX512, id="bfloat16, AVX-512"),
    pytest.param(torch.int8, (), id="int8"),
    pytest.param(torch.int8, NO_AMX, id="int8, no tiles"),
    pytest.param(torch.int8, NO_VNNI, id="int8, no VNNI"),
    pytest.param(torch.int8, AVX2, id="int8, AVX2"),
    pytest.param(torch.int8, AVX512, id="int8, AVX-512"),
    pytest.param(F32, (), id="float32"),
    pytest.param(F32, AVX2, id="float32, AVX2"),
]


@pytest.mark.narrow("pairs")
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 8, 12, 13, 17, 20, 48, 50, 200])
@pytest.mark.parametrize("shape", [(64, 2), (1, 32), (33, 64), (97, 48), (130, 67), (256, 704)])
@pytest.mark.parametrize(("kind", "flags"), KINDS)
def test_a_packed_layer_multiplies_and_a_row_keeps_its_bits(
    kind: torch.dtype, flags: tuple[str, ...], shape: tuple[int, int], rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    found = library(*flags)
    monkeypatch.setattr(packed, "library", lambda: found)
    torch.manual_seed(0)
    dtype = F32 if kind == F32 else BF16
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    x = torch.randn(rows, shape[1]).to(dtype)

    def make(bias: Tensor | None, partial: bool = False) -> nn.Module:
        if kind == torch.int8:
            return pack_layer(layer(weight.float(), bias, partial))
        return PackedLinear(weight, bias, adds_bias=not partial)

    for b in (None, bias):
        expected = F.linear(x.double(), weight.double(), None if b is None else b.double())
        if kind == torch.int8:
            expected = exact(layer(weight.float(), b), x, b)
        linear = make(b)
        out = linear(x)
        bound = 2**-18 if kind == F32 else 2**-7
        assert (out.double() - expected).abs().max() <= expected.abs().max() * bound
        assert torch.equal(linear(x[-1:])[0], out[-1])
        assert torch.equal(linear(x[rows // 2 :]), out[rows // 2 :])
    assert torch.equal(make(bias, partial=True)(x), make(None)(x))


@pytest.mark.parametrize("flags", [(), NO_AMX, AVX2, AVX512], ids=["any", "dots", "AVX2", "512"])
@pytest.mark.parametrize("shape", [(64, 32), (97, 96), (130, 66), (256, 704)])
def test_a_prefill_equals_torch_too(
    shape: tuple[int, int], flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tile registers, if this CPU has them, and without. The last rows fill no register."""
    found = library(*flags)
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


def every_weight(rows: int = 130) -> Int8Linear:
    """All 255 values, at every position of a block."""
    made = layer(torch.randn(rows, 510))
    values = torch.arange(510).remainder(255) - 127
    made.weight.copy_(torch.stack([values.roll(3 * i) for i in range(rows)]).to(torch.int8))
    return made


def test_every_weight_is_widened_exactly() -> None:
    """With one nonzero input the result is the weight itself, which bfloat16 represents exactly."""
    linear = every_weight()
    linear.scale.fill_(1.0)
    out = pack_layer(linear)(torch.eye(510).to(BF16))
    assert torch.equal(out.T.float(), linear.weight.float())


@pytest.mark.parametrize("flags", [NO_AMX, NO_VNNI, AVX2, AVX512], ids=str)
def test_every_cpu_computes_the_same_bits_in_int8(
    flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums over a group are exact integers. Inputs differ by many orders of magnitude, weights
    are extreme, and a row has a group of zeros."""
    torch.manual_seed(0)
    x = (torch.randn(20, 510) * 10.0 ** torch.randint(-6, 7, (20, 510))).to(BF16)
    x[1], x[2, :256] = x[1].abs().max(), 0.0
    linear = every_weight()
    linear.weight[3:5] = torch.tensor([[127], [-127]])
    ours = pack_layer(linear)
    expected = ours(x)
    error = (expected.double() - exact(linear, x)).abs() / exact(linear, x.abs()).abs().amax(
        1, True
    )
    assert error.max() < 2**-8
    other = library(*flags)
    monkeypatch.setattr(packed, "library", lambda: other)
    assert torch.equal(pack_layer(linear)(x), expected)
    assert torch.equal(ours.packed, pack_layer(linear).packed)


def test_int8_layers_round_activations_more_finely_than_bfloat16() -> None:
    """In float64 with activations that are not rounded; the result is rounded to bfloat16 once."""
    torch.manual_seed(0)
    x, linear = torch.randn(64, 2048).to(BF16), layer(torch.randn(64, 2048))
    error = pack_layer(linear)(x).double() - exact(linear, x)
    once = exact(linear, x).to(BF16).double() - exact(linear, x)
    assert error.square().mean() < 1.001 * once.square().mean()


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


def logits(model: Transformer) -> Tensor:
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
    narrow, wide = int8_twins(config, BF16)
    pack(narrow)
    assert any(isinstance(m, PackedLinear) and m.scale is not None for m in narrow.modules())
    expected = logits(wide)
    assert (logits(narrow) - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_model_is_the_same_model(tied: bool) -> None:
    """It rounds at other points than torch's operators, so both are compared with float32."""
    config = replace(EVERYTHING, tie_word_embeddings=tied)
    tokens = torch.tensor(random_prompts([40], config.vocab_size))
    logits = []
    for convert in (lambda m: m.float(), lambda m: m, pack):
        runner = make_runner(convert(tiny_transformer(config, dtype=BF16)), 1, 40)
        runner.cache.allocate(0, 40)
        logits.append(runner.forward(tokens, [0]).float())
    torchs, packeds = ((found - logits[0]).square().mean().sqrt() for found in logits[1:])
    assert packeds < 1.2 * torchs < 0.02 * logits[0].abs().max()


@pytest.mark.narrow("pairs")
@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("heads", [6, 3, 1])
@pytest.mark.parametrize("policy", ["streaming_llm", "verified"])
@pytest.mark.parametrize("budget", [17, 33, 60, 5000])
def test_speculation_in_bfloat16_emits_the_baseline_tokens(
    budget: int, policy: str, heads: int, is_int8: bool
) -> None:
    """The tokens are equal, without any tie to settle. GEMMs have 1 to 20 rows, which covers the
    kernels for few and for many rows."""
    config = replace(EVERYTHING, num_kv_heads=heads)
    model = int8_twins(config, BF16)[0] if is_int8 else tiny_transformer(config, dtype=BF16)
    found = speculate(pack(model), KVSection(policy, budget, 16), backend=NativeBackend)
    assert found.accepts_all == (budget == 5000)


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


def test_packing_leaves_the_bytes_of_the_weights_as_they_are() -> None:
    """Packing fills up the last block of 64 channels with zeros: they are stored, but not counted
    as weights that a forward must read. A vocabulary of 100 does not fill its last block. Without
    padding, int8 weights are charged by the byte."""
    padded = tiny_transformer(replace(TINY, vocab_size=100), dtype=BF16)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64}
    fitting, _ = int8_twins(replace(TINY, num_heads=4, num_kv_heads=4, **sizes), BF16)
    for model, is_padded in ((padded, True), (fitting, False)):
        plain, stored = weight_bytes(model), stored_bytes(model)
        pack(model)
        assert weight_bytes(model) == plain
        assert not is_padded or stored_bytes(model) > stored


def stored_bytes(model: Transformer) -> int:
    return sum(p.nbytes for p in model.parameters())


SOURCE = Path(__file__).with_name("kernels_on_stdin.cpp")
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
needs_emulator = pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR)),
    reason="on Debian: apt install g++-aarch64-linux-gnu qemu-user",
)


def as_bytes(*tensors: Tensor) -> bytes:
    return b"".join(bytes(tensor.contiguous().view(torch.uint8).numpy()) for tensor in tensors)


@needs_emulator
def test_linear_layers_and_attention_equal_torch(tmp_path: Path) -> None:
    program = tmp_path / "kernels"
    flags = ("-std=c++20", "-O3", "-fopenmp", "-static", "-DHEAD_SIZE=64")
    subprocess.run([COMPILER, *flags, str(SOURCE), "-o", str(program)], check=True)
    torch.manual_seed(0)
    num_rows, out, width = 13, 100, 130
    x, weight, bias = (
        torch.randn(*s).bfloat16() for s in ((num_rows, width), (out, width), (out,))
    )
    small, scale = torch.randint(-127, 128, (out, width), dtype=torch.int8), torch.rand(out) / 50
    length, heads, kv_heads = 333, 6, 2
    q = torch.randn(length, heads, 64).bfloat16()
    k, v = torch.randn(2, length, kv_heads, 64).bfloat16()
    numbers4, scales4 = quantize_groups(torch.randn(out, 128))
    sent = as_bytes(
        torch.tensor([num_rows, out, width]), x, weight, bias, small, scale, numbers4, scales4,
        torch.tensor([length, heads, kv_heads]), q, k, v,
    )  # fmt: skip
    command = [EMULATOR, str(program)]
    done = subprocess.run(command, input=sent, capture_output=True, check=True, timeout=300)
    numbers = torch.frombuffer(bytearray(done.stdout), dtype=torch.bfloat16)
    sizes = [num_rows * out] * 4 + [q.numel()]
    linear, linear_small, linear4, exact4, mixed = numbers.split(sizes)
    grouped = GroupedNumbers(INT4_FORMAT, numbers4, scales4, None)
    some = x.flatten()[: num_rows * 128].view(-1, 128)
    ours = PackedLinear(grouped, bias, rounds=True)(some)
    assert torch.equal(linear4.view(ours.shape), ours)  # integers: the bits of any CPU
    assert torch.equal(exact4.view(ours.shape), PackedLinear(grouped, bias)(some))
    wide = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(linear.view(wide.shape).double(), wide, rtol=0.01, atol=0.01)
    wide = x.double() @ (small.double() * scale.double().unsqueeze(1)).T + bias.double()
    torch.testing.assert_close(linear_small.view(wide.shape).double(), wide, rtol=0.01, atol=0.01)
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(each.double().transpose(0, 1) for each in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(0, 1)  # fmt: skip
    torch.testing.assert_close(mixed.view(exact.shape).double(), exact, rtol=0.02, atol=0.01)
