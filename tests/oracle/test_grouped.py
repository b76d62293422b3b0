"""Linear layers with numbers in groups: with exact weights, the bits of the float32 layer with the
weights that the numbers mean; with rounded activations, sums of integers. On every set of
instructions, in torch and in Triton."""

import math
from dataclasses import asdict, replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from test_linear import AVX2, AVX512, BF16, F32
from tiers import covering
from torch import Tensor

from magicdec.model.linear import grouped, packed, triton
from magicdec.model.linear.grouped import (
    SCALES,
    GroupedLinear,
    GroupedNumbers,
    NumberFormat,
    common_format,
    narrowed,
    stack_rows,
)
from magicdec.model.linear.packed import PackedLinear, library, unpack_groups

PORTABLE = ("-march=x86-64",)
# CPUs that multiply and add with one rounding, which compute the same bits.
FUSED = {"any": (), "AVX2": AVX2, "AVX-512": AVX512}
CPUS = FUSED | {"portable": PORTABLE}
ALL_FORMATS = [
    NumberFormat(bits, group, scale, has_minimum, least)
    for (bits, least), group, scale, has_minimum in product(
        ((4, 0), (4, -8), (8, -128)), (16, 32, 64, 128), SCALES, (False, True)
    )
]
FORMATS = [ALL_FORMATS[index] for index in sorted(covering([*map(asdict, ALL_FORMATS)], 2))]
FEW_FORMATS = [ALL_FORMATS[index] for index in sorted(covering([*map(asdict, ALL_FORMATS)], 1))]
ROWS = (1, 2, 3, 4, 7, 11, 13, 50)


def make_numbers(shape: tuple[int, int], kind: NumberFormat, seed: int = 0) -> GroupedNumbers:
    """All numbers of the format, and scales of both signs with the significant bits of float16,
    zeros among them."""
    torch.manual_seed(seed)
    outputs, width = shape
    numbers = torch.randint(kind.least, kind.least + 2**kind.bits, shape).to(torch.int8)
    parts = [(0.1 * torch.randn(outputs, width // kind.group)).half() for _ in range(2)]
    parts[0][0] = 0.0
    scale, minimum = (part.to(getattr(torch, kind.scale)) for part in parts)
    return GroupedNumbers(kind, numbers, scale, minimum if kind.has_minimum else None)


def weights_of(numbers: GroupedNumbers) -> Tensor:
    """By the definition, number by number's group."""
    group = numbers.format.group
    weights = torch.empty(numbers.numbers.shape)
    for k in range(weights.shape[1]):
        weights[:, k] = numbers.numbers[:, k].float() * numbers.scale[:, k // group].float()
        if numbers.minimum is not None:
            weights[:, k] += numbers.minimum[:, k // group].float()
    return weights


def ordered(numbers: GroupedNumbers) -> GroupedNumbers:
    """The same columns, which belong to inputs in an order that is neither theirs nor its own
    inverse."""
    width = numbers.numbers.shape[1]
    generator = torch.Generator().manual_seed(width)
    return replace(numbers, order=torch.randperm(width, generator=generator).int())


def rounded(x: Tensor, group: int) -> Tensor:
    """Activations as int8 times a scale for each group, float64."""
    groups = x.float().unflatten(-1, (-1, group))
    most = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(most > 0, torch.full_like(most, 127) / most, 0.0)  # `127 /` rounds twice
    halves = torch.where(groups < 0, -0.5, 0.5)
    numbers = (groups.double() * inverse.double() + halves).float().trunc()
    return (numbers.double() * (most / 127).double()).flatten(-2)


@pytest.mark.narrow("pairs")
@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_exact_weights_have_the_bits_of_the_float32_layer(
    kind: NumberFormat, cpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = library(*CPUS[cpu])
    monkeypatch.setattr(packed, "library", lambda: found)
    for shape in ((97, 256), (1, 128), (130, 384)):
        numbers = make_numbers(shape, kind)
        weights = weights_of(numbers)
        assert torch.equal(numbers.dense(), weights)
        bias = torch.randn(shape[0])
        layer = PackedLinear(numbers, bias)
        plain = PackedLinear(weights, bias)
        assert torch.equal(layer.dense(), weights)
        for rows in ROWS:
            x = torch.randn(rows, shape[1])
            assert torch.equal(layer(x), plain(x)), (shape, rows)
            narrow = x.bfloat16()
            in_bfloat16 = PackedLinear(numbers, bias.bfloat16())(narrow)
            wide = PackedLinear(weights, bias.bfloat16().float())(narrow.float())
            assert torch.equal(in_bfloat16, wide.bfloat16()), (shape, rows)


@pytest.mark.narrow("values")
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_rounded_activations_give_sums_of_integers(
    kind: NumberFormat, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every set of instructions with fused multiply-adds computes the same bits, and a row has them
    in any batch."""
    shape = (97, 256)
    numbers = make_numbers(shape, kind)
    bias = torch.randn(shape[0]).to(dtype)
    layer = PackedLinear(numbers, bias, rounds=True)
    libraries = [library(*flags) for flags in (*FUSED.values(), PORTABLE)]
    for rows in ROWS:
        x = torch.randn(rows, shape[1]).to(dtype)
        x[0, : kind.group] = 0.0
        monkeypatch.setattr(packed, "library", lambda: libraries[0])
        out = layer(x)
        wide = rounded(x, kind.group)
        expected = F.linear(wide, weights_of(numbers).double(), bias.double())
        error = (out.double() - expected).abs()
        bound = expected.abs() * 2**-8 if dtype == BF16 else 0.0
        assert (error <= bound + expected.abs().max() * 1e-5).all()
        assert torch.equal(layer(x[-1:])[0], out[-1])
        for other in libraries[1:-1]:
            monkeypatch.setattr(packed, "library", lambda other=other: other)
            assert torch.equal(layer(x), out)
        monkeypatch.setattr(packed, "library", lambda: libraries[-1])
        torch.testing.assert_close(layer(x), out, rtol=2**-7 if dtype == BF16 else 1e-4, atol=1e-4)


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_a_row_that_is_not_finite_has_no_finite_output(
    number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = PackedLinear(make_numbers((97, 128), FEW_FORMATS[0]), rounds=True)
    x = torch.randn(12, 128)
    x[3, 40] = number
    for flags in (*FUSED.values(), PORTABLE):
        found = library(*flags)
        monkeypatch.setattr(packed, "library", lambda found=found: found)
        out = layer(x)
        assert not out[3, 1:].isfinite().any()  # the scales of output 0 are zeros
        assert out[[0, 1, 2, *range(4, 12)]].isfinite().all()


@pytest.mark.parametrize("rounds", [False, True], ids=["exact", "rounded"])
def test_more_rows_than_stay_in_a_cache_are_the_same_rows(rounds: bool) -> None:
    """4 MiB are 2,048 rows of bytes, and 512 of float32."""
    numbers = make_numbers((97, 2048), FEW_FORMATS[0])
    layer = PackedLinear(numbers, rounds=rounds)
    x = torch.randn(2100, 2048)
    out = layer(x)
    for rows in (slice(0, 7), slice(500, 530), slice(2040, 2100)):
        assert torch.equal(layer(x[rows]), out[rows])


@pytest.mark.narrow("pairs")
@pytest.mark.parametrize("rounds", [False, True], ids=["exact", "rounded"])
@pytest.mark.parametrize("cpu", FUSED)
@pytest.mark.parametrize("kind", FEW_FORMATS, ids=str)
def test_columns_in_an_order_have_the_bits_of_inputs_in_that_order(
    kind: NumberFormat, cpu: str, rounds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = library(*FUSED[cpu])
    monkeypatch.setattr(packed, "library", lambda: found)
    for shape in ((97, 256), (130, 640)):
        plain = make_numbers(shape, kind)
        numbers = ordered(plain)
        assert numbers.order is not None
        weights = torch.empty(shape)
        columns = weights_of(plain).T
        for column, place in zip(columns, numbers.order.tolist(), strict=True):
            weights[:, place] = column
        for dtype in (F32, BF16):
            bias = torch.randn(shape[0]).to(dtype)
            layer = PackedLinear(numbers, bias, rounds=rounds)
            assert torch.equal(layer.dense(), weights)
            assert torch.equal(numbers.dense(), weights)
            alike = PackedLinear(plain, bias, rounds=rounds)
            for rows in ROWS:
                x = torch.randn(rows, shape[1]).to(dtype)
                out = layer(x)
                assert torch.equal(out, alike(x[:, numbers.order])), (shape, rows)
                assert torch.equal(out[-1:], layer(x[-1:])), (shape, rows)
            if not rounds:
                expected = F.linear(x.double(), weights.double(), bias.double())
                error = (out.double() - expected).abs().max()
                assert error <= expected.abs().max() * (2**-8 if dtype == BF16 else 1e-5)


@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_layers_in_torch_and_in_triton_compute_the_same_weights(
    kind: NumberFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interpreted; on a GPU `tests/oracle/test_low_bit_triton.py` compiles the kernel."""
    pytest.importorskip("triton")
    shape = (70, 256)
    numbers = make_numbers(shape, kind)
    bias = torch.randn(shape[0])
    layer = GroupedLinear(numbers, bias)
    assert torch.equal(layer.dense(), weights_of(numbers))
    assert torch.equal(layer.numbers(slice(3, 9)).numbers, numbers.numbers[3:9])
    expected_bytes = numbers.numbers.numel() * kind.bytes_per_weight
    tensors = (layer.weight, layer.scale, layer.minimum)
    assert sum(t.nbytes for t in tensors if t is not None) == expected_bytes
    monkeypatch.setattr(grouped, "WIDENED", 1 << 13)  # several parts
    x = torch.randn(2, 3, 256)
    expected = F.linear(x.double(), weights_of(numbers).double(), bias.double())
    for is_triton in (False, True):
        monkeypatch.setattr(triton, "serves", lambda *call, is_triton=is_triton: is_triton)
        error = (layer(x).double() - expected).abs().max()
        assert error <= 2e-6 * expected.abs().max()


@pytest.mark.parametrize("is_triton", [False, True], ids=["torch", "triton"])
@pytest.mark.parametrize("kind", FEW_FORMATS, ids=str)
def test_layers_in_torch_and_in_triton_take_inputs_in_an_order(
    kind: NumberFormat, is_triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(triton, "serves", lambda *call: is_triton)
    monkeypatch.setattr(grouped, "WIDENED", 1 << 13)  # several parts
    plain = make_numbers((70, 256), kind)
    numbers = ordered(plain)
    layer = GroupedLinear(numbers, None)
    assert layer.order is not None
    assert torch.equal(layer.dense()[:, layer.order], weights_of(plain))
    x = torch.randn(2, 3, 256)
    assert torch.equal(layer(x), GroupedLinear(plain, None)(x[..., layer.order]))
    expected = F.linear(x.double(), layer.dense().double())
    assert (layer(x).double() - expected).abs().max() <= 2e-6 * expected.abs().max()


def test_many_tiles_are_split_and_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough inputs for four programs a tile, rows for two tiles; counters are zeros again."""
    pytest.importorskip("triton")
    kind = NumberFormat(4, 32, "float16", True, 0)
    numbers = make_numbers((33, 32 * 37), kind)
    layer = GroupedLinear(numbers, None)
    monkeypatch.setattr(triton, "serves", lambda *call: True)
    for rows in (1, 17, 70):
        x = torch.randn(rows, 32 * 37)
        expected = F.linear(x.double(), weights_of(numbers).double())
        assert (layer(x).double() - expected).abs().max() <= 2e-6 * expected.abs().max()
    assert not triton.counters_on(torch.device("cpu"), 1).any()


@pytest.mark.parametrize("kind", FEW_FORMATS, ids=str)
def test_packed_numbers_are_found_again(kind: NumberFormat) -> None:
    numbers = make_numbers((97, 256), kind)
    layer = PackedLinear(numbers)
    found = unpack_groups(layer.packed, kind, 97)
    assert torch.equal(found.numbers, numbers.numbers) and torch.equal(found.scale, numbers.scale)
    if numbers.minimum is not None:
        assert found.minimum is not None and torch.equal(found.minimum, numbers.minimum)
    num_bytes = 128 * 256 * kind.bytes_per_weight  # outputs fill up two blocks
    assert layer.packed.nbytes == num_bytes


def test_parts_of_several_formats_are_stacked_exactly() -> None:
    """As q, k and v of a file whose types differ."""
    kinds = [
        NumberFormat(4, 32, "float16", True, 0),
        NumberFormat(8, 16, "float32", False, -128),
        NumberFormat(4, 64, "bfloat16", False, -8),
    ]
    parts = [make_numbers((5, 128), kind, seed) for seed, kind in enumerate(kinds)]
    whole = stack_rows(parts)
    assert whole.format == NumberFormat(8, 16, "float32", True, -128)
    assert torch.equal(whole.dense(), torch.cat([weights_of(part) for part in parts]))
    assert common_format([kinds[2], replace(kinds[2], group=32)]) == replace(kinds[2], group=32)
    mixed = stack_rows([ordered(part) for part in parts])
    expected = torch.cat([ordered(part).dense() for part in parts])
    assert mixed.order is not None and torch.equal(mixed.dense(), expected)
    four = NumberFormat(4, 32, "float16", True, 0)
    assert common_format([four, replace(four, least=-8)]) == replace(four, bits=8, least=-128)


def test_scales_are_kept_in_the_narrowest_dtype_that_holds_them() -> None:
    kind = NumberFormat(8, 32, "float32", True, -128)
    numbers = make_numbers((5, 64), kind)
    half = narrowed(numbers)
    assert half.format.scale == "float16" and torch.equal(half.dense(), numbers.dense())
    numbers.scale[0, 0] = 1.0 + 2**-20
    assert narrowed(numbers).format.scale == "float32"
    numbers.scale[:] = 2.0**-100
    numbers.minimum[:] = 1.0  # type: ignore[index]
    assert narrowed(numbers).format.scale == "bfloat16"
