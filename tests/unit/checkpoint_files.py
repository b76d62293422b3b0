"""Small checkpoints for the tests of finding, checking and loading. Contains no tests."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.checkpoint.source import expected_shapes, find_model, load_transformer
from magicdec.model.checkpoint.weight_map import Piece, weight_map
from magicdec.model.config import ModelConfig
from magicdec.model.families.hf_config import to_hf_config

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    "tiny",
    50,
    2,
    32,
    40,
    4,
    2,
    8,
    64,
    qkv_bias=True,
    architecture="Qwen2ForCausalLM",
    bos_token_id=1,
    eos_token_ids=(2,),
    dtype="float32",
)
EVEN = replace(CONFIG, intermediate_size=64)  # its inputs are whole groups
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
Tensors = dict[str, Tensor]


def make_tensors(config: ModelConfig = CONFIG) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator)
        for name, shape in expected_shapes(config).items()
    }


def write_config(directory: Path, config: ModelConfig = CONFIG) -> Path:
    (directory / "config.json").write_text(json.dumps(to_hf_config(config)))
    return directory


def write(directory: Path, tensors: Tensors, config: ModelConfig = CONFIG) -> Path:
    save_file(tensors, write_config(directory, config) / "model.safetensors")
    return directory


def write_pth(directory: Path, value: Any, name: str = "model.pth") -> Path:
    torch.save(value, write_config(directory) / name)
    return directory


def write_bin(directory: Path, tensors: Tensors) -> Path:
    return write_pth(directory, tensors, "pytorch_model.bin")


def write_sharded(directory: Path, tensors: Tensors) -> Path:
    files = ("a.safetensors", "b.safetensors")
    return write_shards(directory, tensors, save_file, files, "model.safetensors.index.json")


def write_sharded_bin(directory: Path, tensors: Tensors) -> Path:
    files = tuple(f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2))
    return write_shards(directory, tensors, torch.save, files, "pytorch_model.bin.index.json")


def write_shards(
    directory: Path, tensors: Tensors, save: Any, files: tuple[str, ...], index: str
) -> Path:
    """Tensors go to the two files in turn."""
    for i, file in enumerate(files):
        save(dict(list(tensors.items())[i::2]), directory / file)
    table = {name: files[i % 2] for i, name in enumerate(tensors)}
    (write_config(directory) / index).write_text(json.dumps({"weight_map": table}))
    return directory


def load(name: str | Path, shard: Shard = Shard(), dtype: torch.dtype = torch.float32) -> Tensors:
    source = find_model("--model", str(name))
    model = load_transformer(source.config, source.weights, shard, None, dtype, CPU)
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    return dict(model.state_dict())


def expected_shard(tensors: Tensors, shard: Shard, config: ModelConfig = CONFIG) -> Tensors:
    def cut(piece: Piece) -> Tensor:
        rows = tensors[piece.name][slice(*piece.rows)]
        return rows if piece.columns is None else rows[:, slice(*piece.columns)]

    table = weight_map(config, shard, range(config.num_layers))
    return {name: torch.cat([cut(piece) for piece in pieces]) for name, pieces in table.items()}


def refuse(name: str | Path, *parts: str) -> None:
    """Assert that `find_model` raises ValueError with one line that contains all `parts`."""
    with pytest.raises(ValueError) as caught:
        find_model("--model", str(name))
    text = str(caught.value)
    assert "\n" not in text
    for part in parts:
        assert part in text, text
