"""Matrices in FP8: rounding against the nearest of all 256 numbers, products against torch's own
operator, the Triton kernel, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import Command, tiny_transformer
from launches import LaunchRecorder, compile_apart
from test_linear import BF16, EVERYTHING, F32
from torch import Tensor

from magicdec.config.machine import Machine
from magicdec.config.resolve import resolve
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import DecodingSection, ModelSection
from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.checkpoint.quantization import low_bit_copy
from magicdec.model.linear import fp8, triton
from magicdec.model.linear.fp8 import E4M3, Fp8Linear, rounded_rows, widened
from magicdec.model.linear.packed import PartialLinear
from magicdec.model.presets.presets import PRESETS
from magicdec.setup.memory_plan import Models, plan_rank

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_rows(width: int, dtype: torch.dtype) -> Tensor:
    """Rows of several sizes, one of them zero, and one with ties of the rounding."""
    torch.manual_seed(0)
    rows = torch.randn(6, width) * torch.tensor([1e-3, 1.0, 0.0, 1e4, 3.0, 1.0])[:, None]
    rows[5] = torch.arange(width) % 449
    rows[5, 0] = 448.0
    return rows.to(dtype)


def test_rounding_is_to_the_nearest_of_all_numbers() -> None:
    """Ties go to the one with an even code."""
    codes = np.arange(127, dtype=np.uint8)  # 127 is no number
    exponents = codes.astype(np.float64) // 8
    fractions = codes % 8
    sizes = np.where(
        exponents == 0, fractions / 8 * 2.0**-6, (1 + fractions / 8) * 2.0 ** (exponents - 7)
    )
    for dtype in (BF16, F32):
        rows = make_rows(480, dtype)
        numbers, scale = rounded_rows(rows)
        largest = rows.float().abs().amax(1, keepdim=True)
        assert torch.equal(scale, largest / 448) and scale[2] == 0
        divisor = torch.where(scale == 0, 1.0, scale)
        quotients = (rows.float() / divisor).numpy().astype(np.float64)
        distances = np.abs(np.abs(quotients)[..., None] - sizes)
        nearest = distances == distances.min(-1, keepdims=True)
        is_odd = np.broadcast_to(codes % 2, nearest.shape)
        expected = np.where(nearest, is_odd, 2).argmin(-1)
        found = numbers.view(torch.uint8).numpy()
        assert np.array_equal(found & 127, expected)
        assert np.array_equal(np.sign(quotients)[expected > 0] < 0, found[expected > 0] > 127)
    every = torch.arange(256, dtype=torch.uint8).view(E4M3)
    every = every[~every.float().isnan()]
    assert torch.equal(widened(every), every.float())


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("outputs", [64, 97])
def test_products_are_those_of_torch(outputs: int, dtype: torch.dtype) -> None:
    """Of its operator for CPUs, which is that for GPUs by name; outputs that fill no multiple."""
    torch.manual_seed(0)
    weight = torch.randn(outputs, 96) * torch.logspace(-3, 3, outputs)[:, None]
    bias = torch.randn(outputs).to(dtype)
    layer = Fp8Linear(weight, bias)
    x = torch.randn(2, 3, 96).to(dtype)
    out = layer(x)
    numbers, scale = rounded_rows(x.flatten(0, 1))
    expected = torch._scaled_mm(
        numbers, layer.weight.T, scale_a=scale, scale_b=layer.scale[None], out_dtype=F32
    )
    expected = expected[:, :outputs].view(2, 3, outputs) + bias
    assert out.shape == expected.shape and out.dtype == dtype
    error = (out.double() - expected.double()).abs() / expected.double().abs().amax((0, 1))
    assert error.max() <= (2**-7 if dtype == BF16 else 1e-6)
    exact = F.linear(x.double(), weight.double(), bias.double())
    ours = (out.double() - exact).norm(dim=(0, 1)) / exact.norm(dim=(0, 1))
    assert 1e-3 < ours.mean() < 0.05  # 3 bits of a fraction
    unadded = Fp8Linear(weight, bias, adds_bias=False)(x)
    assert torch.equal(unadded, Fp8Linear(weight, None)(x))
    assert (layer.dense() - weight).abs().amax(1).div(weight.abs().amax(1)).max() <= 2**-4


def test_a_gpu_is_called_with_what_torch_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch checks shapes, strides and dtypes of tensors without numbers as it does on a GPU."""
    layer = Fp8Linear(torch.randn(97, 96), None).to("meta")
    recorder = LaunchRecorder()
    monkeypatch.setattr(triton, "kernels", lambda device: recorder)
    for rows in (1, 28, 160):
        out = layer._on_gpu(torch.empty(rows, 96, dtype=BF16, device="meta"))
        assert out.shape == (rows, 112) and out.dtype == BF16
    assert [(found.kernel, found.grid) for found in recorder.launches] == [
        ("round_rows", (rows,)) for rows in (1, 28, 160)
    ]


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("width", [16, 96, 5008, 14336])
def test_the_kernel_rounds_to_the_same_bits(
    width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is interpreted, torch converts, since the interpreter of Triton 3.7 drops the carry
    of a rounding into the exponent."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    widen = interpreter._convert_float

    def convert(numbers: np.ndarray, *arguments: Any) -> np.ndarray:
        if arguments[1].name != "fp8e4nv":
            return widen(numbers, *arguments)
        rounded = torch.from_numpy(numbers.copy()).to(E4M3)
        return rounded.view(torch.uint8).numpy().reshape(numbers.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    rows = make_rows(width, dtype)
    numbers, scale = triton.round_rows(rows.to(DEVICE))
    expected, expected_scale = rounded_rows(rows)
    assert torch.equal(scale.cpu(), expected_scale)
    assert torch.equal(numbers.cpu().view(torch.uint8), expected.view(torch.uint8))


COMPILE = """
import torch
from launches import LaunchRecorder, compile_launch, resources
from magicdec.model.linear import triton, triton_kernels

recorder = LaunchRecorder()
triton.kernels = lambda device: recorder
for width in (64, 4096, 14336):
    triton.round_rows(torch.empty(5, width, dtype=torch.bfloat16, device="meta"))
for launch in recorder.launches:
    for capability in (89, 90):
        made = compile_launch(triton_kernels.round_rows, launch, capability)
        numbers = resources(made.asm["cubin"])
        assert numbers["STACK"] == numbers["LOCAL"] == 0, numbers
        assert "cvt.rn.satfinite.e4m3x2" in made.asm["ptx"]
        # On 8.9 Triton 3.7 goes through float16: a number beside a tie may become the other.
        assert ("e4m3x2.f32" in made.asm["ptx"]) == (capability == 90)
"""


def test_the_kernel_is_compiled_for_gpus_with_fp8(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    compile_apart(COMPILE, tmp_path)


def test_a_copy_is_as_large_as_planned_and_shares_the_rest() -> None:
    """A vocabulary that is no multiple of 16 is filled up."""
    small = replace(EVERYTHING, hidden_size=64, intermediate_size=96, num_kv_heads=3)
    model = tiny_transformer(small, dtype=BF16)
    copy = low_bit_copy(model, "fp8", is_packed=False)
    layers = [module for module in copy.modules() if isinstance(module, Fp8Linear)]
    assert not any(isinstance(module, torch.nn.Linear) for module in copy.modules())
    partial = sum(isinstance(module, PartialLinear) for module in model.modules())
    assert sum(not layer.adds_bias for layer in layers) == partial > 0
    decoding = DecodingSection("speculative", "self", draft_weights="fp8")
    config = resolve(RunConfig(ModelSection(dtype="bfloat16"), decoding=decoding), Machine(1))
    plan = plan_rank(config, Models(small), 0)
    held = sum(part.nbytes for layer in layers for part in (layer.weight, layer.scale))
    assert plan.draft_weights == held and Shard() == model.shard
    broken = tiny_transformer(small, dtype=BF16)
    broken.head.weight[3, 5] = torch.inf
    with pytest.raises(ValueError, match="is not finite: it has no fp8"):
        low_bit_copy(broken, "fp8", is_packed=False)


def test_a_card_without_fp8_is_refused() -> None:
    asked = RunConfig(decoding=DecodingSection("speculative", "self", draft_weights="fp8"))
    card = "A100 has compute capability 8.0, 8.9 is needed for FP8"
    old = Machine(1, has_cuda=True, fp8_obstacle=card)
    with pytest.raises(ValueError, match=f"--draft_weights fp8 --device cuda: {card}; or choose "):
        resolve(asked, old)
    bare = Machine(1, has_cuda=True, missing_backends={"triton": "triton is not installed"})
    with pytest.raises(ValueError, match="triton is not installed; or choose int8"):
        resolve(asked, bare)
    assert resolve(asked, Machine(1, has_cuda=True)).low_bit == "fp8"
    assert resolve(asked, replace(old, has_cuda=False)).low_bit == "fp8"
    in_groups = replace(asked.decoding, draft_weights="int4_g128")
    assert resolve(replace(asked, decoding=in_groups), old).low_bit == "int4_g128"


def test_inputs_that_do_not_divide_are_refused(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = replace(PRESETS["llama-3.2-1b"].config, intermediate_size=88, num_layers=1)
    monkeypatch.setitem(PRESETS, "tiny", replace(PRESETS["llama-3.2-1b"], config=odd))
    for weights, group in (("fp8", fp8.MULTIPLE), ("int4_g128", 32)):
        flags = f"--draft_weights {weights} --model random:tiny --prefix_len 64 --device cpu"
        done = command("run", *flags.split())
        message = f"--draft_weights {weights}: groups of {group} inputs do not divide the 88 of a"
        assert done.code == 2 and message in done.err and len(done.err.splitlines()) == 1
