"""Prompt lookup against its definition written out by search, and what its evidence is worth."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from conftest import make_requests
from hypothesis import given
from hypothesis import strategies as st

from magicdec.config.sections import DecodingSection
from magicdec.runner.device_batch import DeviceBatch
from magicdec.runner.request import Batch
from magicdec.speculation import suffix_index
from magicdec.speculation.draft_length import LOOKUP, DraftCost, FixedLength
from magicdec.speculation.drafter import DraftShape
from magicdec.speculation.ngram import NgramDrafter, best_length
from magicdec.speculation.suffix_index import (
    LEAST_MATCH,
    MOST_MATCH,
    MOST_PLACES,
    Lookup,
    LookupRates,
    SuffixIndex,
)

TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=60)
CPU = torch.device("cpu")


def matching(tokens: Sequence[int], place: int, end: Sequence[int]) -> int:
    """How many of the last tokens of `end` stand before `place`."""
    most = min(place, len(end))
    return next((n for n in range(most) if tokens[place - 1 - n] != end[-1 - n]), most)


def expected_places(tokens: Sequence[int], end: Sequence[int]) -> list[tuple[int, int]]:
    lengths = [(matching(tokens, place, end), place) for place in reversed(range(len(tokens)))]
    return [length for length in lengths if length[0] >= LEAST_MATCH][:MOST_PLACES]


@given(parts=st.lists(TEXT, min_size=1, max_size=4), path=st.lists(st.integers(0, 3), max_size=5))
def test_places_are_those_of_a_search(parts: list[list[int]], path: list[int]) -> None:
    index = SuffixIndex()
    tokens = list[int]()
    for part in parts:
        index.extend(part)
        tokens += part
        end = [*tokens, *path][-MOST_MATCH:]
        assert list(index.tokens) == tokens
        assert index.places(end) == expected_places(tokens, end)


@given(tokens=TEXT, most=st.integers(1, 12))
def test_a_bounded_index_knows_the_newest_tokens(tokens: list[int], most: int) -> None:
    """As one that was made of them alone, and memory for no more than twice as many."""
    index = SuffixIndex(most_tokens=most)
    for token in tokens:
        index.extend([token])
        assert len(index.tokens) < 2 * most
        assert len(index.newest) < 2 * most and len(index.before) == len(index.tokens)
    assert list(index.tokens) == tokens[len(tokens) - len(index.tokens) :]
    assert len(index.tokens) >= min(most, len(tokens))
    end = tokens[-MOST_MATCH:]
    assert index.places(end) == SuffixIndex(index.tokens).places(end)


@pytest.mark.parametrize("tokens", [[5] * 1000, list(range(7)) * 150, [*range(500)] * 2])
def test_a_search_compares_few_tokens(tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts in which everything matches. A count of comparisons, not a time."""
    index = SuffixIndex(tokens)
    calls = []
    matching = SuffixIndex._matching
    monkeypatch.setattr(
        SuffixIndex, "_matching", lambda *args: calls.append(args) or matching(*args)
    )
    index.places(tokens[-MOST_MATCH:])
    assert 0 < len(calls) <= MOST_PLACES


@pytest.fixture
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    """All evidence is believed."""
    monkeypatch.setattr(suffix_index, "PRIORS", (0.95,) * len(suffix_index.PRIORS))


@pytest.mark.usefixtures("trusting")
def test_a_proposal_continues_with_itself_past_the_end_of_the_text() -> None:
    lookup = Lookup()
    lookup.extend([1, 2, 3, 1, 2, 3, 1, 2])
    assert [token for token, _ in lookup.propose(7)] == [3, 1, 2, 3, 1, 2, 3]


@pytest.mark.usefixtures("trusting")
def test_most_of_the_places_decide_and_no_evidence_is_no_proposal() -> None:
    lookup = Lookup()
    lookup.extend([6, 1, 2, 7, 6, 1, 2, 7, 6, 1, 2, 8, 9, 4, 5])
    assert lookup.propose(4) == [] and lookup.following([]) is None
    lookup.extend([6, 1, 2])
    ((token, probability), *_) = lookup.propose(4)
    assert token == 7 and 0 < probability < 1
    assert lookup.following([9, 4, 5]) == 6, "after the text and a path"


def test_a_corpus_is_searched_too() -> None:
    lookup = Lookup(SuffixIndex([1, 2, 3, 4, 5]))
    lookup.extend([9, 1, 2, 3])
    proposal = lookup.propose(9)
    assert [token for token, _ in proposal] == [4, 5][: len(proposal)] and proposal


def test_probabilities_rise_with_the_match_and_are_learned() -> None:
    """What is always right grows longer, and what is always wrong is believed no more."""
    probabilities = []
    for length in (3, 5, 9, 20):
        lookup = Lookup()
        lookup.extend([*range(100, 130), 77, *range(130 - length, 130)])
        probabilities.append(lookup.propose(1)[0][1])
    assert probabilities == sorted(set(probabilities))
    for is_right in (True, False):
        general = LookupRates()
        first = last = None
        for round_number in range(60):
            lookup = Lookup(None, general)
            text = [1000 * round_number + n for n in range(8)]
            lookup.extend([*text, *text[:4]])
            proposal = lookup.propose(3)
            first = first or proposal
            last = proposal
            lookup.extend(text[4:] if is_right else [5])
        if is_right:
            assert last[0][1] > 0.8 and len(last) == 3 > len(first)
        else:
            assert not last or last[0][1] < first[0][1] / 2


@pytest.mark.parametrize("can_join", [False, True])
def test_what_a_step_verifies_is_worth_its_time(can_join: bool) -> None:
    """The best number, by trying all."""
    certain = [0.9**n for n in range(1, 20)]
    doubtful = [0.3, 0.1]
    assert best_length([doubtful], DraftCost(0, 0.3)) == best_length([[]], LOOKUP) == (0, 1.0)
    for survivals, token in (
        ([certain], 0.1),
        ([certain, [], doubtful], 0.1),
        ([certain] * 4, 0.4),
    ):
        token_cost = DraftCost(0.05, token)
        speeds = []
        for n in range(1, 20):
            drafts = [p[:n] for p in survivals]
            tokens = sum(map(len, drafts)) / len(drafts) if can_join else n
            speeds.append((1 + sum(map(sum, drafts)) / len(drafts)) / token_cost(tokens))
        count, speed = best_length(survivals, token_cost, can_join)
        assert speed == pytest.approx(max(speeds)) and speeds[count - 1] == pytest.approx(speed)
    alone, *others = (
        best_length(rows, DraftCost(0.05, 0.1), can_join)[0]
        for rows in ([certain], [certain, [], []])
    )
    assert can_join or others[0] < alone, "others pay"
    assert best_length([certain, []], DraftCost(0.5, 0.1))[0] > 0
    assert best_length([certain, []], DraftCost(3.0, 0.1)) == (0, 1.0), "a step's own part counts"


@given(prompts=st.lists(TEXT, min_size=2, max_size=2), outputs=st.lists(TEXT, min_size=4))
def test_a_drafter_follows_the_output_of_each_request(
    prompts: list[list[int]], outputs: list[list[int]]
) -> None:
    """Steps that emit some tokens for one request or for both. Rows with fewer are padded."""
    requests = make_requests([tuple(p) for p in prompts], 1000)
    for row, request in enumerate(requests):
        request.row = row
        request.output_ids.append(0)
    batch = Batch(tuple(requests))
    drafter = NgramDrafter(2, 4, CPU)
    drafter.admit(requests)
    general = LookupRates()
    lookups = [Lookup(None, general) for _ in requests]
    for lookup, request in zip(lookups, requests, strict=True):
        lookup.extend(request.prompt_ids)
    on_device = DeviceBatch.of(batch, 100, CPU)
    length = FixedLength(4)
    length.cost = DraftCost(0.05, 0.05)
    for i, emitted in enumerate(outputs):
        requests[i % 2].output_ids += emitted
        proposals = []
        for lookup, request in zip(lookups, requests, strict=True):
            lookup.extend(request.output_ids[lookup.length - len(request.prompt_ids) :])
            proposals.append(lookup.propose(4))
        plan = drafter.plan(requests, 4, length)
        longest = best_length([[p for _, p in pairs] for pairs in proposals], length.cost)[0]
        assert max(plan.counts) == longest
        assert drafter.prepare(requests, longest) == 1
        ids = drafter.propose(on_device, DraftShape(longest)).ids
        assert ids.shape == (2, longest)
        for row, (proposal, count) in enumerate(zip(proposals, plan.counts, strict=True)):
            tokens = [token for token, _ in proposal][:longest]
            assert count == len(tokens)
            padding = [requests[row].last_token] * (longest - count)
            assert ids[row].tolist() == [*tokens, *padding]


def test_lengths_by_default_and_by_gamma() -> None:
    looked_up = DecodingSection("speculative", "ngram")
    assert (looked_up.max_gamma, looked_up.max_draft_forwards) == (31, 31)
    mixed = replace(looked_up, drafter="ngram+self")
    assert (mixed.max_gamma, mixed.max_draft_forwards, mixed.gamma_or_default) == (31, 8, "auto")
    six = replace(mixed, gamma=6)
    assert (six.max_gamma, six.max_draft_forwards) == (6, 6)
