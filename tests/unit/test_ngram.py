"""Prompt lookup against its definition written out: what followed the longest earlier occurrence of
the newest tokens, the newest such, in prompt or output."""

import torch
from conftest import make_requests
from hypothesis import given
from hypothesis import strategies as st

from magicdec.device_batch import DeviceBatch
from magicdec.drafting.ngram import Lookup, NgramDrafter
from magicdec.request import Batch

TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def expected(tokens: list[int], count: int, max_ngram: int) -> list[int]:
    """By search from the end, longest suffix first."""
    starts = [
        end
        for n in range(min(max_ngram, len(tokens) - 1), 0, -1)
        for end in range(len(tokens) - 1, n - 1, -1)
        if tokens[end - n : end] == tokens[-n:]
    ]
    text = list(tokens)
    for i in range(count):
        text.append(text[starts[0] + i] if starts else text[-1])
    return text[len(tokens) :]


@given(text=TEXT, more=TEXT, count=st.integers(1, 6), max_ngram=st.integers(1, 5))
def test_a_proposal_is_what_followed_before(
    text: list[int], more: list[int], count: int, max_ngram: int
) -> None:
    lookup = Lookup(max_ngram)
    for part in (text, more):
        lookup.extend(part)
        assert lookup.propose(count) == expected(lookup.tokens, count, max_ngram)
    assert lookup.tokens == text + more, "a proposal is not yet text"


@given(prompts=st.lists(TEXT, min_size=2, max_size=2), outputs=st.lists(TEXT, min_size=4))
def test_a_drafter_follows_the_output_of_each_request(
    prompts: list[list[int]], outputs: list[list[int]]
) -> None:
    """Steps that emit some tokens for one request or for both."""
    requests = make_requests([tuple(p) for p in prompts], 1000)
    for row, request in enumerate(requests):
        request.row = row
    batch, cpu = Batch(tuple(requests)), torch.device("cpu")
    drafter = NgramDrafter(2, 4, cpu)
    drafter.admit(requests)
    on_device = DeviceBatch.of(batch, 100, cpu)
    for i, emitted in enumerate(outputs):
        requests[i % 2].output_ids += emitted
        assert drafter.prepare(requests, 4) == 1
        proposal = drafter.propose(on_device, 4)
        assert proposal.probabilities is None
        assert proposal.ids.tolist() == [
            expected([*r.prompt_ids, *r.output_ids], 4, drafter.max_ngram) for r in requests
        ]
