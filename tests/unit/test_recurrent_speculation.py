"""Drafts in the messages of a ring of two stages: the tokens are those of one process, also where
an end token is among the accepted drafts."""

from __future__ import annotations

import pytest
from conftest import (
    TINY,
    decode,
    make_draft,
    make_requests,
    make_runner,
    random_prompts,
    tiny_transformer,
)
from two_stages import serve_with_drafts

from magicdec.config.sections import DecodingSection, KVSection
from magicdec.decoding.strategy import Setup
from magicdec.engine import Engine

PROMPTS = random_prompts([5, 40, 1, 33, 9, 21], TINY.vocab_size)
NEW, NUM_DRAFTS, MAX_TOKENS = [20, 9, 20, 1, 14, 6], 3, 80


def alone(eos: tuple[int, ...] = ()) -> list[list[int]]:
    """The tokens of one process without drafts."""
    runner, requests = (
        make_runner(tiny_transformer(), 6, MAX_TOKENS),
        make_requests(PROMPTS, NEW, eos),
    )
    engine = Engine(runner, 16)
    engine.prefill(requests)
    decoded = decode(engine, "autoregressive", Setup(runner, DecodingSection(), KVSection()))
    return [list(request.output_ids) for request in decoded]


@pytest.mark.parametrize("lanes", [(1, 1), (3, 1), (1, 3)])
def test_an_end_token_among_accepted_drafts_ends_the_sample(lanes: tuple[int, int]) -> None:
    """The target itself drafts, so that all its drafts are accepted."""
    unended = alone()
    place = next(i for i in range(1, 3) if unended[0][i] not in unended[0][:i])
    end = (unended[0][place],)
    expected, requests = alone(end), make_requests(PROMPTS, NEW, end)
    draft = make_draft(tiny_transformer(), KVSection("full", -1), lanes[0] * lanes[1], MAX_TOKENS)
    counts = serve_with_drafts(
        tiny_transformer(), requests, lanes, MAX_TOKENS, NUM_DRAFTS, "model", draft
    )
    assert [request.output_ids for request in requests] == expected
    assert len(expected[0]) == place + 1 and counts.num_accepted == counts.num_drafted > 0
