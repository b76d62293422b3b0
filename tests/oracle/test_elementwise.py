"""Norms, rotation and gates of every implementation, compared with float64, over any shapes and
strides: results are rounded once, rows do not depend on each other, and nothing else is written.
Triton kernels are interpreted if there is no GPU."""

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from magicdec.model.elementwise.native import check
from magicdec.model.elementwise.operators import apply_rope
from magicdec.names import ELEMENTWISE, load_named

BF16 = torch.bfloat16
F32 = torch.float32
# How far one rounding may lead away, of a number or of the floor: half a step of bfloat16; of
# float32, what attention may.
BOUND = {BF16: 2.0**-8 * 1.01, F32: 2e-6}
FLOOR = {BF16: 1e-3, F32: 0.1}
WITHOUT_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
INTERPRETED = (WITHOUT_TRITON, pytest.mark.wide)
every_kind = pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("torch", F32),
        ("native", BF16),
        *(pytest.param("triton", dtype, marks=INTERPRETED) for dtype in (BF16, F32)),
    ],
    ids=str,
)
few = settings(max_examples=25, deadline=None)


def device_of(name: str) -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() and name == "triton" else "cpu")


def assert_rounded_once(found: Tensor, exact: Tensor) -> None:
    scale = exact.abs().clamp(min=FLOOR[found.dtype])
    assert ((found.double() - exact).abs() / scale).max() < BOUND[found.dtype]


def inside(
    shape: tuple[int, ...], dtype: torch.dtype, step: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """A random view of that shape with other values before, between and after its rows, and the
    whole tensor."""
    torch.manual_seed(0)
    rows, tokens, *rest = shape
    whole = torch.randn(rows + 1, tokens * step + 1, *rest).to(device, dtype)
    return whole[1:, 1::step], whole


@every_kind
@few
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(2, 9)),
    size=st.integers(2, 256),
    data=st.data(),
    interleaved=st.booleans(),
    step=st.integers(1, 2),
)
def test_any_heads_are_turned(
    name: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    size: int,
    data: Any,
    interleaved: bool,
    step: int,
) -> None:
    """Any head size, any number of rotated dimensions, rows and tokens that are not adjacent."""
    rows, tokens, num_heads = shape
    chosen = load_named(ELEMENTWISE, name)()
    device = device_of(name)
    pairs = data.draw(st.integers(1, size // 2))
    turned = data.draw(st.integers(1, num_heads))
    heads, whole = inside((*shape, size), dtype, step, device)
    angles = torch.randn(rows, tokens, pairs, device=device)
    table = torch.stack([angles.cos(), angles.sin()], dim=2)
    if name != "triton":  # the others take tokens that are adjacent
        whole = heads = heads.contiguous()
    before = whole.clone()
    old = heads.clone()
    last = heads[-1:, -1:].clone()
    exact = apply_rope(heads[:, :, :turned].double(), table.double(), interleaved)
    found = chosen.rotate(heads, table, turned, interleaved)
    bound = BOUND[dtype] * exact.abs().max().clamp(min=1)
    assert found.shape == exact.shape and (found.double() - exact).abs().max() < bound
    assert torch.equal(heads[:, :, turned:], old[:, :, turned:]), "values are not turned"
    assert torch.equal(found[..., 2 * pairs :], old[:, :, :turned, 2 * pairs :])
    if name == "triton":
        assert found.data_ptr() == heads.data_ptr(), "in place"
    found = found.clone()
    heads.copy_(old)
    assert torch.equal(whole, before), "nothing is written beside the heads"
    alone = chosen.rotate(last, table[-1:, -1:].contiguous(), turned, interleaved)
    assert torch.equal(alone, found[-1:, -1:]), "a token does not depend on the others"


@every_kind
@few
@given(
    rows=st.integers(1, 4),
    tokens=st.integers(1, 4),
    width=st.integers(1, 600),
    step=st.integers(1, 2),
    scale=st.sampled_from([1.0, 3e-3]),
)
@example(rows=70, tokens=1, width=512, step=1, scale=1.0)
def test_any_rows_are_normed_and_gated(
    name: str, dtype: torch.dtype, rows: int, tokens: int, width: int, step: int, scale: float
) -> None:
    """With values as small as what a norm adds, and with gates that are closed and open."""
    chosen = load_named(ELEMENTWISE, name)()
    device = device_of(name)
    x, whole = inside((rows, tokens, 2 * width), dtype, step, device)
    whole.mul_(scale)
    weight = torch.randn(2 * width).to(device, dtype)
    y = torch.randn(rows, tokens, 2 * width).to(device, dtype)
    before = whole.clone()
    last = x[-1:, -1:]
    for other in (y, x):
        total, normed = chosen.add_rms_norm(x, other, weight, 1e-5)
        assert torch.equal(total, x + other)
        assert torch.equal(normed, chosen.rms_norm(total, weight, 1e-5))
    for values in (x, total):
        exact = F.rms_norm(values.double(), weight.shape, weight.double(), 1e-5)
        assert_rounded_once(chosen.rms_norm(values, weight, 1e-5), exact)
    alone = chosen.rms_norm(last, weight, 1e-5)
    assert torch.equal(alone, chosen.rms_norm(x, weight, 1e-5)[-1:, -1:])
    assert torch.equal(whole, before), "nothing is written to what is read"
    x.mul_(8 / scale)
    x[0, 0, : min(4, width)] = torch.tensor([0.0, -100.0, 100.0, -1e-30])[: min(4, width)]
    gate, up = x.double().chunk(2, dim=-1)
    found = chosen.silu_gate(x)
    assert_rounded_once(found, F.silu(gate) * up)
    assert torch.equal(chosen.silu_gate(last), found[-1:, -1:])


@pytest.mark.narrow("values")
@pytest.mark.parametrize("shape", [(1, 70), (2, 130)], ids=str)
@every_kind
def test_a_long_chunk_and_heads_beside_others(
    name: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """As a model passes them: a chunk of a prompt, and norms of queries beside keys and values."""
    chosen = load_named(ELEMENTWISE, name)()
    device = device_of(name)
    torch.manual_seed(0)
    rows, tokens = shape
    weight = torch.randn(48)
    heads = torch.randn(rows, tokens, 6, 48)
    weight = weight.to(device, dtype)
    heads = heads.to(device, dtype)
    for view in (heads[:, :, 2:4], heads[:, -1:, 0], heads[:, -1:]):
        found = chosen.rms_norm(view, weight, 1e-6)
        assert_rounded_once(found, F.rms_norm(view.double(), (48,), weight.double(), 1e-6))
        assert torch.equal(found, chosen.rms_norm(view.contiguous(), weight, 1e-6))
    angles = torch.randn(rows, tokens, 24, device=device)
    table = torch.stack([angles.cos(), angles.sin()], dim=2)
    exact = apply_rope(heads[:, :, :4].double(), table.double())
    alone = chosen.rotate(heads[:, -1:].clone(), table[:, -1:].contiguous(), 4, False)
    found = chosen.rotate(heads, table, 4, False)
    assert (found.double() - exact).abs().max() < BOUND[dtype] * exact.abs().max()
    assert torch.equal(found[:, -1:], alone)


@pytest.mark.parametrize("width", [2, 16, 17, 576, 1000])
def test_sums_and_products_are_rounded_as_they_are_written(width: int) -> None:
    """On every CPU, and wherever a compiler inlines a function: it may neither regroup a sum nor
    join a product with one."""
    chosen = load_named(ELEMENTWISE, "native")()
    torch.manual_seed(0)
    x = torch.randn(width)
    weight = torch.randn(width)
    squares = x.numpy() ** 2
    whole = width // 16 * 16
    sums = np.zeros(16, np.float32)
    for part in squares[:whole].reshape(-1, 16):
        sums = sums + part
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    total = sums[0]
    for square in squares[whole:]:
        total = total + square
    scale = np.float32(1) / np.sqrt(total / np.float32(width) + np.float32(1e-5))
    assert (chosen.rms_norm(x, weight, 1e-5).numpy() == x.numpy() * scale * weight.numpy()).all()
    heads = torch.randn(1, 1, 3, width // 2 * 2)
    angles = torch.randn(1, 1, width // 2)
    table = torch.stack([angles.cos(), angles.sin()], dim=2)
    first, second = heads.chunk(2, dim=-1)
    cosine, sine = angles.cos(), angles.sin()
    turned = [first * cosine - second * sine, second * cosine + first * sine]
    expected = torch.cat(turned, dim=-1)
    assert torch.equal(chosen.rotate(heads, table, 3, False), expected)


def test_the_library_takes_bfloat16_and_float32_on_a_cpu() -> None:
    for dtype in (BF16, torch.float32):
        check(torch.zeros(1, dtype=dtype))
    for other in (torch.zeros(1, dtype=torch.float16), torch.zeros(1, dtype=BF16, device="meta")):
        with pytest.raises(AssertionError):
            check(other)
