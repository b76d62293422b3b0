"""AcceptanceLengths: acceptance by context and number of draft tokens. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from magicdec.records.intervals import interval

EVERYWHERE = 0  # the context of lengths that were given without one


@dataclass(frozen=True)
class AcceptanceLengths:
    """Acceptance lengths by context and by draft tokens of a step.

    Each is a tuple: the length over all texts, then those without each text, from which intervals
    follow; only the first where texts are not known. Between two contexts lengths are linear in the
    logarithm of the context. Outside of them the nearest context's hold, so that a single context
    stands for every one.
    """

    by_context: Mapping[int, Mapping[int, tuple[float, ...]]]

    @classmethod
    def flat(cls, lengths: Mapping[int, float]) -> AcceptanceLengths:
        """Lengths by draft tokens that hold at every context."""
        return cls({EVERYWHERE: {gamma: (length,) for gamma, length in lengths.items()}})

    @cached_property
    def contexts(self) -> list[int]:
        return sorted(self.by_context)

    @cached_property
    def gammas(self) -> list[int]:
        """The numbers of draft tokens that every context has, in rising order."""
        return sorted(set.intersection(*(set(by_gamma) for by_gamma in self.by_context.values())))

    @property
    def shortest(self) -> AcceptanceLengths:
        """The lengths of the shortest context, held at every one."""
        first = self.contexts[0]
        return AcceptanceLengths({first: self.by_context[first]})

    def estimates(self, context: int, gamma: int) -> tuple[float, ...]:
        """The length at a context over all texts, then without each. Of two contexts the texts
        left out are those of the same place; with different numbers of texts there are none."""
        nearest = min(max(context, self.contexts[0]), self.contexts[-1])
        if nearest in self.by_context:
            return self.by_context[nearest][gamma]
        low = max(c for c in self.contexts if c < context)
        high = min(c for c in self.contexts if c > context)
        below = self.by_context[low][gamma]
        above = self.by_context[high][gamma]
        share = math.log2(context / low) / math.log2(high / low)
        num_known = len(below) if len(below) == len(above) else 1
        pairs = zip(below[:num_known], above[:num_known], strict=True)
        return tuple(a + share * (b - a) for a, b in pairs)

    def length(self, context: int, gamma: int) -> float:
        return self.estimates(context, gamma)[0]

    def interval(self, context: int, gamma: int) -> list[float] | None:
        """The 95 % interval over texts of a length; None where it is not known."""
        return interval(np.array(self.estimates(context, gamma)), 1, 1 + gamma)

    def to_dict(self) -> dict[str, Any]:
        """For a record: lengths by context and draft tokens, or by draft tokens alone."""
        lengths = {
            str(context): {str(gamma): by_gamma[gamma][0] for gamma in sorted(by_gamma)}
            for context, by_gamma in sorted(self.by_context.items())
        }
        return lengths.get(str(EVERYWHERE), lengths)
