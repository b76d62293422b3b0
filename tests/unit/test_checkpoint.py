"""Finding and loading checkpoints: round trips, names, and how much of a file each rank reads; and
checkpoints in one file for each stage of a pipeline."""

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_files import (
    CONFIG,
    CPU,
    Q_PROJ,
    expected_shard,
    load,
    make_tensors,
    write,
    write_bin,
    write_pth,
    write_sharded,
    write_sharded_bin,
)
from torch import Tensor

from magicdec.cli.front.checkpoints import find_num_stages
from magicdec.distributed.layer_split import split_layers
from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.checkpoint import weight_files
from magicdec.model.checkpoint.chunks import INDEX, chunk_name
from magicdec.model.checkpoint.convert import find_damage
from magicdec.model.checkpoint.source import (
    WeightSource,
    check_part,
    find_model,
    fingerprint,
    load_transformer,
)
from magicdec.model.checkpoint.split import split_checkpoint
from magicdec.model.checkpoint.weight_files import TILE_ROWS, Index, PthWeights
from magicdec.model.families.hf_config import to_hf_config
from magicdec.model.presets import presets


@pytest.mark.parametrize("writer", [write, write_sharded, write_bin, write_sharded_bin, write_pth])
@pytest.mark.parametrize("shard", [Shard(), Shard(1, 2), Shard(2, 3)], ids=str)
def test_round_trip(tmp_path: Path, writer: Callable[..., Path], shard: Shard) -> None:
    tensors = make_tensors()
    loaded = load(writer(tmp_path, tensors), shard)
    torch.testing.assert_close(loaded, expected_shard(tensors, shard), atol=0, rtol=0)


def test_dtype_and_files_by_name(tmp_path: Path) -> None:
    tensors = make_tensors()
    write(tmp_path, tensors)
    write_pth(tmp_path, tensors)
    write_bin(tmp_path, tensors)
    expected = {k: v.bfloat16() for k, v in expected_shard(tensors, Shard()).items()}
    files = ("model.safetensors", "model.pth", "pytorch_model.bin")
    for name in (tmp_path, *(tmp_path / file for file in files)):
        torch.testing.assert_close(load(name, dtype=torch.bfloat16), expected, atol=0, rtol=0)
        source = find_model("--model", str(name))
        assert source.tokenizer_directory == tmp_path and not source.is_random
        assert source.name == tmp_path.name
        copied = pickle.loads(pickle.dumps(source))  # as when another process is started
        assert copied.weights.tensors == source.weights.tensors


def test_packaged_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets.resources, "files", lambda package: tmp_path)
    with pytest.raises(ValueError, match=r"--draft 'demo-draft' is not known"):
        find_model("--draft", "demo-draft")
    (tmp_path / "demo" / "target").mkdir(parents=True)
    write(tmp_path / "demo" / "target", make_tensors())
    source = find_model("--model", "demo")
    assert source.name == source.config.name == "demo"
    assert source.tokenizer_directory == tmp_path / "demo" / "target"


class Recorder(WeightSource):
    """A weight source that forwards reads and counts them."""

    def __init__(self, source: WeightSource) -> None:
        super().__init__()
        self.source, self.elements, self.largest = source, 0, 0
        self.tensors = source.tensors

    def read(self, name: str, index: Index = ()) -> Tensor:
        tensor = self.source.read(name, index)
        self.elements += tensor.numel()
        self.largest = max(self.largest, tensor.numel())
        return tensor


@pytest.mark.parametrize("writer", [write, write_pth])
def test_a_rank_reads_its_own_share_in_small_parts(
    tmp_path: Path, writer: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(CONFIG, vocab_size=3000)
    writer(tmp_path, make_tensors(config))
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(config)))
    monkeypatch.setattr(weight_files, "READ_ELEMENTS", 1)  # the smallest part: one tile's rows
    source = Recorder(find_model("--model", str(tmp_path)).weights)
    model = load_transformer(config, source, Shard(0, 2), None, torch.float32, CPU)
    assert source.elements == sum(p.numel() for p in model.parameters())
    assert source.largest == TILE_ROWS * config.hidden_size


def test_slices_are_lazy(tmp_path: Path) -> None:
    for source in (
        find_model("--model", str(write(tmp_path, make_tensors()))).weights,
        PthWeights(write_pth(tmp_path, make_tensors()) / "model.pth"),
    ):
        part = source.read(Q_PROJ, (slice(4, 6), slice(3, 9)))
        assert torch.equal(part, make_tensors()[Q_PROJ][4:6, 3:9])
        # The view shares the mapping of the file or tensor, so slicing copied nothing.
        assert part.untyped_storage().nbytes() >= 32 * 32 * 4


@pytest.fixture(scope="module")
def chunks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = find_model("--model", "demo")
    out = tmp_path_factory.mktemp("chunks")
    split_checkpoint(source, out, split_layers("1,2,3", 3, source.config.num_layers))
    return out


@pytest.fixture
def copied(chunks: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(chunks, tmp_path / "chunks"))


def test_a_stage_loads_the_same_from_its_own_file_alone(copied: Path) -> None:
    whole = find_model("--model", "demo")
    for stage, layers in enumerate(split_layers("1,2,3", 3, whole.config.num_layers)):
        own = copied.parent / f"host{stage}"
        own.mkdir()
        for name in (chunk_name(stage), INDEX, "config.json"):
            shutil.copyfile(copied / name, own / name)
        part = find_model("--model", str(own), is_part=True)
        check_part(part, layers, stage == 0)
        assert fingerprint(part) == fingerprint(whole)
        models = [
            load_transformer(
                whole.config,
                weights,
                Shard(),
                layers,
                torch.float32,
                torch.device("cpu"),
                has_ends=stage == 0,
            )
            for weights in (whole.weights, part.weights)
        ]
        expected, found = (dict(model.named_parameters()) for model in models)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_all_files_together_are_a_checkpoint(chunks: Path) -> None:
    source = find_model("--model", str(chunks))
    assert source.tensors.keys() == find_model("--model", "demo").tensors.keys()
    assert all(find_damage(chunks / chunk_name(stage)) is None for stage in range(3))


def test_an_absent_file_is_named(copied: Path) -> None:
    (copied / chunk_name(2)).unlink()
    refused = r"model_secondary1\.safetensors is not on this host; .*--layer_split 1,2,3"
    with pytest.raises(ValueError, match=refused):
        find_model("--model", str(copied))
    part = find_model("--model", str(copied), is_part=True)
    check_part(part, range(1, 3), has_ends=False)
    with pytest.raises(ValueError, match=refused):  # of another split
        check_part(part, range(2, 4), has_ends=False)


def test_a_file_of_another_model_or_split_is_refused(copied: Path, tmp_path: Path) -> None:
    source = find_model("--model", "demo")
    other = tmp_path / "other"
    split_checkpoint(source, other, split_layers("2,1,3", 3, source.config.num_layers))
    shutil.copyfile(other / chunk_name(2), copied / chunk_name(2))  # the same layers
    with pytest.raises(ValueError, match=r"secondary1\.safetensors: a chunk of another model"):
        find_model("--model", str(copied))


def test_a_broken_index_is_refused(copied: Path) -> None:
    table = json.loads((copied / INDEX).read_text())
    del table["metadata"]["chunks"]["tensors"]["model.norm.weight"]
    (copied / INDEX).write_text(json.dumps(table))
    with pytest.raises(ValueError, match=r"index\.json: not an index of chunks"):
        find_model("--model", str(copied))


def test_flags_that_disagree_are_refused() -> None:
    assert find_num_stages(3, None) == find_num_stages(None, "1,2,3") == 3
    with pytest.raises(ValueError, match="give --n_nodes"):
        find_num_stages(None, None)
    with pytest.raises(ValueError, match="--n_nodes 2: --layer_split 1,2,3 has 3 stages"):
        find_num_stages(2, "1,2,3")
