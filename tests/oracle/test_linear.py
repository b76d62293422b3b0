"""Packed linear layers in bfloat16 and float32, and models with int8 weights: compared with float64
alone and in a model, and lossless decoding with them. In bfloat16, verification must compute the
same bits as decoding."""

import shutil
import subprocess
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from attention_cases import OTHER_TILES
from conftest import TINY, make_runner, pack, random_prompts, tiny_transformer
from lossless import speculate
from torch import Tensor, nn

from magicdec.attention.native import NativeBackend
from magicdec.bench.check.replays import wider_runner
from magicdec.bench.roofline import weight_bytes
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import KVSection, ModelSection, ParallelSection, WorkloadSection
from magicdec.distributed.groups import Launch
from magicdec.model.checkpoint.quantization import low_bit_copy
from magicdec.model.checkpoint.weight_map import untie_head
from magicdec.model.config import ModelConfig
from magicdec.model.linear import packed
from magicdec.model.linear.grouped import GroupedLinear
from magicdec.model.linear.packed import Linear, PackedLinear, PartialLinear, library
from magicdec.model.linear.quantizers import INT4, INT8
from magicdec.model.transformer import Transformer
from magicdec.output.console import Silent
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.setup.prepare import prepare
from magicdec.setup.session import RankSession
from magicdec.systems.prefilled_batching import PrefilledBatching
from magicdec.systems.shared_prefill import SharedPrefill

pytestmark = pytest.mark.two_threads

F32 = torch.float32
BF16 = torch.bfloat16
# Without dot products for bfloat16 and for bytes.
AVX2 = ("-march=x86-64-v3",)
AVX512 = ("-march=x86-64-v4",)
EVERYTHING = replace(TINY, qkv_bias=True, output_bias=True, mlp_bias=True)
PARALLEL = replace(EVERYTHING, residual="parallel", gated_mlp=False)
CONFIGS = {"plain": TINY, "biases": EVERYTHING, "parallel": PARALLEL}
CONFIGS["tied"] = replace(EVERYTHING, tie_word_embeddings=True)


KINDS = [
    pytest.param(BF16, (), id="bfloat16"),
    *(pytest.param(BF16, flags, id="bfloat16, other tiles") for flags in OTHER_TILES),
    pytest.param(BF16, AVX2, id="bfloat16, AVX2"),
    pytest.param(BF16, AVX512, id="bfloat16, AVX-512"),
    pytest.param(F32, (), id="float32"),
    pytest.param(F32, AVX2, id="float32, AVX2"),
]


@pytest.mark.narrow("pairs")
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 8, 12, 13, 17, 20, 48, 50, 200])
@pytest.mark.parametrize("shape", [(64, 2), (1, 32), (33, 64), (97, 48), (130, 67), (256, 704)])
@pytest.mark.parametrize(("dtype", "flags"), KINDS)
def test_a_packed_layer_multiplies_and_a_row_keeps_its_bits(
    dtype: torch.dtype,
    flags: tuple[str, ...],
    shape: tuple[int, int],
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = library(*flags)
    monkeypatch.setattr(packed, "library", lambda: found)
    torch.manual_seed(0)
    weight = torch.randn(shape).to(dtype)
    bias = torch.randn(shape[0]).to(dtype)
    x = torch.randn(rows, shape[1]).to(dtype)

    def make(bias: Tensor | None, partial: bool = False) -> nn.Module:
        return PackedLinear(weight, bias, adds_bias=not partial)

    for b in (None, bias):
        expected = F.linear(x.double(), weight.double(), None if b is None else b.double())
        linear = make(b)
        out = linear(x)
        bound = 2**-18 if dtype == F32 else 2**-7
        assert (out.double() - expected).abs().max() <= expected.abs().max() * bound
        assert torch.equal(linear(x[-1:])[0], out[-1])
        assert torch.equal(linear(x[rows // 2 :]), out[rows // 2 :])
    assert torch.equal(make(bias, partial=True)(x), make(None)(x))


@pytest.mark.narrow("values")
@pytest.mark.parametrize("flags", [(), *OTHER_TILES, AVX2, AVX512], ids=str)
@pytest.mark.parametrize("shape", [(64, 32), (97, 96), (130, 66), (256, 704)])
def test_a_prefill_equals_torch_too(
    shape: tuple[int, int], flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tile registers, if this CPU has them, and without. The last rows fill no register."""
    found = library(*flags)
    monkeypatch.setattr(packed, "library", lambda: found)
    torch.manual_seed(0)
    weight = torch.randn(shape).to(BF16)
    bias = torch.randn(shape[0]).to(BF16)
    for rows, tokens in ((1, 32), (3, 43), (2, 80)):
        x = torch.randn(rows, tokens, shape[1]).to(BF16)
        out = PackedLinear(weight, bias)(x)
        expected = F.linear(*map(Tensor.double, (x, weight, bias)))
        assert (out.double() - expected).abs().max() <= expected.abs().max() * 2**-7


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_more_rows_than_stay_in_a_cache_equal_torch(dtype: torch.dtype) -> None:
    """4 MiB are 1,024 rows of bfloat16, and 512 of float32; the last ones are fewer."""
    torch.manual_seed(0)
    weight = torch.randn(130, 2048).to(dtype)
    x = torch.randn(1100, 2048).to(dtype)
    out = PackedLinear(weight)(x)
    expected = F.linear(x.double(), weight.double())
    bound = 2**-18 if dtype == F32 else 2**-7
    assert (out.double() - expected).abs().max() <= expected.abs().max() * bound


def test_packed_refuses_what_it_cannot_hold() -> None:
    with pytest.raises(ValueError, match="--linear packed needs bfloat16 or float32 weights, not"):
        PackedLinear(torch.randn(4, 4).half())


def int8_twins(
    config: ModelConfig, dtype: torch.dtype, seed: int = 0
) -> tuple[Transformer, Transformer]:
    """(int8, the same weights dequantised, in float32)."""
    plain = tiny_transformer(untie_head(config), seed, dtype=dtype)
    model = low_bit_copy(plain, "int8", is_packed=False)
    twin = deepcopy(model.with_linears(dequantised)).float()  # which shares the other weights
    return model.requires_grad_(False).eval(), twin.requires_grad_(False).eval()


def dequantised(linear: Linear) -> Linear:
    assert isinstance(linear, GroupedLinear)
    kind = nn.Linear if linear.adds_bias else PartialLinear
    plain = kind(1, 1, bias=False, device="meta")
    plain.weight = nn.Parameter(linear.dense(), requires_grad=False)
    plain.bias = None if linear.bias is None else nn.Parameter(linear.bias.clone())
    return plain


def logits(model: Transformer) -> Tensor:
    tokens = torch.tensor(random_prompts([40], model.config.vocab_size))
    runner = make_runner(model, 1, 40)
    runner.cache.allocate(0, 40)
    return runner.forward(ForwardBatch(tokens, [0])).float()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_logits_are_those_of_the_dequantised_weights(config: ModelConfig) -> None:
    model, twin = int8_twins(config, F32)
    expected = logits(twin)
    assert (logits(model) - expected).abs().max() < 1e-4
    unquantised = logits(tiny_transformer(untie_head(config)))
    assert (unquantised - expected).abs().max() > 1e-3  # quantising did change it
    narrow, wide = int8_twins(config, BF16)
    pack(narrow)
    assert any(isinstance(m, PackedLinear) and m.format is not None for m in narrow.modules())
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
        logits.append(runner.forward(ForwardBatch(tokens, [0])).float())
    torchs, packeds = ((found - logits[0]).square().mean().sqrt() for found in logits[1:])
    assert packeds < 1.2 * torchs < 0.02 * logits[0].abs().max()


@pytest.mark.narrow("values", "pairs")
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
    model.pack(rounds=is_int8)
    found = speculate(pack(model), KVSection(policy, budget, 16), backend=NativeBackend)
    assert found.accepts_all == (budget == 5000)


def test_differences_are_settled_by_the_same_weights() -> None:
    """The check in a wider dtype uses wider activations and the same int8 weights."""
    alone = Launch(0, 1, 0, 1)
    config = RunConfig(
        model=ModelSection("demo", "float32", linear="torch", target_dtype="int8"),
        parallel=ParallelSection(device="cpu", threads=1),
        workload=WorkloadSection(batch_size=1, prefix_len=20, gen_len=4, num_batches=1),
    )
    prepared = prepare(config, alone)
    with RankSession(alone, prepared.config.parallel) as session:
        shared = SharedPrefill(session.device, Silent())
        system = PrefilledBatching(prepared, session.groups, session.device, shared)
    runner = system.caches.engine.runner
    wider = wider_runner(prepared, runner, Silent()).model.state_dict()
    for name, tensor in runner.model.state_dict().items():
        kept = name.endswith(".scale") or tensor.dtype == torch.int8
        assert wider[name].dtype == (tensor.dtype if kept else torch.float64)
        assert torch.equal(wider[name].to(tensor.dtype), tensor)
    assert wider["blocks.0.mlp.down.weight"].dtype == torch.int8


def test_packing_leaves_the_bytes_of_the_weights_as_they_are() -> None:
    """Packing fills up the last block of 64 channels with zeros: they are stored, but not counted
    as weights that a forward must read. A vocabulary of 100 does not fill its last block."""
    padded = tiny_transformer(replace(TINY, vocab_size=100), dtype=BF16)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64}
    fitting, _ = int8_twins(replace(TINY, num_heads=4, num_kv_heads=4, **sizes), BF16)
    for model, is_padded in ((padded, True), (fitting, False)):
        plain = weight_bytes(model)
        stored = stored_bytes(model)
        pack(model)
        assert weight_bytes(model) == plain
        assert not is_padded or stored_bytes(model) > stored


def stored_bytes(model: Transformer) -> int:
    return sum(p.nbytes for p in model.parameters())


SOURCE = Path(__file__).with_name("kernels_on_stdin.cpp")
COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
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
    num_rows = 13
    out = 100
    width = 130
    x, weight, bias = (
        torch.randn(*s).bfloat16() for s in ((num_rows, width), (out, width), (out,))
    )
    length = 333
    heads = 6
    kv_heads = 2
    q = torch.randn(length, heads, 64).bfloat16()
    k, v = torch.randn(2, length, kv_heads, 64).bfloat16()
    grouped = [quantizer(torch.randn(out, 128)) for quantizer in (INT4, INT8)]
    sent = as_bytes(
        torch.tensor([num_rows, out, width]),
        x,
        weight,
        bias,
        *(part for matrix in grouped for part in (matrix.numbers, matrix.scale)),
        torch.tensor([length, heads, kv_heads]),
        q,
        k,
        v,
    )
    command = [EMULATOR, str(program)]
    done = subprocess.run(command, input=sent, capture_output=True, check=True, timeout=300)
    numbers = torch.frombuffer(bytearray(done.stdout), dtype=torch.bfloat16)
    linear, *group_numbers, mixed = numbers.split([num_rows * out] * 5 + [q.numel()])
    some = x.flatten()[: num_rows * 128].view(-1, 128)
    for matrix, rounds, exact in zip(grouped, group_numbers[::2], group_numbers[1::2], strict=True):
        ours = PackedLinear(matrix, bias, rounds=True)(some)
        assert torch.equal(rounds.view(ours.shape), ours)  # integers: the bits of any CPU
        assert torch.equal(exact.view(ours.shape), PackedLinear(matrix, bias)(some))
    wide = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(linear.view(wide.shape).double(), wide, rtol=0.01, atol=0.01)
    attended = torch.nn.functional.scaled_dot_product_attention(
        *(states.double().transpose(0, 1) for states in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(0, 1)
    torch.testing.assert_close(mixed.view(attended.shape).double(), attended, rtol=0.02, atol=0.01)
