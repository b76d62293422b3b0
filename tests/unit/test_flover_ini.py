"""`--ini FILE`: Flover's configuration file as flags, and what is refused of it with file, line and
key. No model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import TINY

from magicdec.cli.serving.flover_ini import read_flover_ini
from magicdec.cli.serving.inflight import parse
from magicdec.distributed.groups import Launch

TEXT = """
; a comment
[model_specification]
model_type = tiny_7b      ; names the section below
data_type = bf16
max_concurrency = 32
per_batch_size=1
max_seq_len=512
fixed_input_len=8
fixed_prompt_len=0
beam_width=1
tensor_para_size=2
pipeline_para_size=1

[runtime_hyperparameter]
top_k=0
top_p=0.5
temperature=0.9
len_penalty=0.0
beam_search_diversity_rate=0.0
repetition_penalty=2.0
presence_penalty=-0.5
data_type = bf16
enable_custom_all_reduce=0
interval=500
use_mem_shuffle=1
seed=7

# the bound of the output
[request]
request_output_len=500

[Tiny_7B]
head_num=6
size_per_head=16
inter_size=80
decoder_layers=2
vocab_size=97
start_id=1
weight_data_type=fp16
num_tasks=0
model_dir=models/tiny

[other_13b]
head_num=40
"""
VALUES = {
    **{"model": "models/tiny", "B": 32, "num_requests": 32, "nproc": 2, "dtype": "bfloat16"},
    **{"prefix_len": 8, "gen_len": "uniform:120:500", "compaction": "window"},
    **{"arrival": "constant:500", "seed": 7, "temperature": 0.9, "top_p": 0.5},
    **{"sampling_seed": 7, "repetition_penalty": 2.0, "presence_penalty": -0.5},
}


def write(tmp_path: Path, *changes: tuple[str, str]) -> Path:
    text = TEXT
    for old, new in changes:
        assert text.count(old) >= 1
        text = text.replace(old, new, 1)
    path = tmp_path / "flover.ini"
    path.write_text(text)
    return path


def values(tmp_path: Path, *changes: tuple[str, str]) -> dict[str, Any]:
    return read_flover_ini(write(tmp_path, *changes), ()).values


def test_every_key_is_a_flag(tmp_path: Path) -> None:
    assert values(tmp_path) == VALUES


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("use_mem_shuffle=1", "use_mem_shuffle=0", {"gen_len": "500", "compaction": "none"}),
        ("use_mem_shuffle=1", "", {"gen_len": 500, "compaction": None}),
        ("request_output_len=500", "", {"gen_len": "uniform:120:504"}),
        ("interval=500", "interval=0", {"arrival": "burst"}),
        ("model_dir=models/tiny", "", {"model": "tiny_7b"}),
        ("top_k=0", "top_k=5", {"top_k": 5}),
    ],
)
def test_a_changed_key_changes_its_flag(
    tmp_path: Path, old: str, new: str, changed: dict[str, Any]
) -> None:
    expected = {key: value for key, value in (VALUES | changed).items() if value is not None}
    assert values(tmp_path, (old, new)) == expected


def test_top_k_1_and_no_filter_are_greedy(tmp_path: Path) -> None:
    for change in (("top_k=0", "top_k=1"), ("top_p=0.5", "top_p=0.0")):
        assert "temperature" not in values(tmp_path, change)


def test_the_command_line_wins(tmp_path: Path) -> None:
    path = write(tmp_path, ("data_type = bf16", "data_type = fp16"))
    given = ["--dtype", "float32", "--arrival", "poisson:20", "--model", "demo", "--nproc", "1"]
    asked = parse(["--ini", str(path), *given], Launch(0, 1, 0, 1))
    assert asked.config.model.dtype == "float32" and asked.options.arrival == "poisson:20"
    assert asked.config.sampling.top_p == 0.5 and asked.options.max_concurrency == 32
    assert len(asked.options.shapes) == 32
    assert asked.ini.shape == (), "the file's shape is not that of another model"


def test_the_shape_is_checked_against_the_model(tmp_path: Path) -> None:
    read_flover_ini(write(tmp_path), ()).check_model(TINY)
    path = write(tmp_path, ("head_num=6", "head_num=8"))
    with pytest.raises(ValueError) as refused:
        read_flover_ini(path, ()).check_model(TINY)
    assert str(refused.value) == f"--ini {path}, line 34: head_num = 8: tiny has 6"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("interval=500", "interval=often", "line 25: interval = often: it must be a number of at"),
        ("max_concurrency = 32", "max_concurrency = 0", "line 6: max_concurrency = 0: it must be"),
        ("max_concurrency = 32", "", ": [model_specification] has no max_concurrency"),
        ("beam_width=1", "beam_width=4", "line 11: beam_width = 4: it must be 1: there is no beam"),
        ("beam_width=1", "beam_with=1", "line 11: beam_with is not known; did you mean beam_width"),
        ("per_batch_size=1", "per_batch_size=2", "line 7: per_batch_size = 2: it must be 1: a req"),
        ("data_type = bf16", "data_type = fp16", "line 5: data_type = fp16: choose from fp32, bf"),
        ("temperature=0.9\n", "data_type = fp32\n", "line 23: data_type is in this section twice"),
        ("top_p=0.5", "top_p=1.5", "line 17: top_p = 1.5: it must be a number of at least 0"),
        ("use_mem_shuffle=1", "use_mem_shuffle=yes", "line 26: use_mem_shuffle = yes: it must be"),
        ("output_len=500", "output_len=505", "request_output_len = 505: max_seq_len 512 has room"),
        ("max_seq_len=512", "max_seq_len=8", "line 8: max_seq_len = 8: fixed_input_len 8 leaves"),
        ("output_len=500", "output_len=100", "it draws lengths from 128 tokens on, and the longes"),
        ("; a comment", "a comment", "line 2: 'a comment' is neither [section] nor key = value"),
        ("; a comment", "a = 1", "line 2: a comes before the first [section]"),
        ("num_tasks=0", "num_tasks=2", "num_tasks = 2: it must be 0: there is no prompt learning"),
        ("[other_13b]", "[task_0]\ntask_name=x", "line 45: task_name is not known; choose from"),
    ],
)  # fmt: skip
def test_a_malformed_file_names_file_line_and_key(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    with pytest.raises(ValueError) as refused:
        values(tmp_path, (old, new))
    text = str(refused.value)
    assert text.startswith(f"--ini {tmp_path / 'flover.ini'}") and message in text
    assert "\n" not in text
