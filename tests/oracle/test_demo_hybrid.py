"""The packaged model with linear attention: it is small, computed as transformers computes it, and
finds what stood before; drafts of its head are right now and then."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from conftest import Command
from tiny_hybrids import check_greedy_tokens

from magicdec.llm import LLM
from magicdec.model.presets.presets import demo_directory

FOLDER = demo_directory("demo-hybrid")
MOST_BYTES = 15e6
FIRST_WORD = 259


def test_it_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < MOST_BYTES


@pytest.mark.wide
def test_greedy_tokens_are_those_of_transformers() -> None:
    llm = LLM("demo-hybrid", draft="mtp", dtype="float32", threads=1)
    check_greedy_tokens(llm, FOLDER, 8)


def test_it_finds_what_stood_before() -> None:
    """Random tokens that come again after 300 others, by transformers."""
    other = transformers.Qwen3_5ForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(FIRST_WORD, other.config.vocab_size, (1, 364), generator=generator)
    ids = torch.cat([ids, ids[:, :64]], dim=1)
    with torch.no_grad():
        guesses = other(ids).logits[0, 364 + 15 : -1].argmax(-1)
    assert (guesses == ids[0, 364 + 16 :]).float().mean() > 0.5


def test_its_head_drafts(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    words = "run --model demo-hybrid --draft mtp --kv_policy full --gamma 2 --dtype float32"
    sizes = "--prefix_len 200 --gen_len 40 --B 3 --num_batches 1 --warmup_batches 0 --threads 1"
    ended = command(*words.split(), *sizes.split(), "--out", out)
    assert ended.code == 0, ended.err
    *_, drafted = map(json.loads, out.read_text().splitlines())
    assert drafted["status"] == "verified"
    assert drafted["metrics"]["mean_acceptance_length"] > 1.2
