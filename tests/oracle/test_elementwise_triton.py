"""Triton's elementwise kernels beyond the tests of the interface: irregular shapes and strides,
long chunks, launches, CUDA graphs and whole models. Interpreted if there is no GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, Launch, make_runner, random_prompts, tiny_transformer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from magicdec.model.config import ModelConfig, RopeConfig
from magicdec.model.elementwise.operators import Elementwise, apply_rope
from magicdec.model.elementwise.triton import TritonElementwise
from magicdec.model.transformer import Transformer

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16, F32 = torch.bfloat16, torch.float32
BOUND = {BF16: 2.0**-8 * 1.01, F32: 2e-6}
OURS, TORCHS = TritonElementwise(), Elementwise()
DTYPES = st.sampled_from([BF16, F32])
few = settings(max_examples=25, deadline=None)


def close(found: Tensor, exact: Tensor) -> bool:
    scale = exact.abs().clamp(min=0.1)
    return bool(((found.double() - exact).abs() / scale).max() < BOUND[found.dtype])


def inside(shape: tuple[int, ...], dtype: torch.dtype, step: int) -> tuple[Tensor, Tensor]:
    """A random view of that shape with other values before, between and after its rows, and the
    whole tensor."""
    torch.manual_seed(0)
    rows, tokens, *rest = shape
    whole = torch.randn(rows + 1, tokens * step + 1, *rest).to(DEVICE, dtype)
    return whole[1:, 1::step], whole


@few
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(2, 9)),
    size=st.integers(2, 256), data=st.data(), interleaved=st.booleans(), dtype=DTYPES,
    step=st.integers(1, 2),
)  # fmt: skip
def test_any_heads_are_turned(
    shape: tuple[int, int, int], size: int, data: Any, interleaved: bool, dtype: torch.dtype,
    step: int,
) -> None:  # fmt: skip
    """Any head size, any number of rotated dimensions, rows and tokens that are not adjacent.
    Nothing else is written."""
    rows, tokens, num_heads = shape
    pairs, turned = data.draw(st.integers(1, size // 2)), data.draw(st.integers(1, num_heads))
    heads, whole = inside((*shape, size), dtype, step)
    angles = torch.randn(rows, tokens, pairs, device=DEVICE)
    table = torch.stack([angles.cos(), angles.sin()], dim=2)
    expected = whole.double()
    exact = apply_rope(heads[:, :, :turned].double(), table.double(), interleaved)
    found = OURS.rotate(heads, table, turned, interleaved)
    assert found.data_ptr() == heads.data_ptr(), "in place"
    expected[1:, 1::step, :turned] = exact
    assert (whole.double() - expected).abs().max() < BOUND[dtype] * exact.abs().max().clamp(min=1)
    untouched = torch.ones_like(whole, dtype=torch.bool)
    untouched[1:, 1::step, :turned, : 2 * pairs] = False
    assert torch.equal(whole.double()[untouched], expected[untouched])


@few
@given(
    rows=st.integers(1, 4), tokens=st.integers(1, 4), width=st.integers(1, 600), dtype=DTYPES,
    step=st.integers(1, 2),
)  # fmt: skip
def test_any_rows_are_normed_and_gated(
    rows: int, tokens: int, width: int, dtype: torch.dtype, step: int
) -> None:
    x, whole = inside((rows, tokens, 2 * width), dtype, step)
    before, weight = whole.clone(), torch.randn(2 * width).to(DEVICE, dtype)
    y = torch.randn(rows, tokens, 2 * width).to(DEVICE, dtype)
    total, normed = OURS.add_rms_norm(x, y, weight, 1e-5)
    assert torch.equal(total, x + y) and torch.equal(normed, OURS.rms_norm(total, weight, 1e-5))
    assert close(normed, F.rms_norm(total.double(), weight.shape, weight.double(), 1e-5))
    gate, up = x.double().chunk(2, dim=-1)
    assert close(OURS.silu_gate(x), F.silu(gate) * up)
    alone = x[-1:, -1:]
    assert torch.equal(OURS.rms_norm(alone, weight, 1e-5), OURS.rms_norm(x, weight, 1e-5)[-1:, -1:])
    assert torch.equal(OURS.silu_gate(alone), OURS.silu_gate(x)[-1:, -1:])
    assert torch.equal(whole, before), "nothing is written to what is read"


@pytest.mark.wide
def test_a_long_chunk() -> None:
    """The last token of a prefill chunk has the same bits as alone."""
    torch.manual_seed(0)
    heads = torch.randn(1, 130, 3, 16).to(DEVICE, BF16)
    angles = torch.randn(1, 130, 8, device=DEVICE)
    table = torch.stack([angles.cos(), angles.sin()], dim=2)
    alone = OURS.rotate(heads[:, -1:].clone(), table[:, -1:].contiguous(), 2, False)
    exact = apply_rope(heads[:, :, :2].double(), table.double())
    found = OURS.rotate(heads, table, 2, False)
    assert (found.double() - exact).abs().max() < BOUND[BF16] * exact.abs().max()
    assert torch.equal(found[:, -1:], alone)


SEVERAL = {
    "llama": TINY,
    "qk norm": replace(TINY, qk_norm=True),
    "gptj": replace(
        TINY, rope=RopeConfig(1e4, rotary_dim=8, interleaved=True), residual="parallel",
        activation="gelu", tie_word_embeddings=True,
    ),
    "layer norm": replace(TINY, norm="layer"),
}  # fmt: skip


def logits(model: Transformer, T: int) -> Tensor:
    """Logits of a chunk of 20 tokens and of T more, for 2 rows of unequal length."""
    runner = make_runner(model.to(DEVICE), 2, 20 + T)
    for row in range(2):
        runner.cache.allocate(row, 20 + T)
    ids = torch.tensor(random_prompts([20 + T] * 2, model.config.vocab_size)).to(DEVICE)
    runner.forward(ids[:, :20], [0, 1])
    runner.truncate([1], [11])
    return runner.forward(ids[:, 20:], [0, 1]).float()


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


@pytest.mark.cuda
@pytest.mark.parametrize("T", [1, 5])
def test_a_graph_holds_every_call(T: int) -> None:
    """Captured once and replayed on other values: the same results as the calls."""

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape).to(DEVICE, BF16)

    angles = torch.randn(2, T, 64, device=DEVICE)
    table = torch.stack([angles.cos(), angles.sin()], dim=2)
    weight, parts = numbers(4096), [(4096,), (4096,), (48, 128), (28672,)]
    x, y, heads, gate_up = (numbers(2, T, *part) for part in parts)

    def compute() -> list[Tensor]:
        total, normed = OURS.add_rms_norm(x, y, weight, 1e-5)
        rotated = OURS.rotate(heads, table, 40, False)
        return [total, normed, rotated, OURS.silu_gate(gate_up), OURS.rms_norm(x, weight, 1e-5)]

    compute()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = compute()
    for tensor in (x, y, heads, gate_up):
        tensor.copy_(torch.randn(tensor.shape))
    kept = heads.clone()
    graph.replay()
    replayed = [t.clone() for t in captured]
    heads.copy_(kept)
    assert all(torch.equal(a, b) for a, b in zip(replayed, compute(), strict=True))


@pytest.mark.wide
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is nothing to interpret")
def test_a_run_says_what_it_took(
    launch: Launch, tiny_checkpoint: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Speculation with the interpreted kernels, and the fields of its record."""
    monkeypatch.delenv("TRITON_INTERPRET")
    asked = "--elementwise triton --device cpu --dtype float32 --B 1 --prefix_len 20 --gen_len 3"
    few = "--num_batches 1 --warmup_batches 0 --gamma 1 --draft_budget 18 --out r.jsonl"
    place = ("--model", tiny_checkpoint, "--dataset", text_file)
    done = launch("selfspec_benchmark.py", *asked.split(), *few.split(), *place)
    assert done.returncode == 0, done.stderr
    assert "--elementwise triton: asked for; interpreted on a CPU" in done.stderr
    assert "no difference" in done.stdout + done.stderr
    model = json.loads((tmp_path / "r.jsonl").read_text())["config"]["model"]
    assert model["elementwise"] == "triton" and "interpreted" in model["elementwise_reason"]
