"""A drafter that takes tokens from prompt lookup where it is the more promising source, else from a
model.

In a step lookup drafts alone for all rows, or the model drafts, and rows whose lookup promises more
take its tokens, but no more than the model drafts unless rows of different lengths share a forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul

import torch
import torch.nn.functional as F

from magicdec.kv.cache import BatchRows, Lengths, upload
from magicdec.names import NGRAM_AND
from magicdec.runner.device_batch import DeviceBatch
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.request import Request
from magicdec.runner.sampling.model_tokens import Proposal
from magicdec.speculation.draft_length import LOOKUP, DraftCost, DraftLength
from magicdec.speculation.drafter import Drafter, DraftPlan, DraftSetup, DraftShape, make_drafter
from magicdec.speculation.forecast import Acceptance
from magicdec.speculation.ngram import NgramDrafter, best_length

DRAFT_COST = 0.3  # time of a draft forward, in decode steps, if it is not known
LOOKUP_ALONE = 0  # as `pending`: the model does not draft


class MixedDrafter(Drafter):
    """A drafter of prompt lookup and a model."""

    def __init__(self, target: ModelRunner, lookup: NgramDrafter, model: Drafter) -> None:
        self.target = target
        self.lookup = lookup
        self.model = model
        self.draft_kv = model.draft_kv
        self.can_capture = model.can_capture
        self.observers = model.observers
        self._choices: Sequence[int] = ()  # numbers of tokens that the model may be asked for
        self._uses_model = True
        self._is_looked_up = dict[int, bool]()
        self._model_tokens = lookup.max_gamma  # the model drafts no more
        # For each row of the cache: whether its drafts are those of a lookup.
        self._looked_up = torch.zeros(target.num_rows, dtype=torch.bool, device=target.device)

    @classmethod
    def build(cls, setup: DraftSetup) -> MixedDrafter:
        decoding = setup.decoding
        assert decoding.drafter is not None, "the run drafts"
        model = make_drafter(decoding.drafter.removeprefix(NGRAM_AND), setup)
        lookup = NgramDrafter.build(setup)
        return cls(setup.runner, lookup, model)

    def admit(self, requests: Sequence[Request]) -> None:
        self.lookup.admit(requests)
        self.model.admit(requests)
        self.draft_kv = self.model.draft_kv
        # In drafts that are timed before the next plan:
        self._uses_model = True
        self._model_tokens = self.lookup.max_gamma

    def release(self, rows: Sequence[int]) -> None:
        self.lookup.release(rows)
        self.model.release(rows)

    def lengths(self, choices: Sequence[int]) -> Sequence[int]:
        self._choices = choices
        return sorted({*self.lookup.lengths(choices), *choices})

    def pendings(self, gamma: int) -> Sequence[int]:
        model_pending = self.model.pending if gamma in self._choices else ()
        return (LOOKUP_ALONE, *model_pending)

    def plan(
        self,
        requests: Sequence[Request],
        gamma: int,
        draft_length: DraftLength,
        can_join: bool = False,
    ) -> DraftPlan:
        """Compare a step of lookups alone with one of the model by expected tokens over time."""
        lookup_survivals = self.lookup.look_up(requests, self.lookup.max_gamma)
        cost = draft_length.cost or DraftCost(LOOKUP.step, LOOKUP.token + DRAFT_COST)
        lookup_cost = draft_length.lookup_cost or LOOKUP
        alone, worth = best_length(lookup_survivals, lookup_cost, can_join)
        plan = DraftPlan(
            [min(alone, len(probabilities)) for probabilities in lookup_survivals],
            [0] * len(requests),
        )
        self._uses_model = False
        if gamma == 0:
            return plan
        acceptance = draft_length.acceptance or Acceptance(gamma)
        model_survivals = [
            list(accumulate(acceptance.rates(request.request_id)[:gamma], mul))
            for request in requests
        ]
        if can_join:  # A token must bring more than its time would bring in a step of lookups.
            cut = [
                [p for p in probabilities if p > lookup_cost.token * worth]
                for probabilities in lookup_survivals
            ]
        else:
            cut = [probabilities[:gamma] for probabilities in lookup_survivals]
        takes = [sum(a) > sum(b) for a, b in zip(cut, model_survivals, strict=True)]
        chosen = [a if take else b for take, a, b in zip(takes, cut, model_survivals, strict=True)]
        expected = 1 + sum(map(sum, chosen)) / len(requests)
        more = sum(max(0, len(choice) - gamma) for choice in chosen) / len(requests)
        if alone and expected / (cost(gamma) + lookup_cost.token * more) < worth:
            return plan
        self._uses_model = True
        self._model_tokens = gamma if can_join else self.lookup.max_gamma
        rows = [request.row for request in requests if request.row is not None]
        self._is_looked_up = dict(zip(rows, takes, strict=True))
        judged = [0 if take else gamma for take in takes]
        return DraftPlan([len(choice) for choice in chosen], judged)

    def prepare(self, requests: Sequence[Request], gamma: int) -> int:
        self.lookup.prepare(requests, gamma)
        if not self._uses_model:
            return LOOKUP_ALONE
        rows = [request.row for request in requests if request.row is not None]
        looked_up = [self._is_looked_up.get(row, False) for row in rows]
        device = self.target.device
        self._looked_up.index_copy_(0, upload(rows, device), upload(looked_up, device, torch.bool))
        return self.model.prepare(requests, min(gamma, self._model_tokens))

    def propose(self, batch: DeviceBatch, shape: DraftShape) -> Proposal:
        """Tokens of lookups have a probability of 1."""
        ids = self.lookup.propose(batch, shape).ids
        one_hot = None
        if batch.sampling.draws is not None:
            one_hot = F.one_hot(ids, self.target.model.config.vocab_size).double()
        if shape.pending == LOOKUP_ALONE:
            return Proposal(ids, one_hot)
        count = min(shape.gamma, self._model_tokens)
        drafts = self.model.propose(batch, replace(shape, gamma=count))
        is_ours = self._looked_up[batch.rows.index].unsqueeze(1)
        probs = drafts.probabilities
        if self.draft_kv is not None:  # which holds other tokens than will be verified
            held = self.target.cache.lengths_of(batch.rows).plus(1)
            most = held.plus(count)
            kept = torch.where(is_ours[:, 0], held.tensor, most.tensor)
            self.draft_kv.rewind(batch.rows, Lengths(kept, most.bounds))
        room = shape.gamma - count  # is not verified in the rows of the model
        if probs is not None and one_hot is not None:
            probs = torch.where(is_ours.unsqueeze(2), one_hot, F.pad(probs, (0, 0, 0, room)))
        return Proposal(torch.where(is_ours, ids, F.pad(drafts.ids, (0, room))), probs)

    def commit(self, rows: BatchRows, lengths: Lengths) -> None:
        self.model.commit(rows, lengths)
