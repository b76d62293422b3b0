"""The noise of what a server says of tokens: how far its log-probabilities of one place differ,
asked for in every way in which it says them. A token may lose by so much and yet be right."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from magicdec.bench.audit.asking import AuditedServer, ServerAnswer, together
from magicdec.bench.audit.judging import Judge, gap, spread
from magicdec.bench.audit.record import NoisePair
from magicdec.systems.servers.server_format import ScoredToken

# By which a right token may lose at most: 8 spacings of bfloat16 logits between 8 and 16.
MOST_NOISE = 0.5
# No noise of a sound server: one with 4-bit weights and 8-bit activations differs by .85 at most.
CONTRADICTION = 2.0
LEAST_TOLERANCE = 1e-3  # of servers that round what they say
SPACINGS = 2  # of logits between which a comparison is a tie
FINEST = -10  # the power of 2 below which logits have no visible spacing
NUM_NOISE_TEXTS = 4
NUM_NOISE_PLACES = 12
NUM_COLD_PLACES = 2
TEXT = "whole text"
TOKEN = "one token"
OTHERS = ", among others"
COLD = ", without KV"
ScoresByPlace = dict[tuple[int, int], ScoredToken]
"""What is said at places of texts, by text and place of the output."""
Way = Callable[[Sequence[ServerAnswer]], ScoresByPlace]


@dataclass(frozen=True)
class Noise:
    """`tolerance`: by how much a right token may be less likely than the likeliest one. `relative`:
    the root of the mean square of the differences, which is the relative error of a probability.
    `contradictions`: sentences about ways that differ by more than noise."""

    pairs: list[NoisePair]
    tolerance: float
    relative: float
    contradictions: list[str]

    @property
    def text_is_wrong(self) -> bool:
        return any(TEXT in text for text in self.contradictions)


def measure_noise(
    answers: Sequence[ServerAnswer], judge: Judge, plain: Judge | None, concurrency: int
) -> Noise:
    """The noise of what a server says of a few places, in every way in which it can be asked, and
    beside a plain server of the same model. Raises ValueError if that one has another model."""
    texts = [answers[i] for i in spread(len(answers), NUM_NOISE_TEXTS)]
    ways = {name: way(texts) for name, way in _ways(judge, concurrency)}
    reference = ways[TOKEN]
    others = {f"{TOKEN} and {name}": found for name, found in ways.items() if name != TOKEN}
    if TEXT + OTHERS in ways:
        others[f"{TEXT}, alone and among others"] = ways[TEXT + OTHERS]
    pairs = list[NoisePair]()
    differences = list[float]()
    contradictions = list[str]()
    for name, found in others.items():
        base = ways[TEXT] if name.startswith(TEXT) else reference
        apart = differences_of(base, found)
        if not apart:
            continue
        pair = _pair(name, apart)
        pairs.append(pair)
        if pair.largest > CONTRADICTION:
            contradictions.append(
                f"the server says of one place log-probabilities that differ by {pair.largest:.2f} "
                f"({name}; {pair.num_places} places, median {pair.median:.3f})"
            )
        else:
            differences += apart
    if plain is not None:
        apart = ModelScores(judge.server, texts, reference).compare(plain.server)
        pairs.append(_pair("with and without drafts", apart))
        differences += [amount for amount in apart if amount <= CONTRADICTION]
    gaps = [gap(scored) for scored in reference.values()]
    tolerance = max(LEAST_TOLERANCE, 2 * max(differences, default=0), SPACINGS * spacing(gaps))
    relative = math.sqrt(float(np.mean(np.square(differences)))) if differences else 0.0
    return Noise(pairs, min(tolerance, MOST_NOISE), relative, contradictions)


@dataclass(frozen=True)
class ModelScores:
    """What a server says of a few places of texts, by which another one is known to have the same
    model."""

    server: AuditedServer
    texts: Sequence[ServerAnswer]
    scores: ScoresByPlace

    @classmethod
    def ask(
        cls, server: AuditedServer, prompts: Sequence[Sequence[int]], gen_len: int
    ) -> ModelScores:
        """Of greedy answers to the first prompts. Raises NoScores if it says none."""
        server.next_token(prompts[0])
        texts = server.answers(prompts[:NUM_NOISE_TEXTS], gen_len)
        return cls(server, texts, _one_by_one(server, texts, 1))

    def compare(self, server: AuditedServer) -> list[float]:
        """By how much another server differs at these places. Raises ValueError, naming it, if it
        has another model, and NoScores if it says no log-probabilities."""
        apart = differences_of(self.scores, _one_by_one(server, self.texts, 1))
        median = statistics.median(apart)
        if median > MOST_NOISE:
            raise ValueError(
                f"{server.connection.flag} serves another model than "
                f"{self.server.connection.option}: its log-probabilities of the same places "
                f"differ by {median:.2f}"
            )
        return apart


def _ways(judge: Judge, concurrency: int) -> Iterator[tuple[str, Way]]:
    server = judge.server
    yield TOKEN, lambda texts: _one_by_one(server, texts, 1)
    yield TOKEN + COLD, lambda texts: _one_by_one(server, texts, 1, NUM_COLD_PLACES, is_cold=True)
    yield TOKEN + OTHERS, lambda texts: _one_by_one(server, texts, max(2, concurrency))
    if judge.by_text:
        yield TEXT, lambda texts: _whole(server, texts, 1)
        yield TEXT + OTHERS, lambda texts: _whole(server, texts, max(2, concurrency))


def _one_by_one(
    server: AuditedServer,
    texts: Sequence[ServerAnswer],
    concurrency: int,
    most: int = NUM_NOISE_PLACES,
    is_cold: bool = False,
) -> ScoresByPlace:
    places = [(t, i) for t, text in enumerate(texts) for i in spread(len(text.output_ids), most)]

    def ask(t: int, i: int) -> ScoredToken:
        ids = texts[t].text_ids[: len(texts[t].prompt_ids) + i]
        return server.next_token(ids, salt=server.new_salt() if is_cold else None)

    jobs = [lambda t=t, i=i: ask(t, i) for t, i in places]
    return dict(zip(places, together(jobs, concurrency), strict=True))


def _whole(server: AuditedServer, texts: Sequence[ServerAnswer], concurrency: int) -> ScoresByPlace:
    jobs = [
        lambda text=text: server.score_text(text.text_ids, len(text.prompt_ids)) for text in texts
    ]
    scored = together(jobs, concurrency)
    return {(t, i): one for t, found in enumerate(scored) for i, one in enumerate(found)}


def differences_of(base: ScoresByPlace, other: ScoresByPlace) -> list[float]:
    """By how much the gap between the two likeliest tokens of `base` differs."""
    found = list[float]()
    for place, scored in base.items():
        if place not in other:
            continue
        first, second = sorted(scored.logprobs, key=lambda token: -scored.logprobs[token])[:2]
        theirs = other[place].logprobs
        least = min(theirs.values())
        apart = theirs.get(first, least) - theirs.get(second, least)
        found.append(abs(apart - (scored.logprobs[first] - scored.logprobs[second])))
    return found


def _pair(name: str, differences: Sequence[float]) -> NoisePair:
    return NoisePair(
        ways=name,
        num_places=len(differences),
        median=float(np.median(differences)) if differences else 0.0,
        largest=max(differences, default=0.0),
    )


def spacing(gaps: Sequence[float]) -> float:
    """The spacing of logits of which all these gaps are multiples, as of bfloat16 ones; 0 if none
    is visible."""
    for power in range(1, FINEST, -1):
        step = 2.0**power
        if all(abs(value / step - round(value / step)) < step / 100 for value in gaps):
            return step
    return 0.0
