"""`--kv_dtype int8`: tokens are those of transformers with K and V rounded by the definition, and
every way to decode over such a cache has the tokens of plain decoding over it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import as_int8
from conftest import Command
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from magicdec.model.presets.presets import demo_directory

WORKLOAD = "--prefix_len 90 --gen_len 33 --ignore_eos --threads 1 --kv_dtype int8"


class RoundedCache(DynamicCache):
    """Keeps and shows K and V [B, G, T, D] as an int8 cache does."""

    def update(self, key: Tensor, value: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = super().update(as_int8(key), as_int8(value), *more)
        return found


def test_tokens_are_those_of_transformers_with_a_rounded_cache(
    command: Command, tmp_path: Path
) -> None:
    """In float32, where the reference backend reads such a cache."""
    tokens = tmp_path / "tokens.jsonl"
    words = f"{WORKLOAD} --B 2 --num_batches 1 --dtype float32 --attention sdpa --draft self"
    words += f" --budget 33 --save_tokens {tokens} --out {tmp_path / 'out.jsonl'}"
    ended = command("run", *words.split())
    assert ended.code == 0, ended.err
    model = AutoModelForCausalLM.from_pretrained(demo_directory("demo"), dtype=torch.float32)
    plain = []
    for line in tokens.read_text().splitlines():
        text = json.loads(line)
        ids = torch.tensor([text["prompt_ids"]])
        outputs = []
        for cache in (RoundedCache(), DynamicCache()):
            found = model.generate(
                ids,
                past_key_values=cache,
                max_new_tokens=len(text["output_ids"]),
                min_new_tokens=len(text["output_ids"]),
                do_sample=False,
                pad_token_id=0,
            )
            outputs.append(found[0, ids.shape[1] :].tolist())
        assert text["output_ids"] == outputs[0]
        plain.append(outputs[0] == outputs[1])
    record = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[-1])
    assert record["config"]["attention"]["kv_dtype"] == "int8"


DRAFTS = (
    "--draft self --budget 49",
    "--draft self --budget 49 --kv_policy snapkv --reselect_every 7",
    "--draft self --budget 97 --kv_policy retrieval",
    "--draft self --draft_weights int4 --budget -1",
    "--draft model:demo-draft --budget 49",
    "--draft eagle:demo-eagle --budget -1",
    "--draft ngram+self --budget 49",
)


@pytest.mark.narrow(4)
@pytest.mark.parametrize("draft", DRAFTS)
def test_drafts_are_lossless_over_an_int8_cache(
    draft: str, command: Command, tmp_path: Path
) -> None:
    """In bfloat16, in which kernels give a token the same bits in every step."""
    out = tmp_path / "out.jsonl"
    words = f"{WORKLOAD} --B 2 --num_batches 1 --dtype bfloat16 {draft} --out {out}"
    ended = command("run", *words.split())
    assert ended.code == 0, ended.err
    for line in out.read_text().splitlines():
        record = json.loads(line)
        assert record["status"] == "verified"
        assert record["config"]["attention"]["kv_dtype"] == "int8"


@pytest.mark.narrow(2)
@pytest.mark.parametrize(
    "modes",
    [
        "inflight inflight+draft --prefix_cache --block_tokens 64 --draft self --budget 49",
        "static ring pipeline",
        "static static+draft --draft self --budget 49 --nproc 2",
    ],
)
def test_modes_are_lossless_over_an_int8_cache(
    modes: str, command: Command, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    words = f"{WORKLOAD} --num_requests 4 --arrival burst --dtype bfloat16 --out {out}"
    ended = command("serve", *words.split(), "--modes", *modes.split())
    assert ended.code == 0, ended.err
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert {record["status"] for record in records} == {"verified"}
