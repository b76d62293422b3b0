"""Faulty checkpoints: each error is one line with the file, the tensor and the choices."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import (
    CONFIG,
    Q_PROJ,
    make_tensors,
    refuse,
    write,
    write_pth,
    write_sharded,
)

from magicdec.model.checkpoint.source import check_weights, find_model
from magicdec.model.families.hf_config import to_hf_config


def test_unknown_names(tmp_path: Path) -> None:
    choices = "choose from demo, demo-draft, random:<preset>, a Hugging Face directory"
    refuse("x", "--model 'x' is not known", choices)
    refuse(tmp_path / "x.pth", "x.pth' does not exist", choices)
    refuse(
        "random:gpt-5", "--model 'random:gpt-5'", "random:llama-2-7b, ", "random:mistral-7b-v0.3"
    )


def test_directories_without_what_it_takes(tmp_path: Path) -> None:
    refuse(tmp_path, str(tmp_path / "config.json"), "does not exist")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["T5Model"]}))
    refuse(tmp_path, "config.json", "'T5Model' is not supported")
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(CONFIG)))
    refuse(tmp_path, "holds no weights; expected one of model.safetensors, ")


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    tensors = make_tensors()
    file = str(tmp_path / "model.safetensors")
    write(tmp_path, {k: v for k, v in tensors.items() if k != Q_PROJ})
    refuse(tmp_path, file, f"{Q_PROJ} is missing, expected shape (32, 32)")
    write(tmp_path, tensors | {Q_PROJ: torch.zeros(32, 16)})
    refuse(tmp_path, file, f"{Q_PROJ} has shape (32, 16), expected (32, 32)")
    write(tmp_path, tensors | {"model.layers.2.mlp.down_proj.weight": torch.zeros(2)})
    refuse(tmp_path, file, "model.layers.2.mlp.down_proj.weight of shape (2,) is not part")
    write(tmp_path, {f"transformer.{k}": v for k, v in tensors.items()})
    refuse(tmp_path, file, f"and {2 * len(tensors) - 3} more")


def test_redundant_tensors_are_tolerated(tmp_path: Path) -> None:
    tied = replace(CONFIG, tie_word_embeddings=True)
    tensors = make_tensors(tied)
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
    }
    write(tmp_path, tensors | extra, tied)
    check_weights(tied, find_model("--model", str(tmp_path)).weights)
    write(tmp_path, tensors, replace(CONFIG, tie_word_embeddings=False))
    refuse(tmp_path, "lm_head.weight is missing")


def test_weights_that_are_not_floating_point(tmp_path: Path) -> None:
    write(tmp_path, make_tensors() | {Q_PROJ: torch.zeros(32, 32, dtype=torch.int8)})
    file = tmp_path / "model.safetensors"
    refuse(tmp_path, f"{file}: tensor {Q_PROJ} is stored as int8; choose a checkpoint of floating")


@pytest.mark.parametrize("keep", [0, 4, 1000, -1])
def test_truncated_safetensors(tmp_path: Path, keep: int) -> None:
    file = write(tmp_path, make_tensors()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refuse(tmp_path, str(file), "not a complete safetensors file")


@pytest.mark.parametrize("keep", [0, 1000, -100])
def test_truncated_pth(tmp_path: Path, keep: int) -> None:
    file = write_pth(tmp_path, make_tensors()) / "model.pth"
    file.write_bytes(file.read_bytes()[:keep])
    refuse(tmp_path, str(file), "not a complete torch.save archive")


def test_broken_indexes(tmp_path: Path) -> None:
    index = write_sharded(tmp_path, make_tensors()) / "model.safetensors.index.json"
    table = json.loads(index.read_text())["weight_map"]
    name = next(n for n, file in table.items() if file == "a.safetensors")

    index.write_text(json.dumps({"weight_map": table | {name: "b.safetensors"}}))
    refuse(tmp_path, str(tmp_path / "b.safetensors"), f"tensor {name} is missing", index.name)
    index.write_text(json.dumps({"weight_map": {k: v for k, v in table.items() if k != name}}))
    refuse(tmp_path, str(index), f"{name} is missing, expected shape")
    for text in ("{", "[]", "{}", '{"weight_map": [1]}', "[" * 100_000):
        index.write_text(text)
        refuse(tmp_path, str(index), "not an index of weight files")
    index.write_text(json.dumps({"weight_map": table}))
    (tmp_path / "b.safetensors").unlink()
    refuse(tmp_path, str(tmp_path / "b.safetensors"), "does not exist", index.name)


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def test_pickles_are_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    write_pth(tmp_path, make_tensors() | {"evil": Evil(marker)})
    refuse(tmp_path, str(tmp_path / "model.pth"), "pickled objects other than tensors")
    assert not marker.exists()


def test_pth_of_another_layout(tmp_path: Path) -> None:
    write_pth(tmp_path, {"layers.0.attention.wqkv.weight": torch.zeros(2, 2)})
    refuse(tmp_path, "model.pth", "gpt-fast layout", "convert the file first")
    write_pth(tmp_path, {"state_dict": make_tensors()})
    refuse(tmp_path, "model.pth", "'state_dict' is a dict")
    write_pth(tmp_path, [torch.zeros(1)])
    refuse(tmp_path, "model.pth", "expected a dict of tensors, found list")
