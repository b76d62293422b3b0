"""Samples that circulate through 2, 3 and 4 ranks have the tokens of one process: ragged prompts
and lengths, end tokens, lanes of several samples, stages of several ranks, greedy and sampled, in
Llama-type and GPT-2-type blocks; also where their messages carry drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from conftest import TINY, Launch, load, save_checkpoint, tiny_transformer
from distributed.ring import CASES, LENGTHS, MAX_TOKENS, Case, cases_of, requests_of
from several_ranks import answer_of, generate_alone
from tiny_families import MODELS, make_model

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
    return generate_alone(load(path), requests_of(case), MAX_TOKENS)


@pytest.mark.parametrize(
    "num_ranks", [*(pytest.param(n, marks=pytest.mark.wide) for n in (2, 3)), 4]
)
def test_the_tokens_are_those_of_one_process(
    num_ranks: int, launch: Launch, models: Sequence[Path]
) -> None:
    outputs = answer_of(launch, "distributed/ring.py", *models, num_ranks=num_ranks)
    assert num_ranks != 4 or set(cases_of(num_ranks, 0)) == set(CASES)
    for model, (path, of_model) in enumerate(zip(models, outputs, strict=True)):
        for case, tokens in zip(cases_of(num_ranks, model), of_model, strict=True):
            assert tokens == one_process(path, case), (path.name, case)
            assert len({len(each) for each in tokens}) > 4 and len(tokens) == len(LENGTHS)
