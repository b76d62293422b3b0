"""Norms, rotation and gates of every implementation, compared with float64: results are rounded
once and rows do not depend on each other. Triton kernels are interpreted if there is no GPU."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.model.elementwise.native import serves
from magicdec.model.elementwise.operators import Elementwise, apply_rope
from magicdec.names import ELEMENTWISE, load_named

BF16, F32 = torch.bfloat16, torch.float32
# How far one rounding may lead away, of a number or of the floor: half a step of bfloat16; of
# float32, what attention may.
BOUND, FLOOR = {BF16: 2.0**-8 * 1.01, F32: 2e-6}, {BF16: 1e-3, F32: 0.1}
Kind = tuple[Elementwise, torch.dtype, torch.device]


INTERPRETED = [
    pytest.param(f"triton {dtype}", marks=pytest.mark.interpreted)
    for dtype in ("bfloat16", "float32")
]


@pytest.fixture(params=["torch float32", "native bfloat16", *INTERPRETED])
def kind(request: pytest.FixtureRequest) -> Kind:
    name, dtype = request.param.split()
    if name == "triton" and find_spec("triton") is None:
        pytest.skip("triton is not installed")
    on_gpu = torch.cuda.is_available() and name == "triton"
    made = load_named(ELEMENTWISE, name)()
    return made, getattr(torch, dtype), torch.device("cuda" if on_gpu else "cpu")


def assert_rounded_once(found: Tensor, exact: Tensor) -> None:
    scale = exact.abs().clamp(min=FLOOR[found.dtype])
    assert ((found.double() - exact).abs() / scale).max() < BOUND[found.dtype]


@pytest.mark.narrow("pairs", "pairs")
@pytest.mark.parametrize("width", [16, 40, 384, 1023])
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_rms_norm(kind: Kind, rows: int, width: int) -> None:
    chosen, dtype, device = kind
    torch.manual_seed(0)
    x = torch.randn(rows, 1, width).to(device, dtype) * 3e-3
    weight = torch.randn(width).to(device, dtype)
    found = chosen.rms_norm(x, weight, 1e-5)
    assert_rounded_once(found, F.rms_norm(x.double(), (width,), weight.double(), 1e-5))
    last = chosen.rms_norm(x[-1:], weight, 1e-5)
    assert torch.equal(found[-1:], last), "a row does not depend on the others"
    apart = torch.cat([x, x * 3], dim=-1)[..., :width]  # rows that are not adjacent
    assert torch.equal(chosen.rms_norm(apart, weight, 1e-5), found)


def test_norms_of_heads_and_of_last_positions(kind: Kind) -> None:
    """Strided views, as a model passes them: queries beside keys and values, one token per row."""
    chosen, dtype, device = kind
    torch.manual_seed(0)
    weight = torch.randn(48).to(device, dtype)
    heads = torch.randn(3, 7, 10, 48).to(device, dtype)
    for view in (heads[:, :, 2:6], heads[:, -1:, 0], heads[:, -1:]):
        found = chosen.rms_norm(view, weight, 1e-6)
        assert_rounded_once(found, F.rms_norm(view.double(), (48,), weight.double(), 1e-6))
        assert torch.equal(found, chosen.rms_norm(view.contiguous(), weight, 1e-6))


@pytest.mark.narrow("pairs", "pairs")
@pytest.mark.parametrize("width", [40, 1023])
@pytest.mark.parametrize("rows", [1, 6])
def test_a_sum_and_its_norm(kind: Kind, rows: int, width: int) -> None:
    """The same bits as the sum followed by the norm."""
    chosen, dtype, device = kind
    torch.manual_seed(0)
    x, wide = torch.randn(rows, 2, width), torch.randn(rows, 4, width) * 3
    x, y = x.to(device, dtype), wide.to(device, dtype)[:, 1:3]
    weight = torch.randn(width).to(device, dtype)
    before = x.clone()
    total, found = chosen.add_rms_norm(x, y, weight, 1e-5)
    assert torch.equal(total, x + y) and torch.equal(x, before)
    assert torch.equal(found, chosen.rms_norm(total, weight, 1e-5))
    assert_rounded_once(found, F.rms_norm(total.double(), (width,), weight.double(), 1e-5))
    twice, found = chosen.add_rms_norm(x, x, weight, 1e-5)
    assert torch.equal(twice, x * 2) and torch.equal(found, chosen.rms_norm(twice, weight, 1e-5))


@pytest.mark.narrow("pairs", "pairs")
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("size", "pairs"), [(64, 32), (64, 8), (80, 40), (16, 3), (256, 128)])
@pytest.mark.parametrize("tokens", [1, 7, 40, 130])
def test_rotation(kind: Kind, tokens: int, size: int, pairs: int, interleaved: bool) -> None:
    chosen, dtype, device = kind
    torch.manual_seed(0)
    heads = torch.randn(2, tokens, 6, size).to(device, dtype)
    angles = torch.randn(2, tokens, pairs, device=device)
    table = torch.stack([angles.cos(), angles.sin()], dim=2)
    exact = apply_rope(heads[:, :, :4].double(), table.double(), interleaved)
    given = heads.clone()
    found = chosen.rotate(given, table, 4, interleaved)
    assert found.shape == exact.shape
    assert (found.double() - exact).abs().max() < BOUND[dtype] * exact.abs().max()
    assert torch.equal(given[:, :, 4:], heads[:, :, 4:]), "values are not turned"
    assert torch.equal(found[..., 2 * pairs :], heads[:, :, :4, 2 * pairs :])
    alone = chosen.rotate(heads[1:, -1:].clone(), table[1:, -1:].contiguous(), 4, interleaved)
    assert torch.equal(alone, found[1:, -1:]), "a token does not depend on the others"


@pytest.mark.narrow("pairs", "pairs")
@pytest.mark.parametrize("width", [16, 50, 1024])
@pytest.mark.parametrize("rows", [1, 9, 40])
def test_gate(kind: Kind, rows: int, width: int) -> None:
    chosen, dtype, device = kind
    torch.manual_seed(0)
    x = (torch.randn(rows, 2 * width) * 8).to(device, dtype)
    x[0, :4] = torch.tensor([0.0, -100.0, 100.0, -1e-30])
    exact = F.silu(x[:, :width].double()) * x[:, width:].double()
    found = chosen.silu_gate(x)
    assert_rounded_once(found, exact)
    assert torch.equal(found[-1], chosen.silu_gate(x[-1:])[0])


def test_the_library_takes_bfloat16_and_float32_on_a_cpu() -> None:
    assert serves(torch.zeros(1, dtype=BF16)) and serves(torch.zeros(1))
    for other in (torch.zeros(1, dtype=torch.float16), torch.zeros(1, dtype=BF16, device="meta")):
        with pytest.raises(AssertionError):
            serves(other)
