"""The bfloat16 library between the products against the same formulas in float64: one rounding, and
no row that depends on another."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.model import elementwise
from magicdec.model.rope import apply_rope

HALF_STEP = 2.0**-8  # of a bfloat16, relative


def assert_rounded_once(found: Tensor, exact: Tensor) -> None:
    scale = exact.abs().clamp(min=1e-3)
    assert ((found.double() - exact).abs() / scale).max() < HALF_STEP * 1.01


@pytest.mark.parametrize("width", [16, 40, 384, 1023])
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_rms_norm(rows: int, width: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 1, width).bfloat16() * 3e-3, torch.randn(width).bfloat16()
    found = elementwise.rms_norm(x, weight, 1e-5)
    assert_rounded_once(found, F.rms_norm(x.double(), (width,), weight.double(), 1e-5))
    last = elementwise.rms_norm(x[-1:], weight, 1e-5)
    assert torch.equal(found[-1:], last), "a row does not depend on the others"
    apart = torch.cat([x, x * 3], dim=-1)[..., :width]  # rows that do not follow each other
    assert torch.equal(elementwise.rms_norm(apart, weight, 1e-5), found)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("size", "pairs"), [(64, 32), (64, 8), (80, 40), (16, 3)])
@pytest.mark.parametrize("tokens", [1, 7, 200])
def test_rotation(tokens: int, size: int, pairs: int, interleaved: bool) -> None:
    torch.manual_seed(0)
    heads, angles = torch.randn(2, tokens, 6, size).bfloat16(), torch.randn(2, tokens, pairs)
    table = torch.stack([angles.cos(), angles.sin()], dim=2)
    exact = apply_rope(heads[:, :, :4].double(), table.double(), interleaved)
    found = heads.clone()
    elementwise.rotate(found, table, 4, interleaved)
    assert (found[:, :, :4].double() - exact).abs().max() < HALF_STEP * exact.abs().max()
    assert torch.equal(found[:, :, 4:], heads[:, :, 4:]), "values are not turned"
    assert torch.equal(found[:, :, :4, 2 * pairs :], heads[:, :, :4, 2 * pairs :])


@pytest.mark.parametrize("width", [16, 50, 1024])
@pytest.mark.parametrize("rows", [1, 9, 100])
def test_gate(rows: int, width: int) -> None:
    torch.manual_seed(0)
    x = (torch.randn(rows, 2 * width) * 8).bfloat16()
    x[0, :4] = torch.tensor([0.0, -100.0, 100.0, -1e-30])
    exact = F.silu(x[:, :width].double()) * x[:, width:].double()
    assert_rounded_once(elementwise.silu_gate(x), exact)
    assert torch.equal(elementwise.silu_gate(x)[-1], elementwise.silu_gate(x[-1:])[0])


def test_only_bfloat16_on_a_cpu_is_served() -> None:
    assert elementwise.serves(torch.zeros(1, dtype=torch.bfloat16))
    assert not elementwise.serves(torch.zeros(1))
    assert not elementwise.serves(torch.zeros(1, dtype=torch.bfloat16, device="meta"))
