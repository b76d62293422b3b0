"""Broken checkpoints: for each, the line that the user sees, with the file, the tensor and the
choices."""

import json
import os
import shutil
from collections.abc import Callable
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
    write_bin,
    write_config,
    write_pth,
    write_sharded,
    write_sharded_bin,
)
from conftest import ROOT

from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    AttentionSection,
    ModelSection,
    ParallelSection,
    WorkloadSection,
)
from magicdec.distributed.groups import Launch
from magicdec.model.checkpoint.source import check_weights, find_model
from magicdec.model.config import ROPE_TYPES
from magicdec.setup.prepare import prepare

AGAIN = "fetch or convert the checkpoint again, with all of its files"
DEMO = ROOT / "magicdec" / "demo" / "target"
# The vocabulary size of the demo's tokenizer, which is copied to every checkpoint here.
FITTING = replace(CONFIG, vocab_size=2048)


def refused(directory: Path) -> str:
    """The message of a run with the checkpoint in `directory`."""
    shutil.copy(DEMO / "tokenizer.model", directory)
    config = RunConfig(
        model=ModelSection(str(directory), "float32", "torch"),
        parallel=ParallelSection(device="cpu"),
        attention=AttentionSection("grouped"),
        workload=WorkloadSection(batch_size=1, prefix_len=20, gen_len=4, num_batches=1),
    )
    with pytest.raises(ValueError) as caught:
        prepare(config, Launch(0, 1, 0, 1))
    return str(caught.value)


def fitting(directory: Path, **changed: torch.Tensor) -> Path:
    """The file of a checkpoint that has no fault but its `changed` tensors."""
    return write(directory, make_tensors(FITTING) | changed, FITTING) / "model.safetensors"


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def bit_flipped_length(directory: Path) -> str:
    file = fitting(directory)
    data = bytearray(file.read_bytes())
    data[6] ^= 0x80  # the header's length is now 36 petabytes
    file.write_bytes(data)
    return (
        f"{file}: not a complete safetensors file (Error while deserializing header: {{library}})"
    )


def bit_flipped_name(directory: Path) -> str:
    file = fitting(directory)
    file.write_bytes(
        file.read_bytes().replace(b"layers.0.self_attn.q_proj.w", b"layers.0.self_attn.q_prok.w")
    )
    return (
        f"{file}: the weights do not fit the config: {Q_PROJ} is missing, expected shape (32, 32); "
        f"{Q_PROJ.replace('proj', 'prok')} of shape (32, 32) is not part of the model; {AGAIN}"
    )


def shard_not_there(directory: Path) -> str:
    index = write_sharded(directory, make_tensors(FITTING)) / "model.safetensors.index.json"
    (directory / "b.safetensors").unlink()
    table = json.loads(index.read_text())["weight_map"]
    first = next(name for name, file in table.items() if file == "b.safetensors")
    return (
        f"{directory / 'b.safetensors'} does not exist, though {index.name} places tensor {first} "
        "there"
    )


def shard_not_in_the_index(directory: Path) -> str:
    index = write_sharded(directory, make_tensors()) / "model.safetensors.index.json"
    table = json.loads(index.read_text())["weight_map"]
    kept = {name: file for name, file in table.items() if file == "a.safetensors"}
    index.write_text(json.dumps({"weight_map": kept}))
    lost = [name for name in table if name not in kept]
    shapes = {name: tuple(t.shape) for name, t in make_tensors().items()}
    shown = "; ".join(f"{n} is missing, expected shape {shapes[n]}" for n in lost[:3])
    return f"{index}: the weights do not fit the config: {shown}; and {len(lost) - 3} more; {AGAIN}"


def bin_shard_not_there(directory: Path) -> str:
    index = write_sharded_bin(directory, make_tensors()) / "pytorch_model.bin.index.json"
    file = directory / "pytorch_model-00002-of-00002.bin"
    torch.save({}, file)
    table = json.loads(index.read_text())["weight_map"]
    first = next(name for name, place in table.items() if place == file.name)
    return f"{file}: tensor {first} is missing, though {index.name} places it there"


def wrong_dtype(directory: Path) -> str:
    file = fitting(directory, **{Q_PROJ: torch.zeros(32, 32, dtype=torch.int8)})
    what = "is stored as int8, expected floating-point"
    return f"{file}: the weights do not fit the config: {Q_PROJ} {what}; {AGAIN}"


def another_model(directory: Path) -> str:
    file = write(directory, make_tensors(), replace(CONFIG, intermediate_size=48)) / (
        "model.safetensors"
    )
    names = [f"model.layers.0.mlp.{n}_proj.weight" for n in ("gate", "up", "down")]
    shapes = [((40, 32), (48, 32)), ((40, 32), (48, 32)), ((32, 40), (32, 48))]
    shown = "; ".join(
        f"{n} has shape {a}, expected {b}" for n, (a, b) in zip(names, shapes, strict=True)
    )
    return f"{file}: the weights do not fit the config: {shown}; and 3 more; {AGAIN}"


def more_layers_than_tensors(directory: Path) -> str:
    file = write(directory, make_tensors()) / "model.safetensors"
    edit_json(directory / "config.json", num_hidden_layers=1000)
    return f"{file}: the weights do not fit the config: 27 tensors cannot make 1000 layers; {AGAIN}"


def tokenizer_without_bos(directory: Path) -> str:
    config = replace(FITTING, bos_token_id=2048)
    write(directory, make_tensors(config), config)
    return (
        f"--model {directory}: its bos_token_id 2048 is not one of its tokenizer's 2048 ids; "
        "correct it in config.json or generation_config.json, or set it to null for no BOS"
    )


def vocabulary_larger_than_the_embedding(directory: Path) -> str:
    config = replace(FITTING, vocab_size=2047)
    write(directory, make_tensors(config), config)
    return f"--model {directory}: its tokenizer has 2048 ids, its embedding 2047"


def unknown_rope_type(directory: Path) -> str:
    write(directory, make_tensors())
    edit_json(directory / "config.json", rope_scaling={"rope_type": "spiral", "factor": 2.0})
    return (
        f"{directory / 'config.json'}: rope type 'spiral' is not supported; "
        f"choose from {', '.join(ROPE_TYPES)}"
    )


def infinite_token_id(directory: Path) -> str:
    write(directory, make_tensors())
    edit_json(directory / "config.json", bos_token_id=float("inf"))
    return f"{directory / 'config.json'}: cannot convert float infinity to integer"


def deeply_nested_config(directory: Path) -> str:
    write(directory, make_tensors())
    (directory / "config.json").write_text("[" * 100_000)
    return f"{directory / 'config.json'}: not valid JSON ({{library}})"


BROKEN: list[Callable[[Path], str]] = [
    bit_flipped_length,
    bit_flipped_name,
    shard_not_there,
    shard_not_in_the_index,
    bin_shard_not_there,
    wrong_dtype,
    another_model,
    more_layers_than_tensors,
    tokenizer_without_bos,
    vocabulary_larger_than_the_embedding,
    unknown_rope_type,
    infinite_token_id,
    deeply_nested_config,
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_the_line(broken: Callable[[Path], str], tmp_path: Path) -> None:
    before, library, after = broken(tmp_path).partition("{library}")
    text = refused(tmp_path)
    assert "\n" not in text
    if library:  # the library's own text depends on its version
        assert text.startswith(before) and text.endswith(after), text
    else:
        assert text == before


def test_no_bos_is_no_error(tmp_path: Path) -> None:
    config = replace(FITTING, bos_token_id=None)
    write(tmp_path, make_tensors(config), config)
    assert json.loads((tmp_path / "config.json").read_text())["bos_token_id"] is None
    edit_json(tmp_path / "config.json", max_position_embeddings=8)  # refused after the weights
    assert "exceeds the 8 positions" in refused(tmp_path)


def test_unknown_names(tmp_path: Path) -> None:
    choices = "choose from demo, demo-draft, random:<preset>, a Hugging Face directory"
    refuse("x", "--model 'x' is not known", choices)
    refuse(tmp_path / "x.pth", "x.pth: no such directory or file of weights")
    refuse(
        "random:gpt-5", "--model 'random:gpt-5'", "random:llama-2-7b, ", "random:mistral-7b-v0.3"
    )


def test_directories_without_what_it_takes(tmp_path: Path) -> None:
    refuse(tmp_path, str(tmp_path / "config.json"), "does not exist")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["T5Model"]}))
    refuse(tmp_path, "config.json", "'T5Model' is not supported")
    write_config(tmp_path)
    refuse(tmp_path, "holds no weights; expected one of model.safetensors, ")


def test_tensors_that_are_not_of_the_model(tmp_path: Path) -> None:
    tensors = make_tensors()
    file = str(tmp_path / "model.safetensors")
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


@pytest.mark.parametrize("writer", [write, write_pth, write_bin])
@pytest.mark.parametrize("keep", [0, 4, 1000, -100])
def test_truncated_files(writer: Callable[..., Path], keep: int, tmp_path: Path) -> None:
    writer(tmp_path, make_tensors())
    (file,) = (path for path in tmp_path.iterdir() if path.name != "config.json")
    file.write_bytes(file.read_bytes()[:keep])
    kind = "safetensors file" if writer is write else "torch.save archive"
    refuse(tmp_path, f"{file}: not a complete {kind} (")


def test_broken_indexes(tmp_path: Path) -> None:
    index = write_sharded(tmp_path, make_tensors()) / "model.safetensors.index.json"
    table = json.loads(index.read_text())["weight_map"]
    name = next(n for n, file in table.items() if file == "a.safetensors")

    index.write_text(json.dumps({"weight_map": table | {name: "b.safetensors"}}))
    refuse(tmp_path, str(tmp_path / "b.safetensors"), f"tensor {name} is missing", index.name)
    for text in ("{", "[]", "{}", '{"weight_map": [1]}', "[" * 100_000):
        index.write_text(text)
        refuse(tmp_path, str(index), "not an index of weight files")


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
    write_pth(tmp_path, {"state_dict": make_tensors()})
    refuse(tmp_path, "model.pth", "'state_dict' is a dict")
    write_pth(tmp_path, [torch.zeros(1)])
    refuse(tmp_path, "model.pth", "expected a dict of tensors, found list")
