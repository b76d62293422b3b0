"""StepEstimate: the seconds of decoding steps, predicted from shapes and the speed of the machine.
`--gamma auto` starts from it where a machine file is given. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from magicdec.cost_model.costs import Deployment


@dataclass(frozen=True)
class StepEstimate:
    """`draft` is the model that drafts: the target itself in self-speculation, None if no model
    drafts. `budget` is the number of committed tokens that it reads at most; None for all."""

    target: Deployment
    draft: Deployment | None
    budget: int | None
    most_draft_tokens: int

    def __call__(self, rows: int, context: int) -> list[float]:
        """Seconds of a step of `rows` with `context` cached tokens each, and 0, 1, ..., most draft
        tokens."""
        read = context if self.budget is None else min(context, self.budget)
        seconds, draft_s = [self.target.seconds(rows, 1, context)], 0.0
        for count in range(1, self.most_draft_tokens + 1):
            if self.draft is not None:
                draft_s += self.draft.seconds(rows, 1, read + count - 1)
            seconds.append(draft_s + self.target.seconds(rows, count + 1, context))
        return seconds
