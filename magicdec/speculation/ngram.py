"""Prompt lookup: drafts what followed the newest tokens where they occurred before, in the prompt,
the output or a corpus. It needs no model and no cache, and drafts nothing without evidence.
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
from magicdec.speculation.suffix_index import Lookup, LookupRates, SuffixIndex

MARGIN = 1.03  # expected speedup of a step that drafts


class NgramDrafter(Drafter):
    """The lookup is in the host phase. It writes its result to a device tensor with one line for
    each row of the cache, from which `propose` reads."""

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
        """None, powers of 2, and the most."""
        return sorted({0, self.max_gamma, *(1 << n for n in range(self.max_gamma.bit_length()))})

    def plan(
        self,
        requests: Sequence[Request],
        gamma: int,
        draft_length: DraftLength,
        can_join: bool = False,
    ) -> DraftPlan:
        survivals = self.look_up(requests, min(gamma, self.max_gamma))
        count, _ = best_length(survivals, draft_length.cost or LOOKUP, can_join)
        counts = [min(count, len(each)) for each in survivals]
        return DraftPlan(counts, counts)

    def look_up(self, requests: Sequence[Request], max_gamma: int) -> list[list[float]]:
        """Look up at most so many tokens of each request. Returns the probabilities that each of
        them and all before it are right."""
        self.proposals = {}
        for request in requests:
            assert request.row is not None, "an admitted request has a row"
            lookup = self.lookups[request.row]
            lookup.extend(request.output_ids[lookup.length - len(request.prompt_ids) :])
            self.proposals[request.row] = lookup.propose(max_gamma)
        return [[p for _, p in proposal] for proposal in self.proposals.values()]

    def prepare(self, requests: Sequence[Request], gamma: int) -> int:
        """Upload what was planned. Rows with fewer tokens are padded with their newest one."""
        rows = [request.row for request in requests if request.row is not None]
        known = [[token for token, _ in self.proposals.get(row, ())] for row in rows]
        tokens = [
            [*each, *[request.last_token] * gamma][:gamma]
            for request, each in zip(requests, known, strict=True)
        ]
        device = self._tokens.device
        self._tokens[:, :gamma].index_copy_(0, upload(rows, device), upload(tokens, device))
        return 1

    def propose(self, batch: DeviceBatch, shape: DraftShape) -> Proposal:
        return Proposal(self._tokens[batch.rows.index, : shape.gamma])


def best_length(
    survivals: Sequence[Sequence[float]], cost: DraftCost, can_join: bool = False
) -> tuple[int, float]:
    """How many tokens to verify so that a step emits most tokens in its time, and how many times as
    fast as decoding that is; (0, 1.0) if it is not faster by a margin.

    `survivals` are, for each row, the probabilities that it accepts its first 1, 2, ... tokens.
    What counts are the tokens of a row on average if rows `can_join`, else of the longest."""
    best = MARGIN
    count = 0
    expected = 1.0
    tokens = 0.0
    for number in range(1, 1 + max(map(len, survivals), default=0)):
        of_rows = [p[number - 1] for p in survivals if number <= len(p)]
        expected += sum(of_rows) / len(survivals)
        tokens += len(of_rows) / len(survivals) if can_join else 1
        speed = expected / cost(tokens)
        if speed > best:
            best = speed
            count = number
    return (count, best) if count else (0, 1.0)
