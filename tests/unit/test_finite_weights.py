"""Weights and numbers of a config that are not finite are refused by name, on every way on which a
checkpoint is loaded, and a rank refuses with the others of its group."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import (
    CONFIG,
    CPU,
    EVEN,
    Q_PROJ,
    Tensors,
    load,
    make_tensors,
    write,
    write_bin,
    write_pth,
    write_sharded,
    write_sharded_bin,
)
from conftest import Command
from safetensors.torch import load_file, save_file

from magicdec.distributed.groups import Group
from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.checkpoint.convert import convert, quantized
from magicdec.model.checkpoint.finite import WeightsRefused
from magicdec.model.checkpoint.source import find_model, load_transformer
from magicdec.model.config import ModelConfig, RopeConfig
from magicdec.names import STORED
from magicdec.output.console import Silent
from magicdec.setup.loading import load_model
from magicdec.setup.model_plan import Kinds

DOWN = "model.layers.1.mlp.down_proj.weight"
NORM = "model.norm.weight"
NAN = float("nan")
INF = float("inf")


def spoiled(
    name: str = DOWN,
    at: tuple[int, ...] = (3, 5),
    value: float = NAN,
    config: ModelConfig = CONFIG,
) -> Tensors:
    tensors = make_tensors(config)
    tensors[name][at] = value
    return tensors


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize(("name", "at"), [(DOWN, (3, 5)), (Q_PROJ, (31, 0)), (NORM, (7,))])
def test_a_value_that_is_not_finite_is_refused_by_its_place(
    name: str, at: tuple[int, ...], value: float, tmp_path: Path
) -> None:
    directory = write(tmp_path, spoiled(name, at, value))
    with pytest.raises(WeightsRefused) as refused:
        load(directory)
    found = str(refused.value)
    assert found.startswith(f"{directory / 'model.safetensors'}: tensor {name} holds {value:g} at")
    assert f"at {list(at)}" in found and "\n" not in found


@pytest.mark.parametrize("write_files", [write_bin, write_pth, write_sharded, write_sharded_bin])
def test_every_format_is_checked(write_files: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(WeightsRefused, match=f"tensor {DOWN} holds nan at"):
        load(write_files(tmp_path, spoiled()))


def test_a_rank_checks_the_slices_that_it_reads(tmp_path: Path) -> None:
    """Column 5 of the down projection is an input of the first half."""
    directory = write(tmp_path, spoiled())
    with pytest.raises(WeightsRefused, match=r"holds nan at \[3, 5\]"):
        load(directory, Shard(0, 2))
    load(directory, Shard(1, 2))
    source = find_model("--model", str(directory))
    for layers, is_broken in ((range(1), False), (range(1, 2), True)):
        place = source.config, source.weights, Shard(), layers, torch.float32, CPU
        if is_broken:
            with pytest.raises(WeightsRefused, match=DOWN):
                load_transformer(*place)
        else:
            load_transformer(*place)


def test_all_ranks_of_a_group_refuse_what_one_of_them_finds(tmp_path: Path) -> None:
    class Two(Group):
        def all_gather_values(self, value: Any, kind: type) -> list[Any]:
            return [value, "FILE: tensor NAME holds nan"]

    source = find_model("--model", str(write(tmp_path, make_tensors())))
    kinds = Kinds("float32", "float32")
    load_model(source, Group((0,), 0), kinds, CPU, Silent())
    with pytest.raises(WeightsRefused, match="FILE: tensor NAME holds nan"):
        load_model(source, Two((0, 1), 1), kinds, CPU, Silent())


@pytest.mark.parametrize(("dtype", "value"), [(torch.bfloat16, 3.4e38), (torch.float16, 1e5)])
def test_a_value_that_the_dtype_does_not_hold_is_refused(
    dtype: torch.dtype, value: float, tmp_path: Path
) -> None:
    directory = write(tmp_path, spoiled(value=value))
    load(directory)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(
        WeightsRefused, match=f"which is infinite in {name}; choose --dtype float32"
    ):
        load(directory, dtype=dtype)


def test_int8_and_converted_files_are_checked(tmp_path: Path) -> None:
    source = find_model("--model", str(write(tmp_path, spoiled(config=EVEN), EVEN)))
    with pytest.raises(WeightsRefused, match=f"tensor {DOWN} holds nan"):
        load_transformer(
            source.config, source.weights, Shard(), None, torch.float32, CPU, stored_as="int8"
        )
    for model, dtype in ((source, None), (source, "bfloat16"), (quantized(source, "int8"), None)):
        out = tmp_path / "out.safetensors"
        with pytest.raises(WeightsRefused, match=f"tensor {DOWN} holds nan"):
            convert(model, out, dtype)
        assert not out.exists()
    whole = find_model("--model", str(write(tmp_path, make_tensors(EVEN), EVEN)))
    file = tmp_path / "int8.safetensors"
    convert(quantized(whole, "int8"), file, None)
    tensors = load_file(file)
    tensors[f"{DOWN}_scale"][3] = INF
    int8 = find_model("--model", str(write(tmp_path, tensors, EVEN)))
    for stored_as, what in (
        (STORED, f"{DOWN} has a scale that is not finite; fetch or convert"),
        (None, "holds inf"),
    ):
        with pytest.raises(WeightsRefused, match=what):
            load_transformer(
                int8.config, int8.weights, Shard(), None, torch.float32, CPU, stored_as=stored_as
            )


def test_a_run_is_refused_in_one_line(
    tiny_checkpoint: Path, tmp_path: Path, command: Command
) -> None:
    for file in tiny_checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[NORM][3] = NAN
    save_file(tensors, tmp_path / "model.safetensors")
    out = tmp_path / "records.jsonl"
    ended = command(
        "run",
        "--model",
        tmp_path,
        "--prefix_len",
        64,
        "--gen_len",
        8,
        "--B",
        1,
        "--budget",
        32,
        "--out",
        out,
    )
    assert ended.code == 2
    last = ended.err.splitlines()[-1]
    assert last.startswith(
        f"magicdec run: {tmp_path / 'model.safetensors'}: tensor {NORM} holds nan"
    )
    (record,) = map(json.loads, out.read_text().splitlines())
    assert record["status"] == "failed" and NORM in record["error"]
    assert record["metrics"] is None


@pytest.mark.parametrize("eps", [NAN, INF, -1e-6, 2.0])
def test_an_epsilon_out_of_range_is_refused(eps: float) -> None:
    with pytest.raises(ValueError, match=r"rms_norm_eps .* is not a number from 0 to 1"):
        replace(CONFIG, norm_eps=eps)
    with pytest.raises(ValueError, match="layer_norm_epsilon"):
        replace(CONFIG, norm="layer", norm_eps=eps)


@pytest.mark.parametrize("theta", [NAN, INF, 0.0, -1e4, 1e40])
def test_a_theta_out_of_range_is_refused(theta: float) -> None:
    with pytest.raises(ValueError, match=r"rope_theta .* must be a finite number above 0"):
        RopeConfig(theta)


@pytest.mark.parametrize(
    "field",
    ["factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow"],
)
@pytest.mark.parametrize("value", [NAN, INF, 0.0, -2.0])
def test_a_number_of_rope_scaling_out_of_range_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"rope_scaling: {field} .* must be a finite number"):
        RopeConfig(rope_type="yarn", **{field: value})  # type: ignore[arg-type]


def test_frequencies_without_a_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"high_freq_factor 2.0 must be above low_freq_factor 2.0"):
        RopeConfig(rope_type="llama3", low_freq_factor=2.0, high_freq_factor=2.0)


def test_a_config_file_with_nan_is_refused_by_field(tmp_path: Path) -> None:
    file = write(tmp_path, make_tensors()) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": NAN}))
    with pytest.raises(ValueError, match=f"{file}: .*rms_norm_eps nan"):
        find_model("--model", str(tmp_path))
