"""What a lookup proposes, and what it learns, against a search of the whole text that keeps nothing
but the text and a list of all outcomes."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magicdec.speculation import suffix_index
from magicdec.speculation.suffix_index import Evidence, Lookup, LookupRates, SuffixIndex

CLASSES = [(length, agreement) for length in range(5) for agreement in range(3)]
Outcome = tuple[Evidence, bool]


def class_of(length: int) -> int:
    """Matches of 3, 4 to 7, 8 to 15, 16 to 31, and more tokens."""
    return sum(length >= least for least in (4, 8, 16, 32))


def share(outcomes: Sequence[Outcome], evidence: Evidence, prior: float, weight: float) -> float:
    """How many of the outcomes with this evidence were right, beside a prior of a weight. Where 32
    are counted, they count half when another comes."""
    right = count = 0.0
    for other, is_right in outcomes:
        if other != evidence:
            continue
        if count >= 32:
            right = right / 2
            count = count / 2
        right = right + is_right
        count = count + 1
    return (right + weight * prior) / (count + weight)


class PlainLookup:
    """`shared` are the outcomes of all texts."""

    def __init__(self, corpus: Sequence[int], shared: list[Outcome]) -> None:
        self.corpus = list(corpus)
        self.shared = shared
        self.text = list[int]()
        self.own = list[Outcome]()
        self.guess: list[tuple[int, Evidence]] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Of a guess, all tokens up to the first wrong one were judged; what comes after that was
        said of another text."""
        for (token, evidence), actual in zip(self.guess, tokens, strict=False):
            for outcomes in (self.own, self.shared):
                outcomes.append((evidence, token == actual))
            if token != actual:
                break
        self.guess = []
        self.text += tokens

    def rate(self, evidence: Evidence) -> float:
        length, agreement = evidence
        prior = suffix_index.PRIORS[length] * (0.6 if agreement == 2 else 1.0)
        return share(self.own, evidence, share(self.shared, evidence, prior, 8.0), 4.0)

    def matches(self, source: Sequence[int]) -> list[tuple[int, int]]:
        """(length, place) of the 16 newest places before which the last three tokens of the text or
        more stand, up to 32 of them."""
        end = self.text[-32:]
        found = []
        for place in range(len(source) - 1, 2, -1):
            length = 0
            while length < min(place, len(end)) and source[place - 1 - length] == end[-1 - length]:
                length += 1
            if length >= 3:
                found.append((length, place))
        return found[:16]

    def propose(self, count: int) -> list[tuple[int, float]]:
        places = [(n, self.text, p) for n, p in self.matches(self.text)] if self.text else []
        places += [(n, self.corpus, p) for n, p in self.matches(self.corpus)]
        longest = max((length for length, _, _ in places), default=0)
        places = [place for place in places if 2 * place[0] >= longest]
        proposal = list[tuple[int, float]]()
        survival = 1.0
        self.guess = []
        for number in range(count):
            known = [*self.text, *(token for token, _ in self.guess)]
            followers = [
                (length + number, (known if source is self.text else source)[place + number])
                for length, source, place in places
                if source is self.text or place + number < len(source)
            ]
            places = [
                place
                for place in places
                if place[1] is self.text or place[2] + number < len(place[1])
            ]
            if not followers:
                break
            tokens = [token for _, token in followers]
            most = max(map(tokens.count, tokens))
            # Of several with as many places, the one with the longest match; then the newest place.
            token = next(
                t for _, t in sorted(followers, key=lambda f: -f[0]) if tokens.count(t) == most
            )
            agreement = 2 if most < len(tokens) else int(most > 1)
            evidence = class_of(max(n for n, t in followers if t == token)), agreement
            survival *= self.rate(evidence)
            if survival < 0.1 and self.guess:
                break
            self.guess.append((token, evidence))
            if survival < 0.1:
                break
            proposal.append((token, survival))
            places = [p for p, t in zip(places, tokens, strict=True) if t == token]
        return proposal


TOKENS = st.lists(st.integers(0, 2), max_size=12)
STEPS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 6), st.integers(0, 9), TOKENS), max_size=25
)


@settings(max_examples=60)
@given(
    start=st.lists(st.integers(0, 2), min_size=4, max_size=30),
    corpus=st.lists(st.integers(0, 2), max_size=20),
    steps=STEPS,
    trust=st.sampled_from([1.0, 1.2]),
)
def test_lookups_propose_and_learn_what_a_search_of_the_whole_text_does(
    start: list[int], corpus: list[int], steps: list[tuple[int, int, int, list[int]]], trust: float
) -> None:
    """Two texts that share their rates. A step proposes up to 9 tokens, of which the first ones are
    right, then others follow."""
    with pytest.MonkeyPatch.context() as patch:
        priors = tuple(min(0.99, trust * prior) for prior in suffix_index.PRIORS)
        patch.setattr(suffix_index, "PRIORS", priors)
        general = LookupRates()
        outcomes = list[Outcome]()
        index = SuffixIndex(corpus)
        lookups = [Lookup(index if corpus else None, general) for _ in range(2)]
        plains = [PlainLookup(corpus, outcomes) for _ in range(2)]
        for lookup, plain in zip(lookups, plains, strict=True):
            lookup.extend(start)
            plain.extend(start)
        for which, num_right, count, others in steps:
            lookup = lookups[which]
            plain = plains[which]
            found = lookup.propose(count)
            expected = plain.propose(count)
            assert [token for token, _ in found] == [token for token, _ in expected]
            assert [p for _, p in found] == pytest.approx([p for _, p in expected])
            right = [token for token, _ in expected][:num_right]
            for learner in (lookup, plain):
                learner.extend([*right, *others])
            for evidence in CLASSES:
                for ours, theirs in zip(lookups, plains, strict=True):
                    assert ours.rates(evidence) == pytest.approx(theirs.rate(evidence)), evidence


def test_nothing_is_learned_of_what_follows_a_wrong_token() -> None:
    lookup = Lookup()
    plain = PlainLookup((), [])
    for learner in (lookup, plain):
        learner.extend([*range(3, 20), *range(3, 10)])
        assert [token for token, _ in learner.propose(3)] == [10, 11, 12]
        learner.extend([10, 1, 12])
    assert len(plain.own) == 2
    for evidence in CLASSES:
        assert lookup.rates(evidence) == pytest.approx(plain.rate(evidence))
