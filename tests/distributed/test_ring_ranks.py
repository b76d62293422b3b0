"""Samples that circulate through 2, 3 and 4 ranks have the tokens of one process: ragged prompts
and lengths, end tokens, lanes of several samples, stages of several ranks, greedy and sampled, in
Llama-type and GPT-2-type blocks; also where their messages carry drafts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import TINY, Launch, decode, make_runner, save_checkpoint, tiny_transformer
from distributed.ring import CASES, LENGTHS, MAX_TOKENS, Case, cases_of, requests_of
from tiny_families import MODELS, make_model

from magicdec.config.sections import DecodingSection, KVSection
from magicdec.decoding.strategy import Setup
from magicdec.distributed.tensor_parallel import Shard
from magicdec.engine import Engine
from magicdec.model.checkpoint.source import find_model, load_transformer

DEPTH = 5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    llama, gpt2 = (tmp_path_factory.mktemp(name) for name in ("llama", "gpt2"))
    save_checkpoint(tiny_transformer(replace(TINY, num_layers=DEPTH)), llama)
    family, sizes = MODELS["gpt2"]
    make_model(family, sizes | {"n_layer": DEPTH, "n_inner": 96}).save_pretrained(gpt2)
    return [llama, gpt2]


@cache
def one_process(path: Path, case: Case) -> list[list[int]]:
    """By the engine, one sample after the other."""
    source, cpu = find_model("--model", str(path)), torch.device("cpu")
    model = load_transformer(source.config, source.weights, Shard(), None, torch.float32, cpu)
    runner, outputs = make_runner(model, 1, MAX_TOKENS), []
    for request in requests_of(case):
        engine = Engine(runner, 16)
        engine.prefill([request])
        setup = Setup(runner, DecodingSection(), KVSection())
        (done,) = decode(engine, "autoregressive", setup)
        outputs.append(list(done.output_ids))
    return outputs


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_tokens_are_those_of_one_process(
    num_ranks: int, launch: Launch, models: Sequence[Path]
) -> None:
    done = launch("distributed/ring.py", *models, num_ranks=num_ranks)
    assert done.returncode == 0, done.stderr
    outputs = json.loads(done.stdout.splitlines()[-1])
    cases = cases_of(num_ranks)
    assert num_ranks != 4 or set(cases) == set(CASES)
    for path, of_model in zip(models, outputs, strict=True):
        for case, tokens in zip(cases, of_model, strict=True):
            assert tokens == one_process(path, case), (path.name, case)
            assert len({len(each) for each in tokens}) > 4 and len(tokens) == len(LENGTHS)
