"""Finding and loading checkpoints: round trips, names, and how much of a file each rank reads; and
checkpoints in one file for each stage of a pipeline."""

import json
import pickle
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

from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.checkpoint import weight_files
from magicdec.model.checkpoint.source import (
    WeightSource,
    find_model,
    load_transformer,
)
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
        assert source.tokenizer_path == tmp_path and not source.is_random
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
    assert source.tokenizer_path == tmp_path / "demo" / "target"


class ReadRecorder(WeightSource):
    """A weight source that forwards reads and counts them."""

    def __init__(self, source: WeightSource) -> None:
        super().__init__()
        self.source = source
        self.elements = 0
        self.largest = 0
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
    source = ReadRecorder(find_model("--model", str(tmp_path)).weights)
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
