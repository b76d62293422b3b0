"""What the target would write and what the draft would propose, without models: at each position of
the output the rank that the target's token has among the draft's candidates.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

from magicdec.pipelined_speculation.messages import Candidates, Draft, Launch
from magicdec.simulator.machine import Flight

SPACING = 16  # between the tokens of two positions: the candidates of one are different tokens


@dataclass(frozen=True)
class Text:
    """The token after position p has rank `ranks[p - first]` among the draft's candidates there,
    -1 if it is none of them. `probabilities` are the draft's, the same at every place."""

    first: int  # the position of the last prompt token
    ranks: Sequence[int]
    probabilities: Sequence[float]

    def predict(self, launch: Launch) -> tuple[int, ...]:
        """The target's next tokens after the last rows, as if each stood on the target's text. What
        stands elsewhere is never committed."""
        outputs = launch.positions[launch.num_rows - launch.num_outputs :]
        return tuple((position + 1) * SPACING for position in outputs)

    def propose(self, newest: int, path: Sequence[int]) -> Candidates:
        """The draft's candidates after a path that follows the committed position `newest`."""
        position = newest + len(path) + 1
        is_right = all(token == (newest + i) * SPACING for i, token in enumerate(path, 1))
        place = position - 1 - self.first
        rank = self.ranks[place] if is_right and place < len(self.ranks) else -1
        right = position * SPACING
        return tuple(
            (right if index == rank else right + 1 + index, probability)
            for index, probability in enumerate(self.probabilities)
        )


@dataclass(frozen=True)
class TextModels:
    """A target and a draft that know the text of each request."""

    texts: Sequence[Text]

    def home(self, flight: Flight) -> Sequence[int] | None:
        return None if flight.is_void else self.texts[flight.launch.request].predict(flight.launch)

    def propose(self, draft: Draft, output: Sequence[int]) -> list[Candidates]:
        text = self.texts[draft.request]
        return [text.propose(text.first + len(output), path) for path in draft.paths]


def draw_ranks(acceptance: Sequence[float], length: int, seed: int) -> list[int]:
    """`acceptance[k]` is the probability that the draft's candidate k is the target's token."""
    chooser = random.Random(seed)
    ranks = range(len(acceptance))
    weights = [*acceptance, max(0.0, 1 - sum(acceptance))]
    return chooser.choices([*ranks, -1], weights, k=length)


def replay_ranks(steps: Sequence[tuple[int, int]], length: int, seed: int) -> list[int]:
    """The ranks that recorded steps of one sequence tell, each with its drafted and accepted
    tokens: a step that accepted n of its drafts had n right ones and then, unless it accepted all,
    a wrong one. Of the token that follows when all were accepted nothing is known; it is right as
    often as the others. The steps are repeated if they are shorter than `length`."""
    num_judged = sum(min(accepted + 1, drafted) for drafted, accepted in steps)
    if num_judged == 0:
        raise ValueError("no step of the record drafted anything")
    chooser = random.Random(seed)
    rate = sum(accepted for _, accepted in steps) / num_judged
    ranks: list[int] = []
    for drafted, accepted in cycle(steps):
        ranks += [0] * accepted
        if len(ranks) >= length:
            return ranks[:length]
        is_wrong = accepted < drafted or chooser.random() >= rate
        ranks.append(-1 if is_wrong else 0)
    raise AssertionError("a cycle has no end")
