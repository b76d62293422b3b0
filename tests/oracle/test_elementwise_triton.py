"""Triton's elementwise kernels beyond the tests of the interface: whole models, interpreted if
there is no GPU; and, without one, that launches depend on shapes alone, their number per layer, and
their machine code. On a GPU, `test_cuda_tokens.py` replays them from CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, make_runner, random_prompts, tiny_transformer
from launches import Operators, compile_apart, record_launches
from torch import Tensor

from magicdec.model.config import ModelConfig, RopeConfig
from magicdec.model.elementwise.delta import DeltaTokens, HeldLayer, StatePlaces
from magicdec.model.elementwise.operators import Elementwise
from magicdec.model.elementwise.triton import TritonElementwise, choose_tile
from magicdec.model.transformer import Transformer
from magicdec.runner.forward_batch import ForwardBatch

pytestmark = pytest.mark.wide

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16 = torch.bfloat16
F32 = torch.float32
OURS = TritonElementwise()
TORCHS = Elementwise()


SEVERAL = {
    "llama": TINY,
    "qk norm": replace(TINY, qk_norm=True),
    "gptj": replace(
        TINY,
        rope=RopeConfig(1e4, rotary_dim=8, interleaved=True),
        residual="parallel",
        activation="gelu",
        tie_word_embeddings=True,
    ),
    "layer norm": replace(TINY, norm="layer"),
}


def logits(model: Transformer, T: int) -> Tensor:
    """Logits of a chunk of 20 tokens and of T more, for 2 rows of unequal length."""
    runner = make_runner(model.to(DEVICE), 2, 20 + T)
    for row in range(2):
        runner.cache.allocate(row, 20 + T)
    ids = torch.tensor(random_prompts([20 + T] * 2, model.config.vocab_size)).to(DEVICE)
    runner.forward(ForwardBatch(ids[:, :20], [0, 1]))
    runner.truncate([1], [11])
    return runner.forward(ForwardBatch(ids[:, 20:], [0, 1])).float()


@pytest.mark.parametrize(
    "config",
    [c if c is TINY else pytest.param(c, marks=pytest.mark.wide) for c in SEVERAL.values()],
    ids=SEVERAL,
)
def test_a_model_is_the_same_model(config: ModelConfig) -> None:
    """float32 agrees to the last digits; bfloat16 is as close to float32 as torch's operators."""
    found: dict[Any, Tensor] = {}
    for dtype in (F32, BF16):
        for chosen in (TORCHS, OURS):
            model = tiny_transformer(config, dtype=BF16).to(dtype)
            model.use(chosen)
            found[dtype, chosen] = logits(model, 3)
    exact = found[F32, TORCHS]
    assert exact.std() > 0.5
    assert (found[F32, OURS] - exact).abs().max() < 1e-4
    ours, torchs = ((found[BF16, c] - exact).square().mean().sqrt() for c in (OURS, TORCHS))
    assert ours < 1.2 * torchs < 0.02 * exact.abs().max()


def test_no_pair_of_numbers_is_read_by_two_threads() -> None:
    """Otherwise a thread could read a pair that another has already rotated."""
    for num_heads in (1, 2, 3, 40, 128):
        for pairs in (1, 3, 8, 48, 64, 128):
            block_h, block_p, num_warps = choose_tile(num_heads, pairs)
            assert block_p >= pairs and block_h * block_p >= 32 * num_warps


def call_all(device: str, T: int, dtype: torch.dtype) -> list[Tensor]:
    """Call every operation with the shapes of a model with 32 query and 8 KV heads of 128."""
    x, y, weight = (torch.empty(2, T, 4096, dtype=dtype, device=device) for _ in range(3))
    heads = torch.empty(2, T, 48, 128, dtype=dtype, device=device)
    table = torch.empty(2, T, 2, 64, dtype=F32, device=device)
    gate_up = torch.empty(2, T, 28672, dtype=dtype, device=device)
    with Operators() as operators:
        found = [
            OURS.rms_norm(x[:, -1:], weight[0, 0], 1e-5),
            *OURS.add_rms_norm(x, y, weight[0, 0], 1e-5),
            OURS.rms_norm(heads[:, :, :32], weight[0, 0, :128], 1e-5),
            OURS.rotate(heads, table, 40, False),
            OURS.silu_gate(gate_up),
        ]
    assert not operators.counts, "nothing but our kernels runs"
    return found


@pytest.mark.parametrize("T", [1, 5, 512])
def test_a_launch_follows_from_shapes_alone(T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tested on fake tensors without values: nothing is read by the host or copied, and allocations
    and launches are determined by shapes, as a CUDA graph needs."""
    launches = record_launches(monkeypatch)
    shapes = [tuple(t.shape) for t in call_all("meta", T, BF16)]
    row = (2, T, 4096)
    heads = (2, T, 32, 128)
    assert shapes == [(2, 1, 4096), row, row, heads, (2, T, 40, 128), (2, T, 14336)]
    assert [(launch.kernel, launch.grid) for launch in launches] == [
        ("norm_rows", (2,)),
        ("norm_rows", (2 * T,)),
        ("norm_rows", (2 * T * 32,)),
        ("rotate_heads", (2 * T, 10)),
        ("gate_rows", (2 * T, 28)),
    ]


def launches_of(config: ModelConfig, chosen: Elementwise, ours: list[Any]) -> tuple[int, int]:
    """(torch's operators, our kernels) of one token's forward in bfloat16, attention left out; on
    tensors that hold no numbers. An RMS norm of torch's counts as one, as it is on CUDA."""
    with torch.device("meta"), torch.inference_mode():
        model = Transformer(config).to(BF16)
        model.ropes = {config.rope: torch.empty(64, 2, config.head_dim // 2)}
        model.use(chosen)
        ids = torch.empty(1, 1, dtype=torch.int64)
        ours.clear()
        with Operators() as operators:
            model(ids, ids, lambda layer, q, k, v: q, lambda x: x)
    return operators.counts.total(), len(ours)


def test_a_layer_launches_half_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers in docs/gpu.md, for this model and without attention."""
    ours = record_launches(monkeypatch)
    layers = (TINY.num_layers, 10 + TINY.num_layers)
    counts = [
        [launches_of(replace(TINY, num_layers=n), chosen, ours) for n in layers]
        for chosen in (TORCHS, OURS)
    ]
    (before, longer_before), (after, longer_after) = counts
    assert (before, after) == ((2 * 18 + 4, 0), (2 * 4 + 3, 2 * 4 + 1))
    assert longer_before[0] - before[0] == 10 * 18
    assert sum(longer_after) - sum(after) == 10 * 8


def call_delta(device: str, T: int) -> None:
    """A layer with linear attention of Qwen3.5-9B's sizes: its convolution, the steps of new tokens
    and the chunks of a prompt."""
    G = 16
    H = 32
    D = E = 128

    def numbers(*size: int) -> Tensor:
        return torch.empty(size, device=device)

    rows = (torch.empty(2, dtype=torch.int64, device=device) for _ in range(4))
    held = numbers(4, H, D, E), numbers(4, 9, G, D), numbers(4, 9, H, E), numbers(4, 9, H)
    tokens = DeltaTokens(
        numbers(2, T, 8192), numbers(8192, 4), numbers(2, T, H), numbers(2, T, H), (G, H, D, E)
    )
    new = OURS.delta_convolve(tokens, numbers(2, 3, 8192))
    OURS.delta_steps(HeldLayer(*held), StatePlaces(*rows), *new, tokens)
    OURS.delta_chunks(numbers(2, H, D, E), *new, tokens)


@pytest.mark.parametrize(("T", "num_blocks", "num_chunks"), [(1, 1, 1), (5, 5, 1), (130, 17, 3)])
def test_linear_attention_is_few_launches(
    T: int, num_blocks: int, num_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of as many programs as heads, times tokens, chunks or tiles of a state's columns."""
    launches = record_launches(monkeypatch)
    call_delta("meta", T)
    assert {launch.kernel: launch.grid for launch in launches} == {
        "convolve_rows": (2 * num_blocks, 2 * 16 + 32),
        "delta_rows": (2 * 32, 4),
        "chunk_products": (2 * 32, num_chunks),
        "chunk_solutions": (2 * 32, num_chunks),
        "chunk_rows": (2 * 32, 8),
    }
    assert len(launches) == 5


COMPILE = """
import re
from collections import defaultdict
import pytest
import torch
from test_elementwise_triton import call_all, call_delta
from launches import compile_launch, record_launches, resources
from magicdec.model.elementwise import triton_kernels

launches, orders = record_launches(pytest.MonkeyPatch()), defaultdict(set)
for dtype in (torch.bfloat16, torch.float32):
    call_all("meta", 5, dtype)
assert len(launches) == 10
for launch in launches:
    dtype, kernel = launch.args[0].dtype, getattr(triton_kernels, launch.kernel)
    for capability, is_aligned in ((80, True), (86, False), (90, True)):
        made = compile_launch(kernel, launch, capability, is_aligned)
        numbers = resources(made.asm["cubin"])
        assert numbers["STACK"] == numbers["LOCAL"] == 0, (launch, numbers)
        assert numbers["REG"] <= 128 and made.metadata.shared <= 1024, (launch, numbers)
        if launch.kernel == "norm_rows":
            words = re.findall(r"(?:ld|st)\\.global\\.\\S+", made.asm["ptx"])
            assert not is_aligned or all(".v" in word for word in words), words
            code = made.asm["ttgir"]
            summed = re.search(r'"tt.reduce".*?\\}\\) : \\((.*?)\\)', code, re.S)[1]
            layout = re.search("(?m)^" + re.search("#[a-z0-9]+", summed)[0] + " = (.*)$", code)[1]
            orders[launch.options["WIDTH"], dtype].add(layout)
launches.clear()
call_delta("meta", 130)
assert len(launches) == 5
for launch in launches:
    for capability in (80, 86, 90):
        made = compile_launch(getattr(triton_kernels, launch.kernel), launch, capability)
        numbers = resources(made.asm["cubin"])
        assert numbers["STACK"] == numbers["LOCAL"] == 0, (launch, numbers)
        assert made.metadata.shared <= 48 << 10, launch
        if launch.kernel in ("chunk_products", "chunk_rows"):
            assert "mma" in made.asm["ptx"], "products are of tensor cores"
        if launch.kernel != "delta_rows":
            continue
        words = re.findall(r"ld\\.global\\.\\S+", made.asm["ptx"])
        assert any(".v4" in word for word in words), words
        assert "fma.rn.f32" not in made.asm["ptx"], "a product within a sum has other bits"
assert len(orders) == 4 and all(len(layouts) == 1 for layouts in orders.values()), orders
"""


@pytest.mark.wide
def test_kernels_compile_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    """What a model launches, to machine code for compute capability 8.0, 8.6 and 9.0. And a norm
    adds up its squares in an order that follows from the width alone: not from where rows lie, nor
    from whether something was added to them first."""
    compile_apart(COMPILE, tmp_path)
