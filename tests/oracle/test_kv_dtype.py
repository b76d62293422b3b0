"""`--kv_dtype fp8`, `int8` and `int4`: logits are those of transformers with K and V rounded by the
definition, and every way to decode over such a cache has the tokens of plain decoding over it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command, load
from rounded import CODES, FP8, as_stored
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from magicdec.attention.sdpa import SDPABackend
from magicdec.distributed.groups import Group
from magicdec.kv.cache import KVCache
from magicdec.model.presets.presets import demo_directory
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.runner.model_runner import ModelRunner

WORKLOAD = "--prefix_len 90 --gen_len 33 --ignore_eos --threads 1"


class RoundedCache(DynamicCache):
    """Keeps and shows K and V [B, G, T, D] as a cache of codes does."""

    def __init__(self, codes: torch.dtype) -> None:
        super().__init__()
        self.codes = codes

    def update(self, key: Tensor, value: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
        rounded = as_stored(key, self.codes, are_keys=True), as_stored(value, self.codes)
        found: tuple[Tensor, Tensor] = super().update(*rounded, *more)
        return found


@pytest.mark.parametrize("codes", CODES, ids=str)
def test_logits_are_those_of_transformers_with_a_rounded_cache(codes: torch.dtype) -> None:
    """In float32, by the reference backend, in forwards of several sizes. Last bits decide some
    codes, so that a few logits differ by more than their rounding, and by far less than they do
    without codes."""
    path = demo_directory("demo")
    model = load(path)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (2, 160), generator=generator)
    group = Group((0,), 0)
    runner = ModelRunner(model, SDPABackend(), group, 2, 160, kv_dtype=codes)
    for row in (0, 1):
        runner.allocate(row)
    found = [
        runner.forward(ForwardBatch(part, [0, 1])) for part in ids.split([100, 30, 5, 1, 24], dim=1)
    ]
    num_heads = 2 * 6 * 4  # of K and V in all layers
    head_bytes = {FP8: 64, torch.int8: 64 + 4, torch.uint8: 2 * (16 + 2)}[codes]
    counts = runner.counts
    assert counts.kv_tokens_read == 2 * (100 + 130 + 135 + 136 + 160)
    assert counts.kv_bytes_read == counts.kv_tokens_read * num_heads * head_bytes
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    rounded = theirs(ids, past_key_values=RoundedCache(codes)).logits
    plain = theirs(ids, past_key_values=DynamicCache()).logits
    ours = (torch.cat(found, dim=1) - rounded).abs()
    without = (plain - rounded).abs()
    assert ours.mean() < without.mean() / 50 and ours.max() < without.max() / 4


DRAFTS = (
    "fp8 --draft self --budget 97 --kv_policy retrieval",
    "int8 --draft self --budget 49",
    "int4 --draft self --budget 49",
    "int4 --draft self --budget 49 --kv_policy snapkv --reselect_every 7",
    "int4 --draft self --budget 97 --kv_policy retrieval",
    "int8 --draft self --budget 49 --kv_policy snapkv --reselect_every 7",
    "int8 --draft self --budget 97 --kv_policy retrieval",
    "int8 --draft self --draft_weights int4 --budget -1",
    "int8 --draft model:demo-draft --budget 49",
    "int8 --draft eagle:demo-eagle --budget -1",
    "int4 --draft ngram+self --budget 49",
    "int8 --draft self --kv_policy quantised",
    "fp8 --draft self --kv_policy quantised",
    "fp8 --draft ngram+self --budget 49 --kv_policy snapkv --reselect_every 7",
)


@pytest.mark.narrow(6)
@pytest.mark.parametrize("draft", DRAFTS)
def test_drafts_are_lossless_over_a_cache_of_codes(
    draft: str, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In bfloat16, in which kernels give a token the same bits in every step."""
    out = tmp_path / "out.jsonl"
    make = KVCache.__init__
    made = list[torch.dtype]()

    def make_and_see(cache: KVCache, *given: Any, **named: Any) -> None:
        make(cache, *given, **named)
        made.append(cache.k.dtype)

    monkeypatch.setattr(KVCache, "__init__", make_and_see)
    words = f"{WORKLOAD} --B 2 --num_batches 1 --dtype bfloat16 --kv_dtype {draft} --out {out}"
    ended = command("run", *words.split())
    assert ended.code == 0, ended.err
    kv_dtype = draft.split()[0]
    stored = {"fp8": FP8, "int8": torch.int8, "int4": torch.uint8}
    assert made[0] == stored[kv_dtype], "the target's"
    for line in out.read_text().splitlines():
        record = json.loads(line)
        assert record["status"] == "verified"
        assert record["config"]["attention"]["kv_dtype"] == kv_dtype


@pytest.mark.narrow(2)
@pytest.mark.parametrize(
    "modes",
    [
        "inflight inflight+draft --kv_dtype int4 --prefix_cache --block_tokens 64 --draft self "
        "--budget 49",
        "static ring pipeline --kv_dtype int8",
        "inflight inflight+draft --kv_dtype fp8 --prefix_cache --block_tokens 64 --draft self "
        "--budget 49 --nproc 2",
        "static ring pipeline --kv_dtype fp8",
        "inflight inflight+draft --kv_dtype int8 --prefix_cache --block_tokens 64 --draft self "
        "--budget 49",
        "static ring pipeline --kv_dtype int4",
        "static static+draft --kv_dtype int8 --draft self --budget 49 --nproc 2",
    ],
)
def test_modes_are_lossless_over_a_cache_of_codes(
    modes: str, command: Command, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    words = f"{WORKLOAD} --num_requests 4 --arrival burst --dtype bfloat16 --out {out}"
    ended = command("serve", *words.split(), "--modes", *modes.split())
    assert ended.code == 0, ended.err
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert {record["status"] for record in records} == {"verified"}
