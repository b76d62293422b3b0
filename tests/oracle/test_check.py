"""The check itself: what is identical, what is a tie, what is a divergence."""

from __future__ import annotations

import pytest
import torch
from conftest import TINY, make_requests, make_runner, random_prompts, tiny_transformer

from magicdec.config.sections import DecodingSection, KVSection
from magicdec.decoding.speculative import autoregressive
from magicdec.decoding.strategy import Setup
from magicdec.engine import Engine
from magicdec.model.transformer import Transformer
from magicdec.records.correctness import Correctness
from magicdec.request import Request
from magicdec.run.check import check_outputs, first_difference

NUM_NEW = 30


def decoded(model: Transformer) -> list[Request]:
    engine = Engine(make_runner(model, 2, 90), 64)
    requests = make_requests(random_prompts([40, 25], TINY.vocab_size), NUM_NEW)
    engine.prefill(requests)
    strategy = autoregressive(Setup(engine.runner, DecodingSection(), KVSection("full")))
    engine.begin(strategy)
    return [r.snapshot() for r in engine.decode(strategy)]


def with_twin(token: int) -> Transformer:
    """A model in which id 96 has the very logits of `token`, and reads like it: always a tie."""
    model = tiny_transformer()
    model.head.weight[96] = model.head.weight[token]
    model.embedding.weight[96] = model.embedding.weight[token]
    return model


def check(model: Transformer, expected: list[Request], found: list[Request]) -> Correctness:
    import copy

    def make_wider():  # type: ignore[no-untyped-def]
        return make_runner(copy.deepcopy(model).double(), 1, 90)

    return check_outputs("autoregressive", expected, found, "float32", make_wider, chunk=32)


def test_equal_outputs_are_identical_and_need_no_replay() -> None:
    expected, found = decoded(tiny_transformer()), decoded(tiny_transformer())

    def refuse():  # type: ignore[no-untyped-def]
        raise AssertionError("nothing to replay")

    result = check_outputs("autoregressive", expected, found, "float32", refuse, 32)
    assert result.identical and result.num_tokens == 2 * NUM_NEW and result.num_excused == 0
    assert result.passed


@pytest.mark.parametrize("index", [0, 7, NUM_NEW - 1])
def test_a_wrong_token_is_a_divergence(index: int) -> None:
    model = tiny_transformer()
    expected, found = decoded(model), decoded(model)
    found[1].output_ids[index] = (found[1].output_ids[index] + 1) % 90
    result = check(model, expected, found)
    assert not result.identical and not result.passed and result.num_excused == 0
    assert result.first_divergence is not None
    assert result.first_divergence.sequence == 1 and result.first_divergence.index == index
    assert result.first_divergence.margin > 1e-2


def test_a_missing_token_is_a_divergence() -> None:
    model = tiny_transformer()
    expected, found = decoded(model), decoded(model)
    found[0].output_ids.pop()
    assert not check(model, expected, found).passed


def test_a_tie_is_settled_and_counted() -> None:
    plain = decoded(tiny_transformer())
    token = plain[0].output_ids[5]
    model = with_twin(token)
    expected, found = decoded(model), decoded(model)
    at = expected[0].output_ids.index(token)
    found[0].output_ids[at] = 96
    result = check(model, expected, found)
    assert not result.identical and result.passed and result.num_excused == 1
    assert result.first_divergence is not None and result.first_divergence.margin < 1e-9


def test_a_tie_does_not_excuse_what_follows_it() -> None:
    """The rest of the row is replayed too: a tie at one place must not wave a wrong token
    through."""
    plain = decoded(tiny_transformer())
    token = plain[0].output_ids[5]
    model = with_twin(token)
    expected, found = decoded(model), decoded(model)
    at = expected[0].output_ids.index(token)
    found[0].output_ids[at] = 96
    found[0].output_ids[at + 3] = (found[0].output_ids[at + 3] + 1) % 90
    assert not check(model, expected, found).passed


def test_first_difference() -> None:
    assert first_difference(0, [1, 2], [1, 2]) is None
    assert first_difference(3, [1, 2], [1, 4]).index == 1  # type: ignore[union-attr]
    shorter = first_difference(0, [1, 2], [1])
    assert shorter is not None and (shorter.index, shorter.expected, shorter.found) == (1, 2, None)


def test_float64_replay_agrees_with_float32_decoding() -> None:
    from magicdec.run.check import deficit

    model = tiny_transformer()
    runner = make_runner(tiny_transformer(dtype=torch.float64), 1, 90)
    for request in decoded(model):
        assert deficit(runner, request.prompt_ids, request.output_ids, 16) < 1e-4
