"""The Triton kernel for numbers in groups, interpreted if there is no GPU: its products, which
layers call it, and its machine code."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from launches import CountedLaunch, LaunchRecorder, compile_apart
from test_grouped import make_numbers
from tiers import nested
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from magicdec.model.linear import triton
from magicdec.model.linear.choices import TileChoices
from magicdec.model.linear.grouped import GroupedLinear, NumberFormat
from magicdec.model.linear.quantizers import INT4, INT4_G128, INT8, Quantizer
from magicdec.model.linear.tiles import MOST_ROWS, Tile, tiles_for
from magicdec.names import QUANTIZERS, load_named

pytestmark = pytest.mark.wide

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16 = torch.bfloat16
F32 = torch.float32
FORMATS = (
    INT4.format(32),
    INT8.format(128),
    INT4_G128.format(128),
    NumberFormat(4, 32, "float16", True, 0),
    NumberFormat(4, 128, "float16", True, 0),
    NumberFormat(8, 16, "float32", False, -128),
    NumberFormat(8, 32, "float16", False, -128),
    NumberFormat(4, 64, "bfloat16", False, -7),
)
SHAPES = [(2048, 2048), (16384, 2048), (128256, 2048), (4096, 14336)]  # outputs, inputs


def make_layer(
    name: str, shape: tuple[int, int], bias: Tensor | None
) -> tuple[GroupedLinear, Tensor]:
    """A layer with random weights and their values in float64."""
    quantizer: Quantizer = load_named(QUANTIZERS, name)
    numbers = quantizer(torch.randn(shape))
    return GroupedLinear(numbers, bias).to(DEVICE), numbers.dense().double()


@pytest.mark.narrow("values", "pairs")
@pytest.mark.parametrize("rows", [(1,), (2, 3), (17,), (4, 16)], ids=str)
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("int4", (64, 32)),
        ("int4", (97, 96)),
        ("int4", (130, 352)),
        ("int4", (4100, 64)),
        ("int8", (64, 32)),
        ("int8", (97, 48)),
        ("int8", (130, 256)),
        ("int8", (4100, 64)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_a_layer_multiplies_and_a_row_keeps_its_bits(
    dtype: torch.dtype,
    kind: str,
    shape: tuple[int, int],
    rows: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inputs and outputs that fill no tile, and two tiles of rows. `serves` is for CUDA alone. The
    interpreter multiplies float32 by numpy, whose last bits do not follow from the row alone on
    CPUs with AVX2."""
    torch.manual_seed(0)
    monkeypatch.setattr(triton, "serves", lambda *call: True)
    bias = torch.randn(shape[0]).to(DEVICE, dtype)
    x = torch.randn(*rows, shape[1]).to(dtype)
    layer, weights = make_layer(kind, shape, bias)
    out = layer(x.to(DEVICE)).cpu()
    expected = F.linear(x.double(), weights, bias.cpu().double())
    assert out.shape == expected.shape and out.dtype == dtype
    bound = 2**-6 if dtype == BF16 else 1e-6
    assert (out.double() - expected).abs().max() <= bound * expected.abs().max()
    last = layer(x.flatten(0, -2)[-1:].to(DEVICE)).cpu()
    among_others = out.flatten(0, -2)[-1]
    is_by_numpy = DEVICE.type == "cpu" and dtype == F32
    if is_by_numpy and torch.backends.cpu.get_cpu_capability() == "AVX2":
        assert (last[0] - among_others).abs().max() <= bound * expected.abs().max()
    else:
        assert torch.equal(last[0], among_others)


def test_few_rows_on_cuda_are_served() -> None:
    """Others are torch's, and all where Triton is not installed."""
    assert triton.serves("cuda", MOST_ROWS, BF16) and triton.serves("cuda", 1, F32)
    assert not triton.serves("cuda", MOST_ROWS + 1, BF16)
    assert not triton.serves("cuda", 1, torch.float64) and not triton.serves("cpu", 1, BF16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "is_installed", lambda: False)
        assert not triton.serves("cuda", 1, BF16)


def launch_all(recorder: LaunchRecorder, num_rows: int) -> None:
    """The products of Llama-3.2-1B's and Llama-3.1-8B's shapes, and of small ones, by every tile
    for so many rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "kernels", lambda device: recorder)
        for outputs, inputs in (*SHAPES, (704, 96)):
            for dtype in (BF16, F32):
                x = torch.empty(1, num_rows, inputs, dtype=dtype, device="meta")
                for numbers in FORMATS:
                    if inputs % numbers.group:
                        continue
                    stored = torch.int8 if numbers.bits == 8 else torch.uint8
                    size = outputs, inputs * numbers.bits // 8
                    weight = torch.empty(size, dtype=stored, device="meta")
                    scale = torch.empty(inputs // numbers.group, outputs, device="meta")
                    scale = scale.to(getattr(torch, numbers.scale))
                    minimum = scale if numbers.has_minimum else None
                    for tile in tiles_for(num_rows, numbers, dtype == BF16):
                        out = triton.multiply_groups(x, weight, scale, minimum, numbers, tile)
                        assert out.shape == (1, num_rows, outputs)


def test_a_product_is_one_launch() -> None:
    """Which follows from shapes alone: the tensors hold no numbers."""
    for num_rows, row_tiles in ((5, {1}), (28, {1, 2}), (140, {2, 3, 5})):
        recorder = LaunchRecorder()
        launch_all(recorder, num_rows)
        assert {launch.grid[0] for launch in recorder.launches} == row_tiles
        for launch in recorder.launches:
            num_outputs = launch.args[5].shape[-1]
            assert launch.grid[1] == -(-num_outputs // launch.options["BLOCK_N"])
            assert launch.grid[2] == (1 if num_outputs > 65536 else 4)


def launches_to_compile(size: int) -> list[tuple[CountedLaunch, int]]:
    """Launches of `launch_all`, each with a GPU's capability, that together have every combination
    of `size` of these: what a program does in a turn, how many turns there are, the capability."""
    recorder = LaunchRecorder()
    for num_rows in (5, 16, 28, 64, 140):
        launch_all(recorder, num_rows)
    found = list(product(recorder.launches, (80, 90)))
    cases = []
    for launch, capability in found:
        loop_options = {name: launch.options.get(name) for name in ("WIDTH", "SPLITS")}
        a_turn = launch.options | dict.fromkeys(loop_options) | {"dtype": launch.args[0].dtype}
        cases.append({"turn": a_turn, "loop": loop_options, "capability": capability})
    return [found[index] for index in nested(cases, size, 2)]


COMPILE = """
from launches import compile_launch, resources
from test_low_bit_triton import launches_to_compile
from magicdec.model.linear import triton_kernels

for launch, capability in launches_to_compile(SIZE):
    made = compile_launch(triton_kernels.multiply_groups, launch, capability)
    numbers, what = resources(made.asm["cubin"]), (launch, capability)
    assert numbers["STACK"] == numbers["LOCAL"] == 0, (what, numbers)
    assert made.metadata.shared <= 99 * 1024, what
    if launch.options["WIDTH"] > 1024:
        assert "async_wait" in made.asm["ttgir"], "the next weights are not loaded ahead"
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Triton's cache: what the first test has compiled is there for the second."""
    return tmp_path_factory.mktemp("compiled")


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.wide)])
def test_the_kernel_fits_gpus_that_are_not_here(size: int, compiled: Path) -> None:
    """Compiled to machine code: nothing is spilled, shared memory is there, weights are loaded
    ahead."""
    compile_apart(COMPILE.replace("SIZE)", f"{size})"), compiled)


@pytest.mark.parametrize("kind", FORMATS, ids=str)
@pytest.mark.parametrize("rows", [1, 17, 40, 140])
def test_numbers_in_groups_are_multiplied_in_bfloat16(
    kind: NumberFormat, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU by the assembly of each `least`, exactly; a row has the same bits in any batch."""
    monkeypatch.setattr(triton, "serves", lambda *call: True)
    numbers = make_numbers((130, 256), kind)
    layer = GroupedLinear(numbers, None).to(DEVICE)
    x = torch.randn(rows, 256).to(DEVICE, BF16)
    out = layer(x)
    expected = F.linear(x.cpu().double(), numbers.dense().double())
    error = (out.cpu().double() - expected).abs()
    assert (error <= expected.abs() * 2**-7 + 1e-5 * expected.abs().max()).all()
    assert torch.equal(layer(x[-1:])[0], out[-1])


@pytest.mark.parametrize("rows", [1, 9, 28, 50, 140])
def test_every_tile_multiplies(rows: int) -> None:
    """Against float64; also outputs that fill none, and inputs in several parts."""
    numbers = INT4_G128(torch.randn(200, 640))
    layer = GroupedLinear(numbers, None).to(DEVICE)
    x = torch.randn(rows, 640).to(DEVICE, BF16)
    expected = F.linear(x.cpu().double(), numbers.dense().double())
    tiles = tiles_for(rows, layer.format, True)
    assert len(tiles) > 1
    for tile in tiles:
        out = triton.multiply_groups(x, layer.weight, layer.scale, None, layer.format, tile)
        error = (out.cpu().double() - expected).abs()
        assert (error <= expected.abs() * 2**-7 + 1e-5 * expected.abs().max()).all(), tile


def test_the_fastest_tile_is_measured_once_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file that other ranks write, too, and that may be cut off. A GPU's clock is made up."""
    path = tmp_path / "tiles.json"
    tiles = tiles_for(1, INT4_G128.format(128), True)
    times = dict(zip(tiles, (3.0, 1.0, 2.0), strict=True))
    choices = TileChoices(path)
    other_rank = TileChoices(path)
    assert choices.choose("a", tiles, None) == tiles[0] and not path.exists()
    assert choices.choose("a", tiles, times.__getitem__) == tiles[1]
    assert choices.choose("a", tiles, None) == tiles[1]  # as in a capture
    other_rank.choose("b", tiles[:1], times.__getitem__)
    kept = TileChoices(path)
    assert kept.choose("a", tiles, lambda tile: -times[tile]) == tiles[1]
    assert kept.choose("b", tiles, None) == tiles[0]
    assert kept.choose("a", tiles[::2], times.__getitem__) == tiles[2]  # of another version
    path.write_text('{"a":')
    assert TileChoices(path).choose("a", tiles, None) == tiles[0]

    recorder = LaunchRecorder()
    capturing = [False]
    monkeypatch.setattr(triton, "kernels", lambda device: recorder)
    monkeypatch.setattr(triton, "choices_on", lambda device: TileChoices(tmp_path / "card.json"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])

    def seconds(call: Callable[[], object]) -> float:
        call()
        return -recorder.launches[-1].options["BLOCK_N"]

    monkeypatch.setattr(triton, "median_seconds", seconds)
    layer = GroupedLinear(INT4_G128(torch.randn(64, 256)), None)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(1, 256, dtype=BF16, device="cuda")
        for is_captured in (True, False, True):
            capturing[0] = is_captured
            recorder.launches.clear()
            stored = (layer.weight, layer.scale, None, layer.format)
            tile = triton.chosen_tile(x, *stored)
            assert tile.outputs == (64 if is_captured and not kept_of(tmp_path) else 128)
            assert len(recorder.launches) == (0 if is_captured else len(tiles))
    assert kept_of(tmp_path) == {"64x256, 4 bits, 8 rows": [8, 128, 4, 3]}


def kept_of(folder: Path) -> dict[str, list[int]]:
    file = folder / "card.json"
    return json.loads(file.read_text()) if file.exists() else {}


def test_tiles_by_rows() -> None:
    """Groups of 128 in bfloat16 have a choice; the widest tiles would spill other numbers."""
    plain, others = INT4_G128.format(128), (INT8.format(128), INT4.format(128))
    for rows in range(1, 2 * MOST_ROWS):
        for tile in tiles_for(rows, plain, True):
            assert tile.rows <= 8 or tile.rows < 2 * rows
            assert tile.rows * tile.outputs // (32 * tile.warps) <= 64  # sums of a thread
        assert all(tile.rows < 128 for kind in others for tile in tiles_for(rows, kind, True))
        assert len(tiles_for(rows, plain, False)) == 1
    assert tiles_for(140, plain, True)[-1] == Tile(128, 128, 8, stages=2)
    assert tiles_for(28, plain, True)[-1] == Tile(32, 64, 2)
    assert Tile(32, 64, 2) not in tiles_for(28, replace(plain, has_minimum=True), True)


def test_the_constants_of_the_assembly_are_the_numbers_that_it_adds() -> None:
    """And groups are divided alike for any number of rows."""
    for least in range(-16, 1):
        bits = torch.tensor([triton.added_to_halves(least)], dtype=torch.int32).to(torch.int16)
        assert bits.view(BF16).item() == -(128 - least)
    kind = FORMATS[0]
    for outputs in (97, 4096, 60000, 70000, 128256):
        recorder = LaunchRecorder()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton, "kernels", lambda device, recorder=recorder: recorder)
            for rows in (1, 17, 64):
                x = torch.empty(rows, 64, dtype=BF16, device="meta")
                weight = torch.empty(outputs, 32, dtype=torch.uint8, device="meta")
                scale = torch.empty(2, outputs, device="meta")
                triton.multiply_groups(x, weight, scale, None, kind)
        assert len({launch.options["SPLITS"] for launch in recorder.launches}) == 1
