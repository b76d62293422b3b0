"""LogitsRecorder: logits of steps, kept so that another judge can tell how large their errors are.

Steps and rows are chosen at random beforehand, within a bound on memory.

Shapes: R kept rows of a batch, K drafts, V vocabulary rows on this rank.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.request import Request
from magicdec.runner.sampling.model_tokens import Proposal
from magicdec.runner.sampling.verification import Verdicts

MOST_BYTES = 1 << 26  # of the logits of a pass over a batch, on each rank
LEAST_STEPS = 8  # for which there is room: where rows are many, only some of them are kept


@dataclass(frozen=True)
class JudgedStep:
    """A step whose drafts have been judged, before its tokens are part of the `requests`, with the
    logits of the rows at some `places` after the newest token and each draft."""

    requests: Sequence[Request]
    proposal: Proposal
    verdicts: Verdicts
    places: Sequence[int]
    logits: Tensor  # [R, K+1, V]


class StepRecorder(Protocol):
    """A keeper of the logits of steps, which it gets before their tokens are part of requests."""

    rows: tuple[int, ...]
    """Those of which it may want any."""

    def wants(self, rows: Sequence[int]) -> list[int]:
        """The places among a step's `rows` to `keep`; empty if the step is not kept."""

    def keep(self, step: JudgedStep) -> None:
        """Keep the rows at the step's places. Their logits must not change later; the proposal
        may."""


@dataclass(frozen=True)
class KeptStep:
    """A step of some rows: drafts, and this rank's logits after the newest token and each draft."""

    requests: tuple[Request, ...]
    num_output: tuple[int, ...]  # tokens that each request had emitted before
    verdicts: Verdicts
    logits: Tensor  # [R, K+1, V]
    drafts: Tensor  # int64 [R, K]
    counts: tuple[int, ...]  # how many of the K are drafts of a row, and not padding


@dataclass
class LogitsRecorder:
    """A keeper of steps of `rows`, each with probability `share`, while `is_watching` and memory
    lasts. All ranks keep the same."""

    rows: tuple[int, ...]
    share: float
    chance: random.Random
    steps: list[KeptStep] = field(default_factory=list)
    num_seen: int = 0  # steps of these rows
    num_bytes: int = 0
    is_watching: bool = False

    @classmethod
    def of(
        cls,
        runner: ModelRunner,
        num_rows: int,
        gamma: int,
        num_steps: int,
        seed: str,
        max_gamma: int,
    ) -> LogitsRecorder:
        """A recorder of at most `num_steps` steps of `num_rows` rows with at most `gamma`
        drafts. Passes of equal seed and `max_gamma` keep the same rows."""
        chance = random.Random(seed)
        (first, last) = runner.model.head_rows
        token_bytes = (last - first) * runner.cache.k.element_size()
        room = MOST_BYTES // (LEAST_STEPS * (1 + max_gamma) * token_bytes)
        rows = chance.sample(range(num_rows), max(1, min(num_rows, room)))
        most_bytes = len(rows) * (1 + gamma) * token_bytes * max(1, num_steps)
        return cls(tuple(sorted(rows)), min(1.0, MOST_BYTES / most_bytes), chance)

    def wants(self, rows: Sequence[int]) -> list[int]:
        if not self.is_watching:
            return []
        places = [place for place, row in enumerate(rows) if row in self.rows]
        if not places:
            return []
        self.num_seen += 1
        is_kept = self.chance.random() < self.share and self.num_bytes < MOST_BYTES
        return places if is_kept else []

    def keep(self, step: JudgedStep) -> None:
        ids = step.proposal.ids
        counts = step.proposal.counts or [ids.shape[1]] * len(step.requests)
        requests = tuple([step.requests[place] for place in step.places])
        is_whole = len(requests) == len(step.requests)
        kept = KeptStep(
            requests,
            tuple([len(request.output_ids) for request in requests]),
            step.verdicts if is_whole else step.verdicts.at(step.places),
            step.logits,
            ids.clone() if is_whole else ids[step.places],
            tuple([counts[place] for place in step.places]),
        )
        self.steps.append(kept)
        self.num_bytes += step.logits.numel() * step.logits.element_size()
