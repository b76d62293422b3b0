"""Checkpoints in one file for each stage of a pipeline."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from magicdec.cli.front.checkpoints import find_num_stages
from magicdec.distributed.layer_split import split_layers
from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.checkpoint.chunks import INDEX, chunk_name
from magicdec.model.checkpoint.convert import find_damage
from magicdec.model.checkpoint.source import check_part, find_model, fingerprint, load_transformer
from magicdec.model.checkpoint.split import split_checkpoint

CPU = torch.device("cpu")


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
                whole.config, weights, Shard(), layers, torch.float32, CPU, has_ends=stage == 0
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
