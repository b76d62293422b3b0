"""Lookup: the tokens that followed earlier occurrences of the newest tokens in a text or corpus,
and how likely they follow again. Imports no torch.

Sources: Saxena 2023 (prompt lookup decoding); SuffixDecoding, arXiv 2411.04975, for lengths by
evidence.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

# tokens of a match; more are not compared
LEAST_MATCH = 3
MOST_MATCH = 32
TOKEN_BITS = 21  # of a token id plus 1, within an n-gram
MOST_PLACES = 16  # places that are compared, the newest ones
MOST_TOKENS = 1 << 17  # tokens that an index remembers at least; it forgets from twice as many on
LEAST_SURVIVAL = 0.1  # a proposal ends where it is accepted so far with less than this probability
# A rate begins as the one below, with the weight of so many tokens; rates of a text begin as those
# of all texts. Of more tokens than the last number, older ones count half.
PRIOR_WEIGHT = 8.0
TEXT_WEIGHT = 4.0
MOST_COUNTED = 32.0
PRIORS = (0.3, 0.45, 0.65, 0.8, 0.85)  # by the class of the length of a match
DISSENT = 0.6  # factor where places disagree

Evidence = tuple[int, int]
"""The class of the length of a match, and: 0 for one place, 1 for several that agree, 2 for several
that do not."""


class SuffixIndex:
    """An index of n-grams of a growing token sequence, with bounded memory. Additions take
    constant time."""

    def __init__(self, tokens: Sequence[int] = (), most_tokens: int = MOST_TOKENS) -> None:
        self.most_tokens = most_tokens
        self._clear()
        self.extend(tokens)

    def _clear(self) -> None:
        self.tokens = array("i")
        # Of each n-gram, the place after its newest occurrence, and for each place the one before
        # it. No token follows the newest n-gram, `end`, so it is not there yet. An n-gram is one
        # number, which is faster to look up than a tuple.
        self.newest: dict[int, int] = {}
        self.before = array("i")
        self.end = 0

    def extend(self, tokens: Sequence[int]) -> None:
        newest = self.newest
        before = self.before
        ngram = self.end
        mask = (1 << TOKEN_BITS * LEAST_MATCH) - 1
        for place, token in enumerate(tokens, len(self.tokens)):
            before.append(newest.get(ngram, -1))
            newest[ngram] = place
            ngram = (ngram << TOKEN_BITS | token + 1) & mask
        self.end = ngram
        self.tokens.extend(tokens)
        if len(self.tokens) >= 2 * self.most_tokens:
            rest = self.tokens[-self.most_tokens :]
            self._clear()
            self.extend(rest)

    def places(self, end: Sequence[int]) -> list[tuple[int, int]]:
        """(length, place) of the newest earlier occurrences of the end of `end`: how many tokens
        match, and where the next token is."""
        ngram = 0
        found = list[tuple[int, int]]()
        if len(end) < LEAST_MATCH:
            return found
        for token in end[-LEAST_MATCH:]:
            ngram = ngram << TOKEN_BITS | token + 1
        place = self.newest.get(ngram, -1)
        while place >= 0 and len(found) < MOST_PLACES:
            found.append((self._matching(end, place), place))
            place = self.before[place]
        return found

    def _matching(self, end: Sequence[int], place: int) -> int:
        text = self.tokens
        most = min(len(end), place)
        for length in range(LEAST_MATCH, most):
            if text[place - 1 - length] != end[-1 - length]:
                return length
        return most


class LookupRates:
    """The rates at which proposed tokens were right, by evidence. A text's rates begin as
    `general`, shared by all texts."""

    def __init__(self, general: LookupRates | None = None) -> None:
        self.general = general
        self._counts: dict[Evidence, tuple[float, float]] = {}  # right, all

    def __call__(self, evidence: Evidence) -> float:
        right, count = self._counts.get(evidence, (0.0, 0.0))
        if self.general is None:
            prior = PRIORS[evidence[0]] * (DISSENT if evidence[1] == 2 else 1.0)
            return (right + PRIOR_WEIGHT * prior) / (count + PRIOR_WEIGHT)
        return (right + TEXT_WEIGHT * self.general(evidence)) / (count + TEXT_WEIGHT)

    def observe(self, evidence: Evidence, is_right: bool) -> None:
        right, count = self._counts.get(evidence, (0.0, 0.0))
        shrink = 0.5 if count >= MOST_COUNTED else 1.0
        self._counts[evidence] = right * shrink + is_right, count * shrink + 1
        if self.general is not None:
            self.general.observe(evidence, is_right)


def length_class(length: int) -> int:
    return min(length.bit_length() - 2, len(PRIORS) - 1)


class Lookup:
    """A growing text with its index. `corpus` is searched too."""

    def __init__(
        self, corpus: SuffixIndex | None = None, general: LookupRates | None = None
    ) -> None:
        self.index = SuffixIndex()
        self.rates = LookupRates(general or LookupRates())
        self.length = 0  # tokens of the text, forgotten ones included
        self._searched = [self.index] if corpus is None else [self.index, corpus]
        self._guess: list[tuple[int, Evidence]] = []  # what may follow, until that is known

    def extend(self, tokens: Sequence[int]) -> None:
        if self._guess:
            for (token, evidence), actual in zip(self._guess, tokens, strict=False):
                self.rates.observe(evidence, token == actual)
                if token != actual:
                    break
            self._guess = []
        self.index.extend(tokens)
        self.length += len(tokens)

    def propose(self, count: int, least: float = LEAST_SURVIVAL) -> list[tuple[int, float]]:
        """At most `count` tokens that may follow, with the probability that each and all before
        are right, no less than `least`.

        They follow most of the places with the longest matches; past its end the text continues
        with the proposal. A proposal ends where the evidence does."""
        text = self.index.tokens
        proposal = list[tuple[int, float]]()
        survival = 1.0
        self._guess = []
        for index in self._searched:
            if self.index.end in index.newest:
                break
        else:
            return proposal
        places = self._places(text[-MOST_MATCH:])
        while places and len(self._guess) < count:
            followers = [
                known[place] if place < len(known) else self._guess[place - len(known)][0]
                for _, known, place in places
            ]
            token = max(followers, key=followers.count)
            votes = followers.count(token)
            agreement = 2 if votes < len(places) else int(votes > 1)
            voters = [p for p, follower in zip(places, followers, strict=True) if follower == token]
            evidence = length_class(max(length for length, _, _ in voters)), agreement
            survival *= self.rates(evidence)
            if survival < least and self._guess:
                break
            # The first token is guessed in any case, to learn how often that would be right.
            self._guess.append((token, evidence))
            if survival < least:
                break
            proposal.append((token, survival))
            places = [
                (length + 1, known, place + 1)
                for length, known, place in voters
                if known is text or place + 1 < len(known)
            ]
        return proposal

    def following(self, path: Sequence[int]) -> int | None:
        """The likeliest token after the text and `path`; None without evidence."""
        places = self._places([*self.index.tokens[-MOST_MATCH:], *path])
        return None if not places else places[0][1][places[0][2]]

    def _places(self, end: Sequence[int]) -> list[tuple[int, array[int], int]]:
        """(length, tokens, place) of the longest matches and those at least half as long,
        longest first."""
        places = [
            (length, index.tokens, place)
            for index in self._searched
            for length, place in index.places(end)
        ]
        places.sort(key=lambda match: -match[0])
        return [found for found in places if 2 * found[0] >= places[0][0]]
