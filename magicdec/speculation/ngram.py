"""Prompt lookup: drafts the tokens that followed an earlier occurrence of the newest ones in
prompt, output or corpus.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from magicdec.kv.cache import upload
from magicdec.runner.device_batch import DeviceBatch
from magicdec.runner.request import Request
from magicdec.runner.sampling.model_tokens import Proposal
from magicdec.speculation.draft_length import LOOKUP, DraftCost, DraftLength
from magicdec.speculation.drafter import Drafter, DraftPlan, DraftSetup, DraftShape
from magicdec.speculation.suffix_index import (
    LEAST_SURVIVAL,
    Lookup,
    LookupRates,
    SuffixIndex,
)

MARGIN = 1.03  # expected speedup of a step that drafts


class NgramDrafter(Drafter):
    """A drafter by prompt lookup on the host. `propose` reads a device tensor with a line for
    each row."""

    has_probabilities = False

    def __init__(
        self, num_rows: int, max_gamma: int, device: torch.device, corpus: Sequence[int] = ()
    ) -> None:
        self.max_gamma = max_gamma
        self.rates = LookupRates()
        self.corpus = SuffixIndex(corpus, len(corpus)) if corpus else None
        self.lookups: dict[int, Lookup] = {}  # by row
        self.proposals: dict[int, list[tuple[int, float]]] = {}  # of the last plan, by row
        self._tokens = torch.zeros(num_rows, max_gamma, dtype=torch.int64, device=device)

    @classmethod
    def build(cls, setup: DraftSetup) -> NgramDrafter:
        runner = setup.runner
        max_gamma = setup.decoding.max_gamma
        return cls(runner.num_rows, max_gamma, runner.device, setup.corpus)

    def admit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            assert request.row is not None, "an admitted request has a row"
            self.lookups[request.row] = Lookup(self.corpus, self.rates)
            self.lookups[request.row].extend(request.prompt_ids)

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.lookups.pop(row, None)

    def lengths(self, choices: Sequence[int]) -> Sequence[int]:
        return sorted({0, self.max_gamma, *(1 << n for n in range(self.max_gamma.bit_length()))})

    def plan(
        self,
        requests: Sequence[Request],
        gamma: int,
        draft_length: DraftLength,
        can_join: bool = False,
    ) -> DraftPlan:
        most = min(gamma, self.max_gamma)
        if draft_length.is_whole:
            found = [len(proposal) for proposal in self.look_up(requests, most, least=0.0)]
            return DraftPlan(found, found)
        survivals = self.look_up(requests, most)
        count, _ = best_length(survivals, draft_length.cost or LOOKUP, can_join)
        counts = [min(count, len(survival)) for survival in survivals]
        return DraftPlan(counts, counts)

    def look_up(
        self, requests: Sequence[Request], max_gamma: int, least: float = LEAST_SURVIVAL
    ) -> list[list[float]]:
        """Look up at most `max_gamma` tokens of each request. Returns their survival: the
        probabilities that a token and all before it are right, which are no less than `least`."""
        self.proposals = {}
        for request in requests:
            assert request.row is not None, "an admitted request has a row"
            lookup = self.lookups[request.row]
            lookup.extend(request.output_ids[lookup.length - len(request.prompt_ids) :])
            self.proposals[request.row] = lookup.propose(max_gamma, least)
        return [[p for _, p in proposal] for proposal in self.proposals.values()]

    def prepare(self, requests: Sequence[Request], gamma: int) -> int:
        """Upload the planned tokens, padded with the row's newest."""
        rows = [request.row for request in requests if request.row is not None]
        known = [[token for token, _ in self.proposals.get(row, ())] for row in rows]
        tokens = [
            [*proposed, *[request.last_token] * gamma][:gamma]
            for request, proposed in zip(requests, known, strict=True)
        ]
        device = self._tokens.device
        self._tokens[:, :gamma].index_copy_(0, upload(rows, device), upload(tokens, device))
        return 1

    def propose(self, batch: DeviceBatch, shape: DraftShape) -> Proposal:
        return Proposal(self._tokens[batch.rows.index, : shape.gamma])


def best_length(
    survivals: Sequence[Sequence[float]], cost: DraftCost, can_join: bool = False
) -> tuple[int, float]:
    """The number of tokens to verify for most tokens over time, and its speedup over decoding;
    (0, 1.0) within the margin.

    `survivals` are by row. The cost is that of the mean number of tokens if rows `can_join`,
    else of the longest."""
    best = MARGIN
    count = 0
    expected = 1.0
    tokens = 0.0
    for number in range(1, 1 + max(map(len, survivals), default=0)):
        chances = [p[number - 1] for p in survivals if number <= len(p)]
        expected += sum(chances) / len(survivals)
        tokens += len(chances) / len(survivals) if can_join else 1
        speed = expected / cost(tokens)
        if speed > best:
            best = speed
            count = number
    return (count, best) if count else (0, 1.0)
