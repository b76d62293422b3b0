"""Weights that this project quantises: rounding by hand, every family's shards compared with the
whole model, checkpoints that hold numbers in groups, and errors."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_files import CPU, EVEN, Q_PROJ, Tensors, make_tensors, refuse, write
from safetensors.torch import load_file, save_file
from tiny_families import MODELS, make_checkpoint
from torch import Tensor, nn

from magicdec.config.weight_formats import WEIGHT_FORMATS
from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.checkpoint.convert import convert, find_checkpoint, find_damage, quantized
from magicdec.model.checkpoint.source import ModelSource, find_model, load_transformer
from magicdec.model.checkpoint.weight_files import Index, WeightSource
from magicdec.model.checkpoint.weight_map import untie_head, weight_map
from magicdec.model.config import ROUTER, SHARED_GATE
from magicdec.model.linear.fp8 import Fp8Linear
from magicdec.model.linear.grouped import GroupedLinear, GroupedNumbers
from magicdec.model.linear.quantizers import CUTS, INT4, INT4_G128, INT8, Quantizer
from magicdec.model.transformer import Transformer
from magicdec.names import DRAFT_WEIGHTS, QUANTIZERS, STORED, load_named

TIED = replace(EVEN, tie_word_embeddings=True)
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


def test_what_is_known_without_tensors_is_what_is_made() -> None:
    """Bytes of matrices, with their scales and what fills up outputs, and sizes of groups."""
    assert tuple(WEIGHT_FORMATS) == DRAFT_WEIGHTS
    for name, kind in WEIGHT_FORMATS.items():
        for outputs, inputs in ((7, 96), (16, 256), (5, 192)):
            weight = torch.randn(outputs, inputs)
            made: nn.Module = Fp8Linear(weight, None)
            padding = -outputs % kind.output_multiple
            if kind.is_native:
                quantizer = load_named(QUANTIZERS, name)
                made = GroupedLinear(quantizer(weight), None)
                sizes = quantizer.bits, quantizer.least_group, max(quantizer.groups)
                assert sizes == (kind.bits, kind.least_group, kind.most_group)
            expected = (outputs + padding) * inputs * kind.bytes_of(inputs)
            assert sum(x.nbytes for x in made.parameters()) == expected, name


def test_by_hand() -> None:
    rows = torch.zeros(4, 16)
    rows[0, :4] = torch.tensor([254.0, -1.0, 3.0, 5.0])
    rows[2, :2] = torch.tensor([-127 / 64, 63.5 / 64])
    rows[3, :4] = torch.tensor([127.0, 63, 0, 1])
    numbers = INT8(rows)
    assert numbers.scale.tolist() == [[2.0], [0.0], [1 / 64], [1.0]]
    # Halves go to the even neighbour: -0.5, 1.5, 2.5; 63.5.
    found = [row[:4] for row in numbers.numbers.tolist()]
    assert found == [[127, 0, 2, 2], [0] * 4, [-127, 64, 0, 0], [127, 63, 0, 1]]
    rows = torch.zeros(2, 32)
    rows[0, :4] = torch.tensor([16.0, -14.0, 3.0, 5.0])
    numbers = INT4(rows)
    assert numbers.scale.tolist() == [[-2.0], [0.0]]
    assert numbers.numbers[0, :4].tolist() == [-8, 7, -2, -2] and not numbers.numbers[1].any()


def test_wide_groups_of_int4_are_cut_where_that_is_nearer() -> None:
    """By trying all cuts of each group, in float64."""
    torch.manual_seed(0)
    rows = torch.randn(40, 256)
    rows[3, 5] = 20.0
    rows[4] = 0.0
    kept = INT4_G128(rows)
    found = (kept.dense().double() - rows.double()).unflatten(1, (2, 128)).square().sum(2)
    errors = []
    for share in (1.0, *CUTS):
        groups = rows.unflatten(1, (2, 128))
        largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
        scale = (largest / -8 * share).bfloat16().double()
        scale[scale == 0] = 1.0
        rounded = (groups.double() / scale).round().clamp(-8, 7) * scale
        errors.append((rounded - groups.double()).square().sum(2))
    least = torch.stack(errors).amin(0)
    assert torch.allclose(found, least, rtol=1e-4, atol=1e-9)
    cut = (errors[0] > 1.001 * least).float().mean()
    assert 0.5 < cut < 1 and found.sum() < 0.93 * errors[0].sum()


@pytest.mark.parametrize("name", QUANTIZERS)
def test_no_weight_leaves_the_range(name: str) -> None:
    """Also if a scale is too small for an exact division."""
    quantizer: Quantizer = load_named(QUANTIZERS, name)
    rows = torch.zeros(4, 128)
    rows[0, :3] = torch.tensor([1e-45, 3e-45, -3e-45])
    rows[1, :2] = torch.tensor([1e-38, -1e-38])
    rows[2, :2] = torch.tensor([5e4, -5e4])
    rows[3] = 1e-5 * torch.randn(128, generator=torch.Generator().manual_seed(0))
    found = quantizer(rows)
    most = quantizer.least + 2**quantizer.bits - 1
    assert found.numbers.min() >= quantizer.least and found.numbers.max() <= most
    assert (found.dense()[2:] - rows[2:]).abs().max() <= 5.1e4 / (8 if quantizer.bits == 4 else 127)


@pytest.mark.parametrize("width", [16, 48, 96, 192, 11008, 4544])
def test_groups_are_the_widest_that_divide_the_inputs(width: int) -> None:
    group = INT8.format(width).group
    assert width % group == 0 and (group == 128 or width % (2 * group))
    assert INT8.divides(width) and not INT8.divides(width + 8)
    assert INT4.divides(width) == (width % 32 == 0)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelSource]:
    """The checkpoint of each family, made once."""
    made: dict[str, ModelSource] = {}

    def get(name: str) -> ModelSource:
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            make_checkpoint(directory, name, mlp_units=96)
            made[name] = find_model("--model", str(directory))
        return made[name]

    return get


def load(
    source: ModelSource,
    shard: Shard = Shard(),
    dtype: torch.dtype = torch.float32,
    stored_as: str = "int8",
) -> Tensors:
    """Plain tensors, and the weights of matrices in groups, as float32."""
    place = (shard, None, dtype, CPU)
    model = load_transformer(source.config, source.weights, *place, stored_as=stored_as)
    assert isinstance(model, Transformer) and not model.training
    tensors = dict(model.state_dict())
    for name, module in model.named_modules():
        if hasattr(module, "scale"):
            del tensors[f"{name}.scale"]
            tensors.pop(f"{name}.minimum", None)
            tensors[f"{name}.weight"] = module.dense()
    return tensors


NO_MATRICES = ("embedding", f".{ROUTER}.", f".{SHARED_GATE}.")
TABLES = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")


def plainly(whole: Tensor) -> Tensor:
    """A matrix [N, K] in int8, group by group."""
    width = whole.shape[1]
    group = next(size for size in (128, 64, 32, 16) if width % size == 0)
    weights = torch.empty_like(whole)
    for first in range(0, width, group):
        part = whole[:, first : first + group]
        scale = (part.abs().max(dim=1, keepdim=True).values / 127).bfloat16().float()
        scale[scale == 0] = 1
        weights[:, first : first + group] = (part / scale).round().clamp(-127, 127) * scale
    return weights


def by_the_whole(source: ModelSource, shard: Shard) -> Tensors:
    """The expected weights of `shard`: each stored matrix quantised as a whole, then sliced."""
    config = untie_head(source.config)
    out = {}
    for parameter, pieces in weight_map(config, shard, range(config.num_layers)).items():
        parts = []
        for piece in pieces:
            name = piece.name
            if name == HEAD and source.config.tie_word_embeddings:
                name = next(n for n in source.weights.tensors if n.endswith(TABLES))
            whole = source.weights.read(name).float()
            whole = whole.T if piece.transposed else whole
            rows = slice(*piece.rows)
            columns = slice(*(piece.columns or (0, None)))
            is_whole = any(word in parameter for word in NO_MATRICES)
            if len(piece.full_shape) == 1 or is_whole:
                parts.append(whole[rows] + piece.offset)
            else:
                parts.append(plainly(whole)[rows, columns])
        out[parameter] = torch.cat(parts)
    return out


@pytest.mark.narrow(8)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_shards_have_the_weights_of_the_whole(
    name: str, num_ranks: int, family: Callable[[str], ModelSource]
) -> None:
    """Equal to the bit for every layout: separate, stacked, grouped, transposed, tied; on ranks
    whose inputs begin within a group too."""
    source = family(name)
    c = source.config
    shards = [Shard(rank, num_ranks) for rank in range(num_ranks)]
    ends = [shard.heads(c.num_heads, c.num_kv_heads)[0][1] * c.head_dim for shard in shards]
    ends += [shard.mlp_units(width)[1] for shard in shards for width in c.mlp_widths]
    if any(end % 16 for end in ends):
        pytest.skip("ranks have inputs that no group divides, which is refused")
    for shard in shards:
        expected = by_the_whole(source, shard)
        found = load(source, shard)
        assert found.keys() == expected.keys()
        for parameter, tensor in expected.items():
            assert torch.equal(found[parameter], tensor), parameter


def converted(directory: Path, source: Path, name: str = "int8", dtype: str | None = None) -> Path:
    """`source` quantised, with its config, in `directory`."""
    found = quantized(find_checkpoint("--checkpoint_dir", source), name)
    convert(found, directory / "model.safetensors", dtype, widens=False)
    return directory


@pytest.mark.narrow(3)
@pytest.mark.parametrize("name", ["qwen2.5", "gpt2", "starcoder", "falcon-40b", "bloom", "gptj"])
def test_stored_int8_is_int8_made_while_loading(
    name: str, tmp_path: Path, family: Callable[[str], ModelSource]
) -> None:
    source = family(name)
    out = converted(tmp_path, Path(str(source.tokenizer_path)))
    stored = find_model("--model", str(out))
    assert stored.has_groups and not source.has_groups
    # 64, 96 and 256 inputs have groups of 64, 32 and 128.
    assert stored.config.stored_bytes is not None
    assert 1 + 2 / 128 < stored.config.stored_bytes < 1 + 2 / 32
    for shard in (Shard(), Shard(1, 2)):
        made = load(source, shard)
        read = load(stored, shard, stored_as=STORED)
        assert made.keys() == read.keys()
        assert all(torch.equal(made[n], read[n]) for n in made)
        again = load(stored, shard)  # quantised once more: the same numbers
        assert all(torch.equal(made[n], again[n]) for n in made)
    widened = load_transformer(stored.config, stored.weights, Shard(), None, torch.float32, CPU)
    ours = load(stored, stored_as=STORED)
    assert all(torch.equal(t, ours[n]) for n, t in widened.state_dict().items())


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("out", ["model.safetensors", "model.pth"])
def test_every_format_is_stored_and_found_again(tmp_path: Path, out: str, name: str) -> None:
    (tmp_path / "in").mkdir()
    tensors = make_tensors(TIED)
    found = find_checkpoint("--checkpoint_dir", write(tmp_path / "in", tensors, TIED))
    source = quantized(found, name)
    path = tmp_path / "out" / out
    written = convert(source, path, "bfloat16", widens=False)
    assert find_damage(path) is None
    stored = find_model("--model", str(path))
    assert stored.tensors[EMBEDDING].dtype == stored.tensors["model.norm.weight"].dtype
    assert stored.tensors[EMBEDDING].numbers is None and not stored.config.tie_word_embeddings
    quantizer: Quantizer = load_named(QUANTIZERS, name)
    read = 0
    # The head is quantised from the float32 embedding, not from the rounded one.
    for matrix, origin in ((Q_PROJ, Q_PROJ), (HEAD, EMBEDDING)):
        expected = quantizer(tensors[origin])
        ours = stored.weights.read_numbers(matrix)
        assert_equal(ours, expected)
        some = stored.weights.read_numbers(matrix, (slice(3, 9),))
        assert_equal(some, quantizer(tensors[origin][3:9]))
        assert torch.equal(stored.weights.read(matrix), expected.dense())
        read += int(expected.numbers.numel() * expected.format.bytes_per_weight)
    sizes = {n: torch.Size(t.shape).numel() for n, t in written.items()}
    names = [n for n in sizes if n.startswith((Q_PROJ, HEAD)) and not n.endswith("_least")]
    kinds = {n: getattr(torch, written[n].dtype) for n in names}
    assert sum(sizes[n] * kinds[n].itemsize for n in names) == read
    convert(find_checkpoint("--checkpoint_dir", path.parent), tmp_path / "again.pth", None)
    again = torch.load(tmp_path / "again.pth", weights_only=True)
    everything = load_file(path) if path.suffix == ".safetensors" else torch.load(path)
    assert again.keys() == everything.keys() == written.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in everything.items())


def assert_equal(ours: GroupedNumbers, expected: GroupedNumbers) -> None:
    assert ours.format == expected.format
    assert torch.equal(ours.numbers, expected.numbers) and torch.equal(ours.scale, expected.scale)
    assert (ours.minimum is None) == (expected.minimum is None)
    if ours.minimum is not None and expected.minimum is not None:
        assert torch.equal(ours.minimum, expected.minimum)


@pytest.mark.parametrize("transposed", [False, True])
def test_an_int8_checkpoint_with_a_scale_for_each_output(
    transposed: bool, tmp_path: Path, family: Callable[[str], ModelSource]
) -> None:
    """As `model convert` wrote them until 2026-11-27: weight = int8 * scale, exactly."""
    source = family("gpt2" if transposed else "qwen2.5")
    directory = Path(str(source.tokenizer_path))
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    tensors = {}
    expected = {}
    converted_source = quantized(source, "int8")
    for name, header in converted_source.tensors.items():
        if header.numbers is None:
            tensors[name] = source.weights.read(name)
            continue
        shape = header.shape
        numbers = torch.randint(-127, 128, shape).to(torch.int8)
        is_transposed = transposed and name != HEAD
        scale = torch.rand(shape[1 if is_transposed else 0]) / 100
        tensors |= {name: numbers, f"{name}_scale": scale}
        expected[name] = numbers.float() * (scale if is_transposed else scale[:, None])
    save_file(tensors, tmp_path / "model.safetensors")
    old = find_model("--model", str(tmp_path))
    assert old.has_groups and old.config.stored_bytes is not None
    for name, weights in expected.items():
        assert torch.equal(old.weights.read(name), weights), name
    for shard in (Shard(), Shard(0, 2), Shard(1, 2)):
        ours = load(old, shard, stored_as=STORED)
        plain = load_transformer(old.config, old.weights, shard, None, torch.float32, CPU)
        assert all(torch.equal(ours[n], t) for n, t in plain.state_dict().items())
    convert(old, tmp_path / "new" / "model.safetensors", None)
    new = find_model("--model", str(tmp_path / "new"))
    for name, weights in expected.items():
        assert torch.equal(new.weights.read(name), weights), name


class CountingWeights(WeightSource):
    """A weight source that records the largest read and the columns that were read."""

    def __init__(self, source: ModelSource) -> None:
        super().__init__()
        self.source = source.weights
        self.largest = 0
        self.reads = 0
        self.tensors = source.weights.tensors

    def read(self, name: str, index: Index = ()) -> Tensor:
        values = self.source.read(name, index)
        self.largest = max(self.largest, values.numel())
        self.reads = self.reads + 1
        return values


def test_a_matrix_is_read_in_parts_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magicdec.model.checkpoint.weight_files.READ_ELEMENTS", 300 * 32)
    config = replace(EVEN, vocab_size=700)
    source = find_model("--model", str(write(tmp_path, make_tensors(config), config)))
    counting = CountingWeights(source)
    place = (Shard(0, 2), None, torch.float32, CPU)
    load_transformer(config, counting, *place, stored_as="int8")
    assert counting.largest == 256 * 32  # of an embedding of 700 rows: parts of 256
    plain = CountingWeights(source)
    load_transformer(config, plain, *place)
    assert counting.reads == plain.reads


def test_infinities_are_refused(tmp_path: Path) -> None:
    for value in (float("inf"), float("nan")):
        tensors = make_tensors(EVEN)
        tensors[Q_PROJ][3, 4] = value
        source = find_model("--model", str(write(tmp_path, tensors, EVEN)))
        with pytest.raises(
            ValueError, match=rf"model\.safetensors: tensor {Q_PROJ} holds {value:g}"
        ):
            load(source)


def test_scales_that_overflow_are_refused(tmp_path: Path) -> None:
    """Those of llama.cpp's formats are float16."""
    tensors = make_tensors(EVEN)
    tensors[Q_PROJ][3, 4] = 6e5 * 127
    source = find_model("--model", str(write(tmp_path, tensors, EVEN)))
    with pytest.raises(ValueError, match=rf"tensor {Q_PROJ}_scale holds inf at \[3, 0\]"):
        convert(quantized(source, "q8_0"), tmp_path / "out" / "model.safetensors", None)
    convert(quantized(source, "int8"), tmp_path / "out" / "model.safetensors", None)


def test_groups_that_do_not_divide_are_refused_by_name(tmp_path: Path) -> None:
    source = find_model("--model", str(write(tmp_path, make_tensors())))
    message = r"--quantize int8: groups of 16 do not divide the 40 inputs of .*0\.mlp\.down_proj"
    with pytest.raises(ValueError, match=message):
        quantized(source, "int8")


def change(directory: Path, **tensors: Tensor | None) -> Path:
    """An int8 checkpoint with some tensors replaced, or removed."""
    (directory / "in").mkdir()
    converted(directory, write(directory / "in", make_tensors(EVEN), EVEN))
    stored = load_file(directory / "model.safetensors")
    stored = {n: t for n, t in (stored | tensors).items() if t is not None}
    save_file(stored, directory / "model.safetensors")
    return directory


SCALE = f"{Q_PROJ}_scale"
LEAST = f"{Q_PROJ}_least"
WRONG = {
    "no scale": (SCALE, None, f"{Q_PROJ} is stored as int8, expected floating-point"),
    "no numbers": (Q_PROJ, None, f"{Q_PROJ} is missing"),
    "a matrix in float": (
        Q_PROJ,
        torch.zeros(32, 32),
        f"{Q_PROJ} is stored as float32, expected int8 or uint8",
    ),
    "a scale of int32": (
        SCALE,
        torch.zeros(32, 1, dtype=torch.int32),
        f"{SCALE} is stored as int32, expected float32 or bfloat16 or float16",
    ),
    "groups of 8": (SCALE, torch.zeros(32, 4), "makes no groups of 16, 32, 64, 128 of 32 inputs"),
    "a minimum of another dtype": (
        f"{Q_PROJ}_minimum",
        torch.zeros(32, 1),
        "weight_minimum is stored as float32, expected bfloat16",
    ),
    "no least number": (LEAST, None, f"{LEAST} is missing"),
    "another least number": (LEAST, torch.tensor([-8], dtype=torch.int8), "is -8, which no"),
    "another number of inputs": (
        Q_PROJ,
        torch.zeros(32, 64, dtype=torch.int8),
        f"{Q_PROJ} has shape (32, 64), expected (32, 32)",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_checkpoint_of_other_tensors_is_refused(wrong: str, tmp_path: Path) -> None:
    name, tensor, message = WRONG[wrong]
    refuse(change(tmp_path, **{name: tensor}), "model.safetensors", message)
