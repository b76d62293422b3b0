"""int8 weights: the arithmetic by hand, every family's shards compared with the whole model,
checkpoints stored in int8, and errors."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_files import CONFIG, CPU, Q_PROJ, Tensors, make_tensors, refuse, write
from safetensors.torch import load_file, save_file
from tiny_families import MODELS, make_checkpoint
from torch import Tensor

from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.checkpoint.convert import convert, find_checkpoint, find_damage, quantized
from magicdec.model.checkpoint.quantization import channel_scales, quantize
from magicdec.model.checkpoint.source import ModelSource, find_model, load_transformer
from magicdec.model.checkpoint.weight_files import Index, WeightSource
from magicdec.model.checkpoint.weight_map import (
    SCALE,
    expected_shapes,
    untie_head,
    weight_map,
)
from magicdec.model.transformer import Transformer

TIED = replace(CONFIG, tie_word_embeddings=True)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def test_by_hand() -> None:
    rows = torch.tensor(
        [[254.0, -1.0, 3.0, 5.0], [0, 0, 0, 0], [-1e-3, 5e-4, 0, 0], [127, 63, 0, 1]]
    )
    scales = channel_scales(rows)
    assert scales.tolist() == [2.0, 1.0, torch.tensor(1e-3).div(127).item(), 1.0]
    values = quantize(rows, scales.unsqueeze(1))
    assert values.dtype == torch.int8
    # Halves go to the even neighbour: -0.5, 1.5, 2.5; 63.5 of -1e-3's half.
    assert values.tolist() == [[127, 0, 2, 2], [0] * 4, [-127, 64, 0, 0], [127, 63, 0, 1]]


def test_no_weight_leaves_the_range() -> None:
    """Also if the scale is too small for an exact division."""
    rows = torch.tensor([[1e-45, 3e-45], [1e-38, -1e-38], [3e38, -3.4e38]])
    values = quantize(rows, channel_scales(rows).unsqueeze(1))
    assert values.abs().max() <= 127 and values[2].tolist() == [112, -127]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelSource]:
    """The checkpoint of each family, made once."""
    made: dict[str, ModelSource] = {}

    def get(name: str) -> ModelSource:
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            make_checkpoint(directory, name)
            made[name] = find_model("--model", str(directory))
        return made[name]

    return get


def load(
    source: ModelSource, shard: Shard = Shard(), dtype: torch.dtype = torch.float32
) -> Tensors:
    place = (shard, None, dtype, CPU)
    model = load_transformer(source.config, source.weights, *place, stored_as="int8")
    assert isinstance(model, Transformer) and not model.training
    return dict(model.state_dict())


TABLES = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")


def by_the_whole(source: ModelSource, shard: Shard) -> Tensors:
    """The expected weights of `shard`: each stored matrix quantised as a whole, then sliced."""
    config = untie_head(source.config)
    out = {}
    for parameter, pieces in weight_map(config, shard, range(config.num_layers)).items():
        parts, scales = [], []
        for piece in pieces:
            name = piece.name
            if name == HEAD and source.config.tie_word_embeddings:
                name = next(n for n in source.weights.tensors if n.endswith(TABLES))
            whole = source.weights.read(name).float()
            whole = whole.T if piece.transposed else whole
            rows, columns = slice(*piece.rows), slice(*(piece.columns or (0, None)))
            if len(piece.full_shape) == 1 or "embedding" in parameter:
                parts.append(whole[rows])
                continue
            scale = whole.abs().max(dim=1, keepdim=True).values / 127
            scale[scale == 0] = 1
            parts.append((whole / scale).round()[rows, columns].to(torch.int8))
            scales.append(scale[rows, 0])
        out[parameter] = torch.cat(parts)
        if scales:
            out[parameter.removesuffix("weight") + "scale"] = torch.cat(scales)
    return out


@pytest.mark.narrow("values")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_shards_have_the_weights_of_the_whole(
    name: str, num_ranks: int, family: Callable[[str], ModelSource]
) -> None:
    """Equal to the bit for every layout: separate, stacked, grouped, transposed, tied."""
    source = family(name)
    shards = [load(source, Shard(rank, num_ranks)) for rank in range(num_ranks)]
    for rank, shard in enumerate(shards):
        expected = by_the_whole(source, Shard(rank, num_ranks))
        assert shard.keys() == expected.keys()
        for parameter, tensor in expected.items():
            assert shard[parameter].dtype == tensor.dtype and torch.equal(
                shard[parameter], tensor
            ), parameter
    whole = load(source)
    kinds = {t.dtype for n, t in whole.items() if n.endswith(("qkv.weight", "head.weight"))}
    assert kinds == {torch.int8} and whole["embedding.weight"].dtype == torch.float32
    for leaf in ("attention.output", "mlp.down"):  # inputs over ranks: every rank has all scales
        parameter = f"blocks.1.{leaf}"
        together = torch.cat([shard[f"{parameter}.weight"] for shard in shards], dim=1)
        assert torch.equal(together, whole[f"{parameter}.weight"])
        assert all(
            torch.equal(s[f"{parameter}.scale"], whole[f"{parameter}.scale"]) for s in shards
        )


def test_a_scale_of_the_shard_alone_would_be_another(family: Callable[[str], ModelSource]) -> None:
    """Shows that the test above can fail: some rows have their largest weight on the other rank."""
    source = family("llama-2")
    shard, whole = load(source, Shard(1, 2)), load(source)
    name = "blocks.0.mlp.down"
    ours = shard[f"{name}.weight"].abs().amax(dim=1)
    assert (ours < 127).any() and (whole[f"{name}.weight"].abs().amax(dim=1) == 127).all()


def int8_directory(directory: Path, source: Path, dtype: str | None = None) -> Path:
    """`source` converted, with its config, in `directory`."""
    found = quantized(find_checkpoint("--checkpoint_dir", source))
    convert(found, directory / "model.safetensors", dtype)
    return directory


@pytest.mark.parametrize("name", ["qwen2.5", "gpt2", "starcoder", "falcon-40b", "bloom", "gptj"])
def test_stored_int8_is_int8_made_while_loading(
    name: str, tmp_path: Path, family: Callable[[str], ModelSource]
) -> None:
    source = family(name)
    out = int8_directory(tmp_path, Path(str(source.tokenizer_path)))
    stored = find_model("--model", str(out))
    assert stored.is_int8 and not source.is_int8
    assert replace(stored.config, name="") == replace(source.config, name="")
    for shard in (Shard(), Shard(1, 2), Shard(2, 3)):
        made, read = load(source, shard), load(stored, shard)
        assert made.keys() == read.keys()
        assert all(torch.equal(made[n], read[n]) for n in made)
    shapes = {n: tuple(t.shape) for n, t in load_file(out / "model.safetensors").items()}
    assert shapes == expected_shapes(source.config, is_int8=True)
    assert shapes == {name: tensor.shape for name, tensor in stored.tensors.items()}


@pytest.mark.parametrize("out", ["model.safetensors", "model.pth"])
def test_the_file_and_its_manifest(tmp_path: Path, out: str) -> None:
    (tmp_path / "in").mkdir()
    tensors = make_tensors(TIED)
    source = quantized(find_checkpoint("--checkpoint_dir", write(tmp_path / "in", tensors, TIED)))
    path = tmp_path / "out" / out
    convert(source, path, "bfloat16")
    assert find_damage(path) is None
    stored = find_model("--model", str(path))
    kinds = {name: tensor.dtype for name, tensor in stored.tensors.items()}
    assert (kinds[Q_PROJ], kinds[Q_PROJ + SCALE]) == ("int8", "float32")
    assert (kinds[HEAD], kinds[HEAD + SCALE]) == ("int8", "float32")
    assert (kinds[EMBEDDING], kinds["model.norm.weight"]) == ("bfloat16", "bfloat16")
    # The head is quantised from the float32 embedding, not from the rounded one.
    scales = channel_scales(tensors[EMBEDDING])
    expected = quantize(tensors[EMBEDDING], scales.unsqueeze(1))
    assert torch.equal(load(stored)["head.weight"], expected)
    convert(find_checkpoint("--checkpoint_dir", path.parent), tmp_path / "again.pth", None)
    again = torch.load(tmp_path / "again.pth", weights_only=True)
    everything = load_file(path) if path.suffix == ".safetensors" else torch.load(path)
    assert again.keys() == everything.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in everything.items())


class Counting(WeightSource):
    """A weight source that records the largest read and the columns that were read."""

    def __init__(self, source: ModelSource) -> None:
        super().__init__()
        self.source, self.largest, self.reads = source.weights, 0, 0
        self.tensors = source.weights.tensors

    def read(self, name: str, index: Index = ()) -> Tensor:
        values = self.source.read(name, index)
        self.largest, self.reads = max(self.largest, values.numel()), self.reads + 1
        return values


def test_a_matrix_is_read_in_parts_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magicdec.model.checkpoint.weight_files.READ_ELEMENTS", 300 * 32)
    config = replace(CONFIG, vocab_size=700)
    source = find_model("--model", str(write(tmp_path, make_tensors(config), config)))
    counting = Counting(source)
    place = (Shard(0, 2), None, torch.float32, CPU)
    model = load_transformer(config, counting, *place, stored_as="int8")
    assert counting.largest == 256 * 32  # of an embedding of 700 rows: parts of 256
    plain = Counting(source)
    load_transformer(config, plain, *place)
    assert counting.reads == plain.reads
    assert torch.equal(model.state_dict()["head.weight"], load(source, Shard(0, 2))["head.weight"])


def test_infinities_are_refused(tmp_path: Path) -> None:
    for value in (float("inf"), float("nan")):
        tensors = make_tensors()
        tensors[Q_PROJ][3, 4] = value
        source = find_model("--model", str(write(tmp_path, tensors)))
        with pytest.raises(
            ValueError, match=rf"model\.safetensors: tensor {Q_PROJ} holds {value:g}"
        ):
            load(source)


def change(directory: Path, **tensors: Tensor | None) -> Path:
    """An int8 checkpoint with some tensors replaced, or removed."""
    (directory / "in").mkdir()
    int8_directory(directory, write(directory / "in", make_tensors()))
    stored = load_file(directory / "model.safetensors")
    stored = {n: t for n, t in (stored | tensors).items() if t is not None}
    save_file(stored, directory / "model.safetensors")
    return directory


WRONG = {
    "no scale": (Q_PROJ + SCALE, None, f"{Q_PROJ}{SCALE} is missing"),
    "a matrix in float": (
        Q_PROJ, torch.zeros(32, 32),
        f"{Q_PROJ} is stored as float32, expected int8",
    ),
    "a scale of int32": (
        Q_PROJ + SCALE, torch.zeros(32, dtype=torch.int32),
        f"{Q_PROJ}{SCALE} is stored as int32, expected float32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_an_int8_checkpoint_of_other_tensors_is_refused(wrong: str, tmp_path: Path) -> None:
    name, tensor, said = WRONG[wrong]
    refuse(change(tmp_path, **{name: tensor}), "model.safetensors", said)


def test_the_value_that_has_no_negative_is_refused(tmp_path: Path) -> None:
    directory = change(tmp_path, **{Q_PROJ: torch.full((32, 32), -128, dtype=torch.int8)})
    source = find_model("--model", str(directory))
    with pytest.raises(ValueError, match=rf"model\.safetensors: {Q_PROJ} holds -128; int8 weights"):
        load(source)
