"""Prompt lookup: drafts what followed the newest tokens where they occurred before, in the prompt,
the output or a corpus. It needs no model and no cache, and drafts nothing without evidence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from magicdec.config.tree_shape import TreeShape
from magicdec.device_batch import DeviceBatch
from magicdec.drafting.drafter import Drafter, DraftPlan, DraftSetup
from magicdec.drafting.suffix_index import Lookup, Rates, SuffixIndex
from magicdec.kv.cache import upload
from magicdec.request import Request
from magicdec.sampling.model_tokens import Proposal

TOKEN_COST = 0.15  # time of one more token of a verification, in decode steps, if it is not known
STEP_COST = 0.05  # what a verification takes more than its tokens
MARGIN = 1.03  # expected speedup of a step that drafts


class NgramDrafter(Drafter):
    """The lookup is in the host phase. It writes its result to a device tensor with one line for
    each row of the cache, from which `propose` reads."""

    has_probabilities = False

    def __init__(
        self,
        num_rows: int,
        most: int,
        device: torch.device,
        corpus: Sequence[int] = (),
        by_row: bool = False,
    ) -> None:
        """With `by_row`, a verification takes other numbers of tokens from each row, unpadded."""
        self.most, self.rates, self.by_row = most, Rates(), by_row
        self.corpus = SuffixIndex(corpus, len(corpus)) if corpus else None
        self.lookups: dict[int, Lookup] = {}  # by row
        self.proposals: dict[int, list[tuple[int, float]]] = {}  # of the last plan, by row
        self._tokens = torch.zeros(num_rows, most, dtype=torch.int64, device=device)

    @classmethod
    def build(cls, setup: DraftSetup) -> NgramDrafter:
        runner = setup.runner
        most = setup.decoding.most_draft_tokens
        by_row = runner.executor is not None
        return cls(runner.num_rows, most, runner.device, setup.corpus, by_row)

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
        return sorted({0, self.most, *(1 << n for n in range(self.most.bit_length()))})

    def plan(
        self, requests: Sequence[Request], num_draft_tokens: int, token_cost: float | None = None
    ) -> DraftPlan:
        survivals = self.look_up(requests, min(num_draft_tokens, self.most))
        cost = TOKEN_COST if token_cost is None else token_cost
        counts, _ = best_lengths(survivals, cost, self.by_row)
        return DraftPlan(counts, counts)

    def look_up(self, requests: Sequence[Request], most: int) -> list[list[float]]:
        """Look up at most so many tokens of each request. Returns the probabilities that each of
        them and all before it are right."""
        self.proposals = {}
        for request in requests:
            assert request.row is not None, "an admitted request has a row"
            lookup = self.lookups[request.row]
            lookup.extend(request.output_ids[lookup.length - len(request.prompt_ids) :])
            self.proposals[request.row] = lookup.propose(most)
        return [[p for _, p in proposal] for proposal in self.proposals.values()]

    def prepare(self, requests: Sequence[Request], num_draft_tokens: int) -> int:
        """Upload what was planned. Rows with fewer tokens are padded with their newest one."""
        rows = [request.row for request in requests if request.row is not None]
        known = [[token for token, _ in self.proposals.get(row, ())] for row in rows]
        tokens = [
            [*each, *[request.last_token] * num_draft_tokens][:num_draft_tokens]
            for request, each in zip(requests, known, strict=True)
        ]
        device = self._tokens.device
        self._tokens[:, :num_draft_tokens].index_copy_(
            0, upload(rows, device), upload(tokens, device)
        )
        return 1

    def propose(
        self,
        batch: DeviceBatch,
        num_draft_tokens: int,
        pending: int = 1,
        tree: TreeShape | None = None,
    ) -> Proposal:
        assert tree is None, "refused before"
        return Proposal(self._tokens[batch.rows.index, :num_draft_tokens])


def best_lengths(
    survivals: Sequence[Sequence[float]],
    token_cost: float,
    by_row: bool,
    step_cost: float = STEP_COST,
) -> tuple[list[int], float]:
    """How many tokens of each row to verify so that a step emits most tokens in its time, and how
    many times as fast as decoding that is; none and 1.0 if it is not faster by a margin.

    `survivals` are, for each row, the probabilities that it accepts its first 1, 2, ... tokens;
    they fall. A step takes 1 + step_cost decode steps, and token_cost for one more token of every
    row. Unless `by_row`, rows with fewer tokens are padded, which costs the same."""
    num_rows, counts = len(survivals), [0] * len(survivals)
    # What is added at a time, the likeliest first: a token of one row, or the next one of all.
    if by_row:
        tokens = [(p, [row]) for row, each in enumerate(survivals) for p in each]
        tokens.sort(key=lambda token: -token[0])
        token_cost /= num_rows
    else:
        longest = max(map(len, survivals), default=0)
        having = [[r for r, p in enumerate(survivals) if n < len(p)] for n in range(longest)]
        tokens = [(sum(survivals[r][n] for r in rows), rows) for n, rows in enumerate(having)]
    best, number, expected = MARGIN, 0, 1.0
    for num_taken, (gain, _) in enumerate(tokens, 1):
        expected += gain / num_rows
        speed = expected / (1 + step_cost + token_cost * num_taken)
        if speed > best:
            best, number = speed, num_taken
    for _, rows in tokens[:number]:
        for row in rows:
            counts[row] += 1
    return counts, best if number else 1.0
