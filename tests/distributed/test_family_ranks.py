"""Families over two real ranks: GPT-2 with heads that do not divide, Falcon 40B's groups, BLOOM,
GPT-J's one sum a layer, Mistral past its window."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Drive, Launch
from tiny_families import MODELS, make_model

FLAGS = (
    *("--B", 2, "--prefix_len", 80, "--gen_len", 24, "--num_batches", 1, "--warmup_batches", 0),
    *("--dtype", "float32", "--gamma", 3, "--streamingllm_budget", 24),
    *("--num_sink_tokens", 4, "--ignore_eos"),
)
UNEVEN: dict[str, dict[str, Any]] = {
    "gpt2": {"n_head": 5, "n_embd": 40},
    "gptj": {"n_head": 3, "n_embd": 48, "rotary_dim": 4},
    "falcon-40b": {"num_attention_heads": 12, "num_kv_heads": 3, "hidden_size": 96},
    "bloom": {"n_head": 5, "hidden_size": 40},
    "mistral": {"num_key_value_heads": 1},
}
TOKENS = {"vocab_size": 2051, "bos_token_id": 1, "eos_token_id": 2}
TOKENIZER = ROOT / "magicdec" / "demo" / "target" / "tokenizer.model"


@pytest.mark.parametrize(
    "name", [n if n == "gpt2" else pytest.param(n, marks=pytest.mark.wide) for n in UNEVEN]
)
def test_two_ranks_emit_the_tokens_of_one(
    name: str, drive: Drive, text_file: Path, tmp_path: Path
) -> None:
    family, sizes = MODELS[name]
    directory = tmp_path / name
    make_model(family, sizes | UNEVEN[name] | TOKENS).save_pretrained(directory)
    shutil.copy(TOKENIZER, directory)
    words = "--model", directory, "--dataset", text_file, *FLAGS
    outputs = [drive("selfspec", *words, num_ranks=num_ranks) for num_ranks in (1, 2)]
    records = [found.records[0] for found in outputs]
    assert all(r["status"] == "ok" and r["correctness"]["identical"] for r in records)
    assert [r["environment"]["world_size"] for r in records] == [1, 2]
    tokens = [found.tokens for found in outputs]
    assert tokens[0] == tokens[1] and all(len(t) == 24 for t in tokens[0])


@pytest.mark.parametrize(("name", "why"), [("gpt2", "learned positions"), ("bloom", "ALiBi")])
def test_a_draft_that_cannot_roll_is_refused_in_one_line(
    name: str, why: str, launch: Launch, tmp_path: Path
) -> None:
    family, sizes = MODELS[name]
    make_model(family, sizes | TOKENS | {"vocab_size": 2048}).save_pretrained(tmp_path / name)
    shutil.copy(TOKENIZER, tmp_path / name)
    done = launch(
        "longspec_benchmark.py", "--target", "demo", "--model", tmp_path / name, *FLAGS,
        "--kv_policy", "streaming_llm",
    )  # fmt: skip
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert f"but --model {name} has {why}; choose from full, snapkv" in done.stderr
