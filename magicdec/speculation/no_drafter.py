"""NoDrafter: the drafter of plain decoding, which drafts nothing."""

from __future__ import annotations

from collections.abc import Sequence

from magicdec.runner.device_batch import DeviceBatch
from magicdec.runner.request import Request
from magicdec.runner.sampling.model_tokens import Proposal
from magicdec.speculation.draft_length import DraftLength
from magicdec.speculation.drafter import Drafter, DraftPlan, DraftSetup, DraftShape


class NoDrafter(Drafter):
    has_probabilities = False

    @classmethod
    def build(cls, setup: DraftSetup) -> NoDrafter:
        return cls()

    def plan(
        self,
        requests: Sequence[Request],
        gamma: int,
        draft_length: DraftLength,
        can_join: bool = False,
    ) -> DraftPlan:
        return DraftPlan([0] * len(requests), ())

    def propose(self, batch: DeviceBatch, shape: DraftShape) -> Proposal:
        raise AssertionError("its plans have no drafts")
